import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import references
from tests import references_moments as slow
from tests.marks import first_quick
from tests.mathematics import (
    DEGENERATE,
    MODES,
    assert_close,
    degenerate_batches,
    finite_differences,
    random_batch,
    value_and_gradients,
)
from tests.models.networks import SIZE, colored_batch, config_of, tiny_embedder, values
from tfdml import losses
from tfdml.models import MetricLearner
from tfdml.objectives import HighOrderMomentLoss, MetricLoss

SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def crossentropy(labels, x):
    return float(np.mean([np.log(np.sum(np.exp(row - row[label]))) for label, row in zip(labels, x, strict=True)]))


# A loss, what else it needs, and its reference on vectors (and class proxies, where it has them).
LOSSES = {
    "pairs": (
        losses.ContrastiveLoss(1.3, "euclidean"),
        {},
        lambda y, x: references.contrastive(y, x, 1.3, "euclidean"),
    ),
    "pairs sum": (
        losses.BinomialDevianceLoss(reduction="sum"),
        {},
        lambda y, x: references.binomial(y, x, reduction="sum"),
    ),
    "classes": (
        losses.AMSoftmaxLoss(),
        {"num_classes": 3},
        lambda y, x, p: references.am_softmax(y, references.class_similarities(x, p)),
    ),
    "image by image": (SPARSE, {}, crossentropy),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def batch(seed=0, size=6, classes=3, channels=3):
    labels = random_batch(seed, size, classes)[0]
    return labels, np.random.default_rng(seed).normal(size=(size, 2, 2, channels)).astype("float32")


def make(name, x, orders=4, dim=6, embedding_dim=4, **options):
    loss, extra, _ = LOSSES[name]
    keras.utils.set_random_seed(2)
    objective = HighOrderMomentLoss(loss, orders, dim, embedding_dim, **extra, **options)
    objective.build_from({"feature_map": x.shape, "embedding": (None, 4)})
    objective.built = True
    return objective


def reference(objective, name, labels, features, weights):
    """The loss from an objective's weights, as listed by `weights_of`."""
    projections, dense, proxies, reduction = weights
    options = objective.options
    vectors = slow.embeddings(features, projections, dense, objective.orders, options["mode"], reduction)
    total = 0.0
    for i, (x, weight) in enumerate(zip(vectors.values(), objective.order_weights, strict=True)):
        total += weight * LOSSES[name][2](labels, x, *proxies[i : i + 1])
    return total


def weights_of(objective):
    layer = objective.moments
    return (
        values(layer.moments.projections),
        [values(layer.dense[f"order_{order}"].weights)[0] for order in layer.orders] if layer.dense else [],
        [values([term.class_proxies.proxies])[0] for term in objective.terms] if objective.num_classes else [],
        values(layer.reduction.weights)[0] if layer.reduction is not None else None,
    )


@every_loss
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("cascaded", {}),
        ("cascaded", {"reduce_to": 2, "order_weights": [1.0, 0.5, 0.25]}),
        ("cascaded", {"orders": [3], "scaled": False}),
        ("independent", {"order_weights": 0.2}),
        ("random", {"embedding_dim": None}),
        ("random", {}),
    ],
    ids=["cascaded", "reduced", "one order", "independent", "random", "random with dense"],
)
def test_equals_the_paper(name, mode, options):
    for seed, (size, classes) in enumerate([(6, 3), (9, 2)]):
        labels, x = batch(seed, size, classes)
        objective = make(name, x, **options, mode=mode)
        expected = reference(objective, name, labels, x, weights_of(objective))
        assert_close(objective({"feature_map": x}, labels), expected)


