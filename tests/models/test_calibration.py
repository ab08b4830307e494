"""What a learner measures on its training set before the first step, and its warning where that is left out."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.models.networks import coloured_batch, tiny_embedder
from tfdml.losses import ContrastiveLoss
from tfdml.models import MetricLearner
from tfdml.objectives import DensityAdaptivity


def make_learner(**arguments):
    learner = MetricLearner(tiny_embedder(), [ContrastiveLoss(), DensityAdaptivity(3, **arguments)])
    learner.compile(keras.optimizers.SGD(0.001))
    return learner


def densities(learner, x, labels):
    """Eq. 5 on the pooled features, slowly."""
    pooled = np.asarray(learner.embedder.represent(x, training=False)["pooled"], "float64")
    means = [pooled[labels == c].mean(0) for c in range(3)]
    return [np.mean([np.sum((v - means[c]) ** 2) for v in pooled[labels == c]]) for c in range(3)]


def step(learner):
    labels, x = coloured_batch()
    return learner.fit(x, labels, batch_size=len(x), verbose=0)


FORMS = {
    "a dataset": lambda x, y: tf.data.Dataset.from_tensor_slices((x, y)).batch(5),
    "a generator": lambda x, y: ((x[i : i + 5], y[i : i + 5]) for i in range(0, len(x), 5)),
    "a list": lambda x, y: [[x, y.reshape(-1, 1).tolist()]],
}


@pytest.mark.parametrize("form", FORMS)
def test_the_learner_measures_every_training_image(form):
    (labels, x), learner = coloured_batch(), make_learner()
    learner.calibrate(FORMS[form](x, labels))
    density = learner.objectives[1]
    assert density.calibrated
    np.testing.assert_allclose(density.measured_density, densities(learner, x, labels), rtol=1e-4)


@pytest.mark.slow
def test_fit_without_it_warns_of_what_is_missing():
    learner = make_learner()
    with pytest.warns(UserWarning, match=r"density_adaptivity is not calibrated .*eq. 6, not eq. 8.*learner.calibrate"):
        step(learner)
    assert not learner.objectives[1].calibrated


@pytest.mark.one_quick_case
@pytest.mark.parametrize("constraint", ["soft", "hard"])
def test_fit_after_it_does_not_warn_nor_does_a_learner_that_was_saved(constraint, tmp_path):
    (labels, x), learner = coloured_batch(), make_learner(constraint=constraint)
    learner.calibrate([(x, labels)])
    learner.save(tmp_path / "learner.keras")
    again = keras.saving.load_model(tmp_path / "learner.keras")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*calibrated")
        step(learner)
        step(again)


@pytest.mark.one_quick_case
@pytest.mark.parametrize("arguments", [{"constraint": None}, {"reference_density": [1.0, 2.0, 3.0]}])
def test_where_nothing_is_to_be_measured_nothing_is_warned_of(arguments):
    learner = make_learner(**arguments)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*calibrated")
        step(learner)
    learner.calibrate([])


def test_the_constraint_acts_once_it_is_measured():
    (labels, x), values = coloured_batch(), []
    for calibrated in (False, True):
        learner = make_learner()
        if calibrated:
            learner.calibrate([(x, labels)])
        learner.build((None, *x.shape[1:]))
        learner.objectives[1].target_density.assign([0.2, 0.5, 0.9])
        values.append(learner.evaluate(x, labels, batch_size=len(x), verbose=0, return_dict=True)["density_adaptivity"])
    assert values[0] < values[1]


@pytest.mark.parametrize(
    ("batches", "says"),
    [
        (lambda x, y: tf.data.Dataset.from_tensors((x, y)).repeat(), "never end"),
        (lambda x, y: [], "no batch"),
        (lambda x, y: [x], r"must be \(images, labels\)"),
        (lambda x, y: [(x, y + 7)], "labels must lie in"),
    ],
)
def test_what_cannot_be_measured_is_refused(batches, says):
    labels, x = coloured_batch()
    with pytest.raises(ValueError, match=says):
        make_learner().calibrate(batches(x, labels))
