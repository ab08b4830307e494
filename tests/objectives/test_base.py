"""What every objective does with a batch that has a NaN, and what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.models.networks import images, tiny_embedder
from tests.support.mathematics import (
    assert_close,
    public_classes,
    random_batch,
)
from tfdml import losses, models, objectives
from tfdml.errors import UserError
from tfdml.mining import shares_a_label
from tfdml.objectives import MatryoshkaProxyLoss, ProxyLoss
from tfdml.objectives.terms import build_objectives, check_objectives

MAKE = {
    "AcrossViews": lambda: objectives.AcrossViews(losses.RankedListLoss()),
    "CrossBatchMemory": lambda: objectives.CrossBatchMemory(losses.ContrastiveLoss(), size=8),
    "HeadwiseLoss": lambda: objectives.HeadwiseLoss(losses.RankedListLoss()),
    "HighOrderMomentLoss": lambda: objectives.HighOrderMomentLoss(
        losses.RankedListLoss(), orders=2, dim=8
    ),
    "Matryoshka": lambda: objectives.Matryoshka(losses.RankedListLoss(), dims=[2, 6]),
    "MatryoshkaProxyLoss": lambda: objectives.MatryoshkaProxyLoss(
        losses.AMSoftmaxLoss(), 3, dims=[2, 6]
    ),
    "MetricLoss": lambda: objectives.MetricLoss(losses.RankedListLoss()),
    "Prism": lambda: objectives.Prism(losses.ContrastiveLoss(), 3, size=8),
    "ProxyLoss": lambda: objectives.ProxyLoss(losses.AMSoftmaxLoss(), 3, drop_highest=0.3),
    **{
        name: lambda name=name: getattr(objectives, name)(num_classes=3)
        for name in (
            "CurricularFace",
            "DensityAdaptivity",
            "InstanceLoss",
            "LearnedMargin",
            "RegularizedSoftTriple",
        )
    },
    "SphereFace2": lambda: objectives.SphereFace2(3),
}
NAMES = list(public_classes(objectives))


def representations():
    vectors = {
        name: random_batch(1, 8, 3, 6)[1] for name in ("embedding", "projection", "pooled", "class")
    }
    vectors["text_embedding"] = random_batch(3, 8, 3, 6)[1]
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


MEMORY, FACE = objectives.CrossBatchMemory, losses.AMSoftmaxLoss()
REFUSED = [
    ("own pairs", lambda: MEMORY(FACE)),
    ("own pairs", lambda: MEMORY(keras.losses.MeanSquaredError())),
    (
        "vectors",
        lambda: MEMORY(losses.ContrastiveLoss(), representation="map").build(
            {"map": (None, 2, 2, 3)}
        ),
    ),
    ("one label", lambda: MEMORY(losses.ContrastiveLoss(), 3).as_labels(np.zeros((2, 3), "int64"))),
    ("label_columns", lambda: MEMORY(losses.ContrastiveLoss(), 3, label_columns=3)),
    (
        "label_columns",
        lambda: MEMORY(losses.ContrastiveLoss(positives=shares_a_label), 3).as_labels(np.eye(3)),
    ),
    (
        "two representations",
        lambda: objectives.SoftmaxAcrossViews(views=("embedding", "embedding")),
    ),
    ("anchors with one another", lambda: objectives.AcrossViews(losses.AngularLoss())),
    ("over pairs", lambda: objectives.AcrossViews(FACE)),
    (
        "of one size",
        lambda: objectives.SoftmaxAcrossViews().build(
            {"embedding": (9, 4), "text_embedding": (9, 5)}
        ),
    ),
    (
        "dimensions",
        lambda: MatryoshkaProxyLoss(FACE, 3, [2, 6])({"embedding": np.ones((2, 5))}, [0, 1]),
    ),
    ("SoftTripleLoss", lambda: objectives.RegularizedSoftTriple(3, sample=0.3)),
    ("mining", lambda: build_objectives("contrastive(mining=hardest)", 3)),
    ("nonsense", lambda: build_objectives("nonsense", 3)),
    ("factor 0", lambda: build_objectives("0 * contrastive", 3)),
    ("marginn", lambda: build_objectives("am_softmax(marginn=1)", 3)),
    ("2 kernels", lambda: build_objectives("jrs(kernels=[laplace, laplace])", 3)),
    ("unit_length", lambda: build_objectives("jrs(unit_length=pool)", 3)),
    ("num_classes", lambda: check_objectives("am_softmax(num_classes=3)")),
    ("contrastiv", lambda: check_objectives("horde(loss=contrastiv)")),
]


@pytest.mark.parametrize(("word", "call"), REFUSED)
def test_what_cannot_be_is_refused(word, call):
    with pytest.raises(ValueError, match=word):
        call()


def proxies_of(objective):
    return keras.ops.convert_to_numpy(objective.class_proxies.proxies)


@pytest.mark.parametrize(
    "loss", [losses.AMSoftmaxLoss(), losses.SoftTripleLoss(), losses.ProxyAnchorLoss()]
)
@pytest.mark.parametrize("factors", [None, (0.5, 2.0)])
def test_matryoshka_of_proxies_is_the_sum_over_prefixes_of_both(loss, factors):
    labels, x = random_batch(2, 8, 3, 5)
    objective = MatryoshkaProxyLoss(loss, 3, [2, 5], factors)
    value = objective({"embedding": x}, labels)
    expected = 0
    for dim, factor in zip((2, 5), factors or (1.0, 1.0), strict=True):
        alone = ProxyLoss(loss, 3)
        alone.build_from({"embedding": (None, dim)})
        alone.class_proxies.proxies.assign(proxies_of(objective)[..., :dim])
        expected += factor * float(alone({"embedding": x[:, :dim]}, labels))
    assert_close(value, expected)
    whole = objective.represent({"embedding": x})["class"]
    assert_close(whole, alone.represent({"embedding": x})["class"])


ADVICE = r"labels must be classes 0 \.\. 2.*ProxyLoss\(loss, num_classes\).*RetrievalEvaluation"
BEYOND, NEGATIVE = np.array([0, 1, 2, 3]), np.array([0, -1, 2, 0])


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_learner_refuses_labels_without_a_proxy_before_the_first_step(jit_compile):
    x = images(1, 4, "uint8")
    for objective in (ProxyLoss(losses.AMSoftmaxLoss(), 3), objectives.InstanceLoss(3)):
        learner = models.MetricLearner(tiny_embedder(), objective)
        learner.compile("sgd", jit_compile=jit_compile)
        for wrong in (BEYOND, NEGATIVE):
            for run in (learner.fit, learner.evaluate):
                with pytest.raises(ValueError, match=ADVICE):
                    run(x, wrong, verbose=0)


@pytest.mark.parametrize("name", ["MetricLoss", "CrossBatchMemory"])
def test_labels_may_be_a_column_wherever_an_objective_takes_them(name):
    labels, x = random_batch(0, 6, 3)
    objective = MAKE[name]()
    representations = {"embedding": keras.ops.array(x)}
    objective.build_from({"embedding": tuple(np.shape(x))})
    column = np.reshape(labels, (-1, 1))
    value = objective.term(representations, keras.ops.array(labels)).value
    assert_close(objective.term(representations, keras.ops.array(column)).value, value)
    with pytest.raises(UserError, match="takes one label for each image"):
        objective.term(representations, keras.ops.array(np.repeat(column, 2, axis=1)))


def test_a_loss_of_images_alone_learns_from_no_pairs():
    assert set(objectives.MetricLoss(losses.ContrastiveLoss()).learns_from) == {
        "positive",
        "negative",
    }
    per_image = keras.losses.MeanSquaredError()
    assert objectives.MetricLoss(per_image).learns_from == ()


def as_dataset(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(4)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_a_learner_refuses_labels_without_a_proxy_in_the_batches_of_a_data_set(compiled):
    """Also where XLA compiles the steps, which leaves assertions out."""
    x, right = images(1, 4, "uint8"), np.array([0, 1, 2, 0])
    learner = models.MetricLearner(tiny_embedder(), ProxyLoss(losses.AMSoftmaxLoss(), 3))
    learner.compile("sgd", jit_compile=compiled)
    with pytest.raises(tf.errors.InvalidArgumentError, match=ADVICE):
        learner.fit(as_dataset(x, BEYOND), verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match=ADVICE):
        learner.fit(as_dataset(x, right), validation_data=as_dataset(x, NEGATIVE), verbose=0)
