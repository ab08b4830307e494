"""What every objective does with a batch that has a NaN, and with one that has no image."""

import numpy as np
import pytest

import tfdml
from tests.mathematics import public_classes, random_batch
from tfdml import losses, objectives

MAKE = {
    "CrossBatchMemory": lambda: objectives.CrossBatchMemory(losses.ContrastiveLoss(), size=8),
    "HeadwiseLoss": lambda: objectives.HeadwiseLoss(losses.RankedListLoss()),
    "HighOrderMomentLoss": lambda: objectives.HighOrderMomentLoss(losses.RankedListLoss(), orders=2, dim=8),
    "Matryoshka": lambda: objectives.Matryoshka(losses.RankedListLoss(), dims=[2, 6]),
    "MatryoshkaProxyLoss": lambda: objectives.MatryoshkaProxyLoss(losses.AMSoftmaxLoss(), 3, dims=[2, 6]),
    "MetricLoss": lambda: objectives.MetricLoss(losses.RankedListLoss()),
    "Prism": lambda: objectives.Prism(losses.ContrastiveLoss(), 3, size=8),
    "ProxyLoss": lambda: objectives.ProxyLoss(losses.AMSoftmaxLoss(), 3, drop_highest=0.3),
    **{
        name: lambda name=name: getattr(objectives, name)(num_classes=3)
        for name in ("CurricularFace", "DensityAdaptivity", "InstanceLoss", "LearnedMargin", "RegularizedSoftTriple")
    },
    "SphereFace2": lambda: objectives.SphereFace2(3),
}
NAMES = [name for name in public_classes(objectives) if name != "AutoWeight"]


def representations():
    vectors = {name: random_batch(1, 8, 3, 6)[1] for name in ("embedding", "projection", "pooled", "class")}
    vectors |= {f"detached_{name}": vectors[name] for name in ("embedding", "projection")}
    grid = random_batch(2, 8, 3, 24)[1]
    return {**vectors, "heads": grid.reshape(8, 4, 6), "feature_map": grid.reshape(8, 2, 2, 6)}


def value_of(objective, inputs, labels):
    if not objective.built:
        objective.build({name: (None, *x.shape[1:]) for name, x in inputs.items()})
    return float(objective(inputs, labels))


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_is_not_hidden(name):
    objective, labels = MAKE.get(name, getattr(objectives, name))(), random_batch(1, 8, 3, 6)[0]
    inputs = representations()
    assert np.isfinite(value_of(objective, inputs, labels))
    for x in inputs.values():
        x.reshape(8, -1)[3, 2] = np.nan
    assert np.isnan(value_of(objective, inputs, labels))


POLYNOMIAL = tfdml.kernels.Polynomial(2)
OTHER_FORMS = {
    "nearest": lambda: objectives.EntropySpread("nearest"),
    "polynomial": lambda: objectives.JointRepresentationSimilarity("embedding", POLYNOMIAL),
    "log_of_mean": lambda: objectives.EnergyConfusion("log_of_mean"),
}


@pytest.mark.parametrize("name", [*NAMES, *OTHER_FORMS])
def test_a_batch_without_images_costs_nothing(name):
    make = {**MAKE, **OTHER_FORMS}.get(name) or getattr(objectives, name)
    objective, inputs = make(), representations()
    value_of(objective, inputs, random_batch(1, 8, 3, 6)[0])
    empty = {key: x[:0] for key, x in inputs.items()}
    tau = 0.0 if name != "RegularizedSoftTriple" else float(objective.tau * objective.regularizer())
    assert value_of(objective, empty, np.zeros(0, "int64")) in (0.0, tau)