@pytest.mark.one_quick_case
@every_loss
@pytest.mark.parametrize("compilation", MODES)
def test_gradient_reaches_the_map_and_every_weight(name, compilation):
    labels, x = batch(1, 5, 3)
    objective = make(name, x, orders=3, reduce_to=2)
    projections, dense, proxies, reduction = weights_of(objective)
    layer = objective.moments
    variables = [
        *layer.moments.projections,
        *(layer.dense[f"order_{order}"].kernel for order in layer.orders),
        *(term.class_proxies.proxies for term in objective.terms if objective.num_classes),
        layer.reduction.kernel,
    ]
    assert {id(variable) for variable in variables} == {id(variable) for variable in objective.trainable_variables}

    def of_arrays(features, *arrays):
        ends = np.cumsum([len(projections), len(dense), len(proxies)])
        parts = [arrays[first:last] for first, last in zip((0, *ends), ends, strict=False)]
        return reference(objective, name, labels, features, (*parts, arrays[-1]))

    arrays = [x, *projections, *dense, *proxies, reduction]
    value, gradients = value_and_gradients(
        lambda features: objective({"feature_map": features}, labels), x, mode=compilation, weights=variables
    )
    assert_close(value, of_arrays(*arrays))
    for actual, wanted in zip(gradients, finite_differences(of_arrays, *arrays), strict=True):
        assert np.any(wanted)
        assert_close(actual, wanted, 2e-5)


@pytest.mark.parametrize("mode", first_quick(["cascaded", "independent", "random"]))
@pytest.mark.parametrize("name_of_batch", DEGENERATE)
def test_degenerate_batches_are_finite(mode, name_of_batch):
    labels, vectors = degenerate_batches()[name_of_batch]
    x = vectors[:, None, None, :].repeat(2, axis=1)
    objective = make("pairs", x, orders=5, mode=mode)
    expected = reference(objective, "pairs", labels, x, weights_of(objective))
    for dtype in ("float32", "bfloat16", "float16"):
        features = tf.cast(x, dtype)
        with tf.GradientTape() as tape:
            tape.watch(features)
            value = objective({"feature_map": features}, labels)
        gradients = tape.gradient(value, [features, *(v.value for v in objective.trainable_variables)])
        assert value.dtype == tf.float32
        # Rounding of duplicates leaves squared distances of 1e-7, whose root is 3e-4.
        assert_close(value, expected, *([] if dtype == "float32" else [0.1]), floor=1e-5)
        assert all(np.all(np.isfinite(tf.cast(gradient, "float32"))) for gradient in gradients)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_maps_do_not_overflow(dtype):
    labels, x = batch()
    x = tf.cast(500 * x, dtype)
    objective = make("pairs", x, orders=6)
    expected = reference(objective, "pairs", labels, tf.cast(x, "float32").numpy(), weights_of(objective))
    assert_close(objective({"feature_map": x}, labels), expected)


def learner(objectives, **options):
    keras.utils.set_random_seed(0)
    built = MetricLearner(tiny_embedder(batch_norm="train", **options), objectives)
    built.compile(keras.optimizers.SGD(0.05), run_eagerly=True)
    built.build((None, SIZE, SIZE, 3))
    return built


def terms(**options):
    base = losses.ContrastiveLoss()
    return [MetricLoss(base), HighOrderMomentLoss(base, orders=4, dim=300, weight=0.5, name="horde", **options)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", first_quick([{}, {"mode": "random"}, {"reduce_to": 4, "mode": "independent"}]), ids=str
)
def test_learner_is_saved_and_loaded_whole(tmp_path, options):
    labels, x = colored_batch()
    model = learner([*terms(**options), HighOrderMomentLoss(losses.AMSoftmaxLoss(), 3, 16, num_classes=3, name="am")])
    model.fit(x, labels, batch_size=len(x), verbose=0)
    model.save(tmp_path / "learner.keras")
    again = keras.saving.load_model(tmp_path / "learner.keras")
    assert config_of(again) == config_of(model)
    expected = model.evaluate(x, labels, batch_size=len(x), verbose=0, return_dict=True)
    for name, value in again.evaluate(x, labels, batch_size=len(x), verbose=0, return_dict=True).items():
        assert value == pytest.approx(expected[name], rel=1e-6), name
