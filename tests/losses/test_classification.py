import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import references
from tests.mathematics import assert_close, finite_differences, random_batch, value_and_gradients
from tfdml import losses
from tfdml.layers import CosineProxies

CASES = {
    "am": (losses.AMSoftmaxLoss(), lambda y, c: references.am_softmax(y, c)),
    "am cars": (losses.AMSoftmaxLoss(20.0, 0.05), lambda y, c: references.am_softmax(y, c, 20.0, 0.05)),
    "am steep": (losses.AMSoftmaxLoss(64.0, 0.35), lambda y, c: references.am_softmax(y, c, 64.0, 0.35)),
    "am sum": (losses.AMSoftmaxLoss(reduction="sum"), lambda y, c: references.am_softmax(y, c, reduction="sum")),
    "norm": (losses.NormSoftmaxLoss(), lambda y, c: references.norm_softmax(y, c)),
    "norm flat": (losses.NormSoftmaxLoss(1.0), lambda y, c: references.norm_softmax(y, c, 1.0)),
    "norm sum": (losses.NormSoftmaxLoss(reduction="sum"), lambda y, c: references.norm_softmax(y, c, reduction="sum")),
}
every_case = pytest.mark.parametrize(("loss", "reference"), CASES.values(), ids=CASES)


def similarities(seed, size, classes):
    generator = np.random.default_rng(seed)
    return generator.integers(0, classes, size), generator.uniform(-1, 1, (size, classes)).astype("float32")


@every_case
@pytest.mark.parametrize(("size", "classes"), [(1, 2), (1, 1), (8, 3), (5, 40), (30, 2)])
def test_equals_the_formula(loss, reference, size, classes):
    for seed in range(4):
        labels, cosines = similarities(seed, size, classes)
        assert_close(loss(labels, cosines), reference(labels, cosines), floor=1e-12)


@every_case
@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_gradient_equals_finite_differences(loss, reference, mode):
    labels, cosines = similarities(3, 6, 5)
    value, (gradient,) = value_and_gradients(lambda c: loss(labels, c), cosines, mode=mode)
    (expected,) = finite_differences(lambda c: reference(labels, c), cosines)
    assert_close(value, reference(labels, cosines))
    assert_close(gradient, expected)


@every_case
@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_degenerate_similarities_are_finite(loss, reference, mode):
    labels, ones = tf.constant([0, 1, 2, 0]), np.ones((4, 3))

    def run(cosines):
        with tf.GradientTape() as tape:
            tape.watch(cosines)
            value = loss(labels, cosines)
        return value, tape.gradient(value, cosines)

    run = run if mode == "eager" else tf.function(run, jit_compile=True, autograph=False)
    for cosines in (0 * ones, ones, -ones, np.eye(4)[:, :3]):
        value, gradient = run(tf.constant(cosines, tf.float32))
        assert_close(value, reference(labels, cosines), floor=1e-12)
        assert_close(gradient, finite_differences(lambda c: reference(labels, c), cosines)[0], floor=1e-6)


@every_case
def test_one_class_teaches_nothing(loss, reference):
    value, (gradient,) = value_and_gradients(lambda c: loss([0, 0], c), [[0.3], [-0.8]])
    assert value == 0.0
    np.testing.assert_array_equal(gradient, np.zeros((2, 1)))


def test_confident_images_keep_their_digits():
    labels, cosines = [0], np.array([[1.0, -1.0, -1.0]], "float32")
    assert_close(losses.AMSoftmaxLoss(20.0, 0.0)(labels, cosines), references.am_softmax(labels, cosines, 20.0, 0.0))
    assert losses.AMSoftmaxLoss(20.0, 0.0)(labels, cosines) > 0


@every_case
@pytest.mark.parametrize("label", [3, -1, 2**40])
def test_label_without_a_proxy_cannot_pass_unseen(loss, reference, label):
    values = np.asarray(loss.call([0, label], np.zeros((2, 3), "float32")))
    assert np.isfinite(values[0])
    assert np.isnan(values[1])


def test_many_classes():
    labels, cosines = similarities(0, 120, 11318)
    value, (gradient,) = value_and_gradients(lambda c: losses.AMSoftmaxLoss()(labels, c), cosines)
    assert np.isfinite(value)
    assert np.all(np.isfinite(gradient))


def test_worked_examples_of_the_docstrings():
    cosines = np.array([[0.9, 0.1, -0.3]], "float32")
    assert_close(losses.AMSoftmaxLoss(20.0, 0.1)([0], cosines), references.am_softmax([0], cosines))
    assert_close(losses.NormSoftmaxLoss(1.0)([0], [[0.0, 0.0]]), np.log(2))


@pytest.mark.parametrize("rows", [(4,), (4, 3, 2)])
def test_something_other_than_class_similarities_is_refused(rows):
    with pytest.raises(ValueError, match="expected class similarities"):
        losses.AMSoftmaxLoss()([0, 1, 2, 0], np.zeros(rows, "float32"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.AMSoftmaxLoss(scale=0), "scale must be positive"),
        (lambda: losses.AMSoftmaxLoss(margin=-0.1), "margin must be at least 0 and at most 2"),
        (lambda: losses.NormSoftmaxLoss(scale=-1), "scale must be positive"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_gradient_through_cosines_reaches_embeddings_and_proxies():
    labels, x = random_batch(2, 6, 4, 5, unit=False)
    layer = CosineProxies(4)
    layer.build((None, 5))

    def value(embeddings, proxies):
        layer_proxies = proxies / np.linalg.norm(proxies, axis=1, keepdims=True)
        return references.am_softmax(labels, references.class_similarities(embeddings, layer_proxies))

    proxies = keras.ops.convert_to_numpy(layer.proxies)
    with tf.GradientTape() as tape:
        embeddings = tf.constant(x)
        tape.watch(embeddings)
        loss = losses.AMSoftmaxLoss()(labels, layer(embeddings))
    gradients = tape.gradient(loss, [embeddings, layer.proxies.value])
    assert_close(loss, value(x, proxies))
    for actual, expected in zip(gradients, finite_differences(value, x, proxies), strict=True):
        assert_close(actual, expected)
