import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import references
from tests import references_moments as slow
from tests.losses.references import soft_triple
from tests.marks import first_quick
from tests.mathematics import DEGENERATE, MODES, assert_close, degenerate_batches, finite_differences, random_batch
from tests.models.networks import SIZE, colored_batch, config_of, images, tiny_embedder, values
from tfdml import UserError, losses
from tfdml.models import MetricLearner
from tfdml.objectives import HighOrderMomentLoss, MetricLoss
from tfdml.objectives.terms import build_objectives

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
    trained = [variable.value for variable in variables]

    def run(features):
        with tf.GradientTape() as tape:
            tape.watch(features)
            value = objective({"feature_map": features}, labels)
        return value, tape.gradient(value, [features, *trained])

    if compilation != "eager":
        run = tf.function(run, jit_compile=compilation == "xla", autograph=False)

    def of_arrays(features, *arrays):
        ends = np.cumsum([len(projections), len(dense), len(proxies)])
        parts = [arrays[first:last] for first, last in zip((0, *ends), ends, strict=False)]
        return reference(objective, name, labels, features, (*parts, arrays[-1]))

    arrays = [x, *projections, *dense, *proxies, reduction]
    value, gradients = run(tf.constant(x))
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


def test_embeddings_have_the_size_of_the_embedder_by_default():
    objective = learner(terms()).objectives[1]
    assert {v.shape for v in objective.represent({"feature_map": np.ones((2, 6, 6, 6), "float32")}).values()} == {
        (2, 5)
    }
    assert objective.provides == objective.reads == ("horde_2", "horde_3", "horde_4")


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


def test_saved_embedder_has_none_of_its_weights(tmp_path):
    labels, x = colored_batch()
    model = learner(terms())
    model.fit(x, labels, batch_size=len(x), verbose=0)
    model.embedder.save(tmp_path / "embedder.keras")
    again = keras.saving.load_model(tmp_path / "embedder.keras")
    plain = tiny_embedder(batch_norm="train")
    plain.build((None, SIZE, SIZE, 3))
    assert [variable.shape for variable in again.variables] == [variable.shape for variable in plain.variables]
    np.testing.assert_array_equal(again(images()), model.embedder(images()))


@pytest.mark.parametrize(("given", "expected"), [(None, 10), (2, 2), (1, 1)])
def test_every_order_has_the_proxies_per_class_asked_for(given, expected):
    labels, x = batch()
    loss = losses.SoftTripleLoss(5.0)
    objective = HighOrderMomentLoss(loss, 3, 6, 4, num_classes=3, proxies_per_class=given)
    value = objective({"feature_map": x}, labels)
    total = 0.0
    for order, term in zip(objective.orders, objective.terms, strict=True):
        proxies = values([term.class_proxies.proxies])[0].reshape(3, expected, 4)
        vectors = values([objective.represent({"feature_map": x})[f"high_order_moment_{order}"]])[0]
        cosines = np.einsum("nd,ckd->nck", vectors, proxies / np.linalg.norm(proxies, axis=2, keepdims=True))
        total += soft_triple(labels, cosines, scale=5.0)
    assert_close(value, total)


def test_command_line_builds_it_of_a_nested_loss():
    base, horde = build_objectives("contrastive + 0.5 * horde(loss=contrastive(margin=0.5), orders=[2, 4], dim=64)", 5)
    if isinstance(base, HighOrderMomentLoss):  # terms that provide representations come first
        base, horde = horde, base
    assert (horde.name, horde.weight, horde.orders, horde.loss.margin) == ("horde", 0.5, (2, 4), 0.5)
    (horde,) = build_objectives("horde(loss=am_softmax, mode=random, orders=3)", 5)
    assert horde.num_classes == 5
    with pytest.raises(UserError, match="K >= 2"):
        build_objectives("horde(loss=contrastive, orders=1)", 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": "contrastive"}, "keras.losses.Loss"),
        ({"loss": losses.AMSoftmaxLoss()}, "needs num_classes"),
        ({"order_weights": [1.0, 1.0]}, "2 order_weights for 4 orders"),
        ({"order_weights": float("inf")}, "finite"),
        ({"orders": [2, 7, 3]}, "ascending"),
        ({"dim": -1}, "dim"),
        ({"mode": "linear"}, "mode"),
        ({"reduce_to": 0}, "reduce_to"),
        ({"embedding_dim": 0}, "embedding_dim"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        HighOrderMomentLoss(**{"loss": losses.ContrastiveLoss(), **arguments})


def test_what_it_is_given_is_named_when_it_does_not_fit():
    labels, x = batch()
    with pytest.raises(ValueError, match="needs the representation 'maps', and there is only feature_map"):
        HighOrderMomentLoss(losses.ContrastiveLoss(), embedding_dim=4, representation="maps")(
            {"feature_map": x}, labels
        )
    with pytest.raises(ValueError, match="must be a map"):
        HighOrderMomentLoss(losses.ContrastiveLoss(), embedding_dim=4)({"feature_map": x[:, 0, 0]}, labels)
    with pytest.raises(ValueError, match="give embedding_dim"):
        HighOrderMomentLoss(losses.ContrastiveLoss())({"feature_map": x}, labels)
