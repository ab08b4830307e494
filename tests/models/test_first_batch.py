import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdml.errors import UserError
from tfdml.losses import ContrastiveLoss
from tfdml.models import Embedder, MetricLearner
from tfdml.models.first_batch import check_training_data

LABELS = np.repeat(np.arange(4), 3)
UNIT = np.random.default_rng(0).random((12, 8, 8, 3), "float32")
ADVICE = "takes pixels of 0 to 255 .*multiply images in 0..1 by 255"


def learner(scaling="tf"):
    backbone = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3)])
    made = MetricLearner(Embedder(backbone, embedding_dim=4, image_size=8, scaling=scaling), ContrastiveLoss())
    made.build((None, 8, 8, 3))
    made.compile("adam")
    return made


class Batches(keras.utils.PyDataset):
    def __init__(self, images):
        super().__init__()
        self.images = images

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.images, LABELS


FORMS = {
    "arrays": lambda images, labels=LABELS: (images, labels),
    "tensors": lambda images, labels=LABELS: (tf.constant(images), tf.constant(labels)),
    "tf.data": lambda images, labels=LABELS: (tf.data.Dataset.from_tensors((images, labels)),),
    "PyDataset": lambda images: (Batches(images),),
}


def warned(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [warning for warning in caught if "0 to 255" in str(warning.message)]


@pytest.mark.parametrize("form", FORMS)
def test_fit_warns_once_of_images_in_the_unit_range(form):
    made = learner()
    with pytest.warns(UserWarning, match=ADVICE) as caught:
        made.fit(*FORMS[form](UNIT), epochs=2, verbose=0)
    assert [warning.filename for warning in caught if "0 to 255" in str(warning.message)] == [__file__]
    assert not warned(lambda: made.fit(*FORMS[form](UNIT), epochs=1, verbose=0))
    assert not warned(lambda: made.predict(UNIT, verbose=0))


def test_a_largest_pixel_of_one_is_warned_of():
    assert warned(lambda: check(learner(), np.ones_like(UNIT)))
    assert not warned(lambda: check(learner(), 2 * np.ones_like(UNIT)))


def test_predict_warns_of_them_at_its_caller():
    (warning,) = warned(lambda: learner().predict(UNIT, verbose=0))
    assert "largest pixel of the first images is 0.99" in str(warning.message)
    (warning,) = warned(lambda: learner().embedder.predict(UNIT, verbose=0))
    assert warning.filename == __file__


def check(made, images, form="arrays"):
    x, y = (*FORMS[form](images), None)[:2]
    check_training_data(made.embedder, x, y, None, True)


@pytest.mark.parametrize("form", FORMS)
def test_other_images_are_no_cause_for_a_warning(form):
    made = learner()
    for images in (255 * UNIT, (255 * UNIT).astype("uint8"), 0 * UNIT):
        assert not warned(lambda images=images: check(made, images, form))
    assert warned(lambda: check(made, UNIT, form))


def test_backbones_with_a_range_of_their_own_take_any():
    for scaling in ("none", {"scale": [1, 1, 1], "offset": [0, 0, 0]}):
        made = learner(scaling)
        assert not warned(lambda made=made: check(made, UNIT))


def test_batches_of_integers_are_not_made_to_be_looked_at():
    def fail():
        raise AssertionError("read")
        yield

    spec = (tf.TensorSpec((None, 8, 8, 3), tf.uint8), tf.TensorSpec((None,), tf.int64))
    batches = tf.data.Dataset.from_generator(fail, output_signature=spec)
    check_training_data(learner().embedder, batches, None, None, True)


@pytest.mark.parametrize("form", ["arrays", "tensors", "tf.data"])
@pytest.mark.parametrize(
    ("labels", "message"), [(LABELS + 0.5, "0.5 is not a whole number"), (np.eye(4)[LABELS], "argmax")]
)
def test_fit_refuses_labels_that_are_no_class_ids(form, labels, message):
    with pytest.raises(UserError, match=message):
        learner().fit(*FORMS[form](255 * UNIT, labels), verbose=0)


def test_fit_asks_for_steps_of_batches_without_end():
    # Endless by its cardinality alone, so that a fit that accepts it fails and does not run forever.
    batches = tf.data.Dataset.from_tensors((255 * UNIT, LABELS))
    batches = batches.apply(tf.data.experimental.assert_cardinality(tf.data.experimental.INFINITE_CARDINALITY))
    with pytest.raises(UserError, match=r"never end: give fit steps_per_epoch=\.\.\."):
        learner().fit(batches, epochs=1)
    learner().fit(batches, epochs=1, steps_per_epoch=1, verbose=0)


def test_fit_does_not_warn_of_the_order_of_a_data_set():
    batches = tf.data.Dataset.from_tensors((255 * UNIT, LABELS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner().fit(batches, epochs=1, verbose=0)
