import itertools

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
    random_batch,
    value_and_gradients,
)
from tfdml import kernels
from tfdml.objectives import JointRepresentationSimilarity

DIMS = {"pooled": 7, "embedding": 4, "class": 3}
SUBSETS = [levels for n in (1, 2, 3) for levels in itertools.combinations(DIMS, n)]
MULTIPLIERS = {"pooled": (0.5, 1.0, 2.0), "embedding": (0.5, 1.0, 2.0), "class": (1.0,)}
every_subset = pytest.mark.parametrize("levels", SUBSETS, ids="+".join)

# A kernel for all levels, its reference, and the distance whose mean is its bandwidth.
KERNELS = {
    "gaussian": (
        kernels.GaussianMixture((1.0,)),
        lambda x, tau: references.gaussian(x, None, (1.0,), tau),
        references.squared_distance,
    ),
    "laplace": (kernels.Laplace(), lambda x, tau: references.laplace(x, None, 1.0, tau), references.absolute_distance),
    "polynomial 2": (kernels.Polynomial(2), lambda x, tau: references.polynomial(x, None, 2), None),
    "polynomial 5": (kernels.Polynomial(5), lambda x, tau: references.polynomial(x, None, 5), None),
    "exponential": (kernels.Exponential(), lambda x, tau: references.exponential(x), None),
}


def batch(seed=0, size=6, classes=3, levels=tuple(DIMS)):
    """Labels, and one representation per level: pooled features that are not normalised, the others that are."""
    labels = random_batch(seed, size, classes)[0]
    arrays = [random_batch(seed + DIMS[level], size, 1, DIMS[level], unit=level != "pooled")[1] for level in levels]
    return labels, arrays


def reference(labels, levels, arrays, taus=None, reduction="mean"):
    taus = taus or [None] * len(levels)
    grams = [
        references.gaussian(x, None, MULTIPLIERS[level], tau)
        for level, x, tau in zip(levels, arrays, taus, strict=True)
    ]
    return references.joint_representation_similarity(labels, grams, reduction)


def evaluate(objective, labels, levels, arrays, mode="eager"):
    return value_and_gradients(
        lambda *tensors: objective(dict(zip(levels, tensors, strict=True)), labels), *arrays, mode=mode
    )


@every_subset
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_equals_the_paper(levels, reduction):
    objective = JointRepresentationSimilarity(levels, reduction=reduction)
    for seed, (size, classes) in enumerate([(2, 2), (6, 3), (12, 2), (10, 10), (13, 5)]):
        labels, arrays = batch(seed, size, classes, levels)
        expected = reference(labels, levels, arrays, reduction=reduction)
        assert_close(objective(dict(zip(levels, arrays, strict=True)), labels), expected)


@every_subset
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_gradient_reaches_every_level_and_not_the_bandwidth(levels, mode):
    labels, arrays = batch(1, 6, 3, levels)
    taus = [references.bandwidth(x) for x in arrays]
    value, gradients = evaluate(JointRepresentationSimilarity(levels), labels, levels, arrays, mode)
    assert_close(value, reference(labels, levels, arrays))
    expected = finite_differences(lambda *a: reference(labels, levels, a, taus), *arrays)
    for actual, wanted in zip(gradients, expected, strict=True):
        assert np.any(actual)
        assert_close(actual, wanted)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_every_kernel_on_every_level(name, mode):
    kernel, gram, spread = KERNELS[name]
    labels, arrays = batch(2, 6, 3)
    arrays[0] = arrays[0] / np.float32(2)
    taus = [references.bandwidth(x, kind=spread) if spread else None for x in arrays]

    def slow(*arrays):
        return references.joint_representation_similarity(
            labels, [gram(x, t) for x, t in zip(arrays, taus, strict=True)]
        )

    objective = JointRepresentationSimilarity(kernels=kernel)
    value, gradients = evaluate(objective, labels, tuple(DIMS), arrays, mode)
    assert_close(value, slow(*arrays))
    for actual, expected in zip(gradients, finite_differences(slow, *arrays), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("name", [None, *KERNELS])
@pytest.mark.parametrize("name_of_batch", DEGENERATE)
def test_degenerate_batches_are_finite(name, name_of_batch):
    labels, x = degenerate_batches()[name_of_batch]
    kernel, gram, _ = KERNELS[name] if name else (None, None, None)
    arrays = [3 * x, x, x[:, :3]]
    if name is None:
        expected = reference(labels, tuple(DIMS), arrays)
    else:
        expected = references.joint_representation_similarity(labels, [gram(a, None) for a in arrays])
    objective = JointRepresentationSimilarity(kernels=kernel)
    value, gradients = evaluate(objective, labels, tuple(DIMS), arrays)
    assert_close(value, expected)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)
    for dtype in ("bfloat16", "float16"):
        half_value, half_gradients = value_and_gradients(
            lambda *t, dtype=dtype: objective({k: tf.cast(a, dtype) for k, a in zip(DIMS, t, strict=True)}, labels),
            *arrays,
        )
        assert half_value.dtype == np.float32
        assert np.isfinite(half_value)
        for gradient, half_gradient in zip(gradients, half_gradients, strict=True):
            # A gradient beyond 65,504 is one that float16 cannot hold: what loss scaling is for.
            assert np.all(np.isfinite(half_gradient) | (np.abs(gradient) > 60_000))


