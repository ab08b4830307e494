"""What every objective does with a batch that has a NaN, and with one that has no image."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import references
from tests.mathematics import (
    DEGENERATE,
    assert_close,
    degenerate_batches,
    finite_differences,
    public_classes,
    random_batch,
    value_and_gradients,
)
from tests.models.networks import images, tiny_embedder
from tests.played_replicas import play, sum_and_gradient
from tfdml import losses, models, objectives, replicas
from tfdml.objectives import Matryoshka, MatryoshkaProxyLoss, MetricLoss, ProxyLoss
from tfdml.pairs import Scope, pairs_by_name

MAKE = {
    "AcrossViews": lambda: objectives.AcrossViews(losses.RankedListLoss()),
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
NAMES = list(public_classes(objectives))


def representations():
    vectors = {name: random_batch(1, 8, 3, 6)[1] for name in ("embedding", "projection", "pooled", "class")}
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


PAIR_LOSSES = {
    "contrastive": (
        losses.ContrastiveLoss(1.3, "euclidean"),
        lambda y, x: references.contrastive(y, x, 1.3, "euclidean"),
    ),
    "contrastive sum": (
        losses.ContrastiveLoss(reduction="sum"),
        lambda y, x: references.contrastive(y, x, reduction="sum"),
    ),
    "binomial": (losses.BinomialDevianceLoss(), references.binomial),
}
every_pair_loss = pytest.mark.parametrize(("loss", "reference"), PAIR_LOSSES.values(), ids=PAIR_LOSSES)


def proxy_loss(**options):
    objective = ProxyLoss(losses.AMSoftmaxLoss(), num_classes=3, **options)
    objective.build_from({"embedding": (None, 4)})
    return objective


def proxies_of(objective):
    return keras.ops.convert_to_numpy(objective.class_proxies.proxies)


@every_pair_loss
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_metric_loss_is_the_loss_on_its_representation(loss, reference, mode):
    labels, x = random_batch(2, 8, 3, 5)
    other = random_batch(3, 8, 3, 6)[1]
    objective = MetricLoss(loss, representation="pooled")
    value, gradients = value_and_gradients(
        lambda pooled, embedding: objective({"pooled": pooled, "embedding": embedding}, labels), x, other, mode=mode
    )
    assert_close(value, reference(labels, x))
    assert_close(gradients[0], finite_differences(lambda e: reference(labels, e), x)[0])
    np.testing.assert_array_equal(gradients[1], 0)


def matryoshka(dims, dim_weights=None, loss=None):
    return Matryoshka(loss or losses.BinomialDevianceLoss(), dims, dim_weights)


def sum_over_prefixes(labels, x, dims, factors):
    units = {dim: x[:, :dim] / np.linalg.norm(x[:, :dim], axis=1, keepdims=True) for dim in dims}
    return sum(f * references.binomial(labels, units[dim]) for dim, f in zip(dims, factors, strict=True))


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize(("dims", "factors"), [((2, 3, 5), None), ((1, 5), (0.5, 2.0))])
def test_matryoshka_is_the_sum_over_prefixes(dims, factors, mode):
    labels, x = random_batch(2, 8, 3, 5)
    objective = matryoshka(dims, factors)

    def reference(e):
        return sum_over_prefixes(labels, e, dims, factors or (1.0,) * len(dims))

    value, (gradient,) = value_and_gradients(lambda e: objective({"embedding": e}, labels), x, mode=mode)
    assert_close(value, reference(x))
    assert_close(gradient, finite_differences(reference, x)[0])


@pytest.mark.parametrize("loss", [losses.AMSoftmaxLoss(), losses.SoftTripleLoss(), losses.ProxyAnchorLoss()])
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
    with pytest.raises(ValueError, match="there are 5 dimensions"):
        MatryoshkaProxyLoss(loss, 3, [2, 6])({"embedding": x}, labels)


def test_matryoshka_on_replicas_is_that_of_the_global_batch():
    labels, x = random_batch(2, 9, 3, 5)
    objective = matryoshka([2, 5], loss=losses.MultiSimilarityLoss())
    alone = sum_and_gradient(lambda y, e: objective.term({"embedding": e}, y).value, (labels, x), [9])

    def of_replica(y, e):
        named = {"embedding": replicas.gather(e)}
        return objective.compute_pairs(pairs_by_name(named, replicas.gather(y), None, Scope.of_replica(e.shape[0])))

    for one, other in zip(sum_and_gradient(of_replica, (labels, x), [4, 5]), alone, strict=True):
        assert_close(one, other)


def test_any_keras_loss_works_image_by_image():
    x = random_batch(2, 8, 3, 3)[1]
    objective = MetricLoss(keras.losses.SparseCategoricalCrossentropy(from_logits=True), representation="class")
    assert objective.per_image
    assert not MetricLoss(losses.ContrastiveLoss()).per_image
    labels = np.arange(8) % 3
    expected = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, x)
    assert_close(objective({"class": x}, labels), expected)


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_proxy_loss_equals_the_paper(mode, reduction):
    labels, x = random_batch(5, 7, 3, 4, unit=False)
    loss = losses.AMSoftmaxLoss(reduction="sum" if reduction == "sum" else "sum_over_batch_size")
    objective = ProxyLoss(loss, num_classes=3)
    objective.build_from({"embedding": (None, 4)})

    def reference(embeddings, proxies):
        return references.am_softmax(labels, references.class_similarities(embeddings, proxies), reduction=reduction)

    weights = [objective.class_proxies.proxies]
    value, gradients = value_and_gradients(lambda e: objective({"embedding": e}, labels), x, mode=mode, weights=weights)
    assert_close(value, reference(x, proxies_of(objective)))
    for actual, expected in zip(gradients, finite_differences(reference, x, proxies_of(objective)), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("mode", ["eager", "graph", pytest.param("xla", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("reduction", "share"), [("mean", 0.3), ("sum", 0.3), ("mean", 0.1), ("mean", 0.85)])
def test_the_images_of_the_highest_values_do_not_count(mode, reduction, share):
    labels, x = random_batch(5, 7, 3, 4, unit=False)
    loss = losses.AMSoftmaxLoss(reduction="sum" if reduction == "sum" else "sum_over_batch_size")
    objective = ProxyLoss(loss, num_classes=3, drop_highest=share)
    objective.build_from({"embedding": (None, 4)})
    of_images = {"y": labels, "proxies": proxies_of(objective)}

    def reference(embeddings):
        cosines = references.class_similarities(embeddings, of_images["proxies"])
        found = sorted(references.am_softmax([y], [row]) for y, row in zip(of_images["y"], cosines, strict=True))
        left = found[: 7 - int(share * 7)]
        return sum(left) if reduction == "sum" else sum(left) / len(left)

    value, (gradient,) = value_and_gradients(lambda e: objective({"embedding": e}, labels), x, mode=mode)
    assert_close(value, reference(x))
    assert_close(gradient, finite_differences(reference, x)[0])
    assert np.sum(~np.any(gradient, axis=1)) == int(share * 7)


def test_replicas_drop_the_highest_of_the_global_batch():
    labels, x = random_batch(5, 9, 3, 4, unit=False)
    objective = proxy_loss(drop_highest=0.4)
    whole = np.asarray(objective.compute(objective.represent({"embedding": x}), tf.constant(labels)))
    assert np.sum(whole == 0) == 3

    def own(own_labels, own):
        return objective.compute(objective.represent({"embedding": own}), tf.constant(own_labels)).numpy()

    parts = play(own, (labels[:2], x[:2]), (labels[2:], x[2:]))
    assert_close(np.concatenate(parts), whole)


@pytest.mark.parametrize("batch", DEGENERATE)
def test_proxy_loss_of_a_degenerate_batch_is_finite(batch):
    labels, x = degenerate_batches()[batch]
    labels = labels % 3
    objective = proxy_loss()
    value, (gradient,) = value_and_gradients(lambda e: objective({"embedding": e}, labels), x)
    assert_close(value, references.am_softmax(labels, references.class_similarities(x, proxies_of(objective))))
    assert np.all(np.isfinite(gradient))
    np.testing.assert_array_equal(gradient[np.all(x == 0, axis=1)], 0)


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