@pytest.mark.parametrize("labels", [[4], [4, 4, 4, 4, 4, 4]], ids=["one image", "one class"])
@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_one_class_gives_zero_and_teaches_nothing(labels, mode):
    arrays = batch(0, len(labels), 1)[1]
    value, gradients = evaluate(JointRepresentationSimilarity(), labels, tuple(DIMS), arrays, mode)
    assert value == 0.0
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


def test_default_is_the_papers_design():
    objective = JointRepresentationSimilarity()
    assert objective.levels == ("pooled", "embedding", "class")
    assert {level: kernel.multipliers for level, kernel in objective.kernels.items()} == MULTIPLIERS
    assert objective.weight == 1.0


def test_sum_is_the_mean_times_the_number_of_pairs():
    labels, arrays = batch(3, 9, 4)
    representations = dict(zip(DIMS, arrays, strict=True))
    total = JointRepresentationSimilarity(reduction="sum")(representations, labels)
    mean = JointRepresentationSimilarity()(representations, labels)
    assert_close(total, float(mean) * len(references.negative_pairs(labels)))


@pytest.mark.parametrize("kernel", [kernels.Exponential(), kernels.Polynomial(5), None], ids=repr)
def test_large_pooled_features_do_not_overflow(kernel):
    labels, arrays = batch(3, 64, 8)
    arrays[0] = np.abs(np.random.default_rng(0).normal(size=(64, 1024))).astype("float32")
    value, gradients = evaluate(JointRepresentationSimilarity(kernels=kernel), labels, tuple(DIMS), arrays)
    assert np.isfinite(value)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)


@pytest.mark.parametrize(
    "given",
    [
        [kernels.Laplace(), kernels.Polynomial(3)],
        {"class": kernels.Polynomial(3), "embedding": kernels.Laplace()},
        (kernels.Laplace(), kernels.Polynomial(3)),
    ],
    ids=["list", "dict", "tuple"],
)
def test_kernels_are_matched_with_their_levels(given):
    objective = JointRepresentationSimilarity(("embedding", "class"), kernels=given)
    assert isinstance(objective.kernels["embedding"], kernels.Laplace)
    assert isinstance(objective.kernels["class"], kernels.Polynomial)
    labels, arrays = batch(3, 6, 3, ("embedding", "class"))
    expected = references.joint_representation_similarity(
        labels, [references.laplace(arrays[0]), references.polynomial(arrays[1], degree=3)]
    )
    assert_close(objective(dict(zip(("embedding", "class"), arrays, strict=True)), labels), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"levels": ()}, "one or more different names"),
        ({"levels": ("embedding", "embedding")}, "one or more different names"),
        ({"levels": ("embedding",), "kernels": [kernels.Laplace()] * 2}, "2 kernels for 1 levels"),
        ({"levels": ("embedding",), "kernels": {"pooled": kernels.Laplace()}}, "the levels are"),
        ({"reduction": "max"}, "'mean' or 'sum'"),
        ({"weight": float("nan")}, "finite"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        JointRepresentationSimilarity(**arguments)


def test_feature_map_is_refused_with_its_shape():
    with pytest.raises(ValueError, match="takes vectors"):
        JointRepresentationSimilarity("feature_map")({"feature_map": np.zeros((2, 3, 3, 4), "float32")}, [0, 1])


@pytest.mark.parametrize("name", [None, *KERNELS])
@every_subset
def test_serialisation_restores_the_objective(levels, name):
    objective = JointRepresentationSimilarity(
        levels, kernels=KERNELS[name][0] if name else None, reduction="sum", weight=0.4, name="jrs"
    )
    labels, arrays = batch(3, 6, 3, levels)
    representations = dict(zip(levels, arrays, strict=True))
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(objective))
    assert again.get_config() == objective.get_config()
    np.testing.assert_array_equal(again(representations, labels), objective(representations, labels))


@pytest.mark.parametrize("base", [2**24, 2**53])
def test_large_ids_do_not_collide(base):
    labels, arrays = batch(3, 6, 3)
    representations = dict(zip(DIMS, arrays, strict=True))
    expected = JointRepresentationSimilarity()(representations, labels)
    large = labels.astype("int64") + base
    forms = [large, large.tolist(), tf.constant(large), tf.constant(large[:, None])]
    if base == 2**24:
        forms.append(large.astype("float64"))
    for form in forms:
        np.testing.assert_array_equal(JointRepresentationSimilarity()(representations, form), expected)


def test_a_batch_of_four_thousand():
    labels = np.random.default_rng(0).integers(0, 100, 4096)
    x = random_batch(0, 4096, 1, 128)[1]
    arrays = [x, x[:, :100]]
    objective = JointRepresentationSimilarity(("embedding", "class"))
    value, gradients = evaluate(objective, labels, ("embedding", "class"), arrays)
    assert np.isfinite(value)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)
