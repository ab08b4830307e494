"""Moments, and the loop in which they are computed."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.networks import values
from tests.support import references_moments as slow
from tests.support.mathematics import MODES as COMPILATIONS
from tests.support.mathematics import (
    assert_close,
    dtype_policy,
    finite_differences,
    value_and_gradients,
)
from tfdml.layers import HighOrderMoments, MomentEmbeddings, moments
from tfdml.layers.moments import MODES, as_orders

every_mode = pytest.mark.parametrize("mode", MODES)
POLICIES = {"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}


@pytest.fixture
def narrow_blocks(monkeypatch):
    """Blocks of at most three moments, so that small layers have several."""
    monkeypatch.setattr(moments, "_BLOCK", 3)


def maps(seed=0, batch=3, height=2, width=2, channels=4, scale=1.0):
    return (
        scale * np.random.default_rng(seed).normal(size=(batch, height, width, channels))
    ).astype("float32")


def layer_for(x, *arguments, **options):
    keras.utils.set_random_seed(1)
    layer = HighOrderMoments(*arguments, **options)
    layer.build(x.shape)
    layer.built = True
    return layer


@pytest.mark.one_quick_case
@every_mode
@given(
    batch=st.integers(1, 4),
    height=st.integers(1, 3),
    width=st.integers(1, 3),
    channels=st.integers(1, 5),
    dim=st.integers(1, 11),
    orders=st.integers(2, 6) | st.sets(st.integers(2, 6), min_size=1).map(sorted),
    block=st.integers(1, 12),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_equals_the_papers_algorithm(mode, batch, height, width, channels, dim, orders, block):
    x = maps(dim, batch, height, width, channels)
    layer = layer_for(x, orders, dim, mode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments, "_BLOCK", block)
        found = layer(x)
    expected = slow.moments(x, values(layer.projections), as_orders(orders), mode)
    assert list(found) == list(expected)
    for order, value in expected.items():
        # Products that cancel over positions leave the rounding of their size.
        assert_close(found[order], value, floor=1e-6 * np.abs(x).max() ** order * channels**order)


def weighted_sum(layer, features, weights):
    return sum(
        tf.reduce_sum(weight * value)
        for weight, value in zip(weights, layer(features).values(), strict=True)
    )


@pytest.mark.one_quick_case
@pytest.mark.parametrize("compilation", COMPILATIONS)
@pytest.mark.parametrize(
    ("mode", "orders"), [("cascaded", 4), ("cascaded", [3, 5]), ("independent", 3), ("random", 4)]
)
def test_gradient_reaches_the_features_and_every_projection(
    narrow_blocks, mode, orders, compilation
):
    x = maps(2, 2, 2, 1, 3)
    layer = layer_for(x, orders, 7, mode)
    weights = np.random.default_rng(3).normal(size=(len(layer.orders), 2, 7)).astype("float32")
    trained = layer.trainable_variables
    assert len(trained) == (0 if mode == "random" else len(layer.projections))

    def reference(features, *projections):
        found = slow.moments(features, projections or values(layer.projections), layer.orders, mode)
        return sum(
            np.sum(weight * value) for weight, value in zip(weights, found.values(), strict=True)
        )

    expected = finite_differences(reference, x, *map(np.asarray, trained))
    _, gradients = value_and_gradients(
        lambda features: weighted_sum(layer, features, weights),
        x,
        mode=compilation,
        weights=trained,
    )
    for actual, wanted in zip(gradients, expected, strict=True):
        assert np.any(wanted)
        assert_close(actual, wanted)


def test_batch_and_positions_may_be_unknown_when_traced(narrow_blocks):
    layer = layer_for(maps(), 3, 7)

    @tf.function(input_signature=[tf.TensorSpec((None, None, None, 4))], autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = layer(x)
            value = tf.reduce_sum(found[3])
        return found, tape.gradient(value, x)

    for x in (maps(0, 3, 2, 2), maps(1, 2, 3, 1), np.zeros((0, 2, 2, 4), "float32")):
        found, gradient = run(x)
        assert gradient.shape == x.shape
        for order, value in slow.moments(x, values(layer.projections), (2, 3)).items():
            assert_close(found[order], value)


def test_random_projections_estimate_powers_of_inner_products():
    dim = 20_000
    x = np.random.default_rng(0).normal(size=(2, 1, 1, 3)).astype("float32")
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    product = float(np.sum(x[0] * x[1]))
    layer = HighOrderMoments(5, dim, "random", seed=0)
    for order, value in layer(x).items():
        each = dim * np.asarray(value[0], "float64") * np.asarray(value[1], "float64")
        # Five standard errors of a mean of `dim` independent estimates.
        assert abs(each.mean() - product**order) < 5 * each.std() / np.sqrt(dim)


def test_random_projections_are_fixed_signs_made_by_the_seed():
    def matrices(seed):
        layer = layer_for(maps(channels=40), 4, 50, "random", seed=seed)
        assert not layer.trainable_variables
        return values(layer.projections)

    first = matrices(3)
    assert len(first) == 2 + 3 + 4
    assert {matrix.dtype.name for matrix in first} == {"int8"}
    assert all(set(np.unique(matrix)) == {-1, 1} for matrix in first)
    assert abs(np.mean(first)) < 0.05
    for a, b in zip(first, matrices(3), strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(np.mean(first[0] == other) < 0.6 for other in [*first[1:], matrices(400)[0]])


@every_mode
@pytest.mark.parametrize("policy", POLICIES)
def test_products_are_float32_under_a_mixed_policy(mode, policy):
    with dtype_policy(policy):
        # Products of order 5 near 1e10, far above what float16 holds.
        x = tf.cast(100 * maps(), POLICIES[policy])
        layer = layer_for(x, 5, 8, mode)
        expected = slow.moments(
            np.asarray(tf.cast(x, "float64")), values(layer.projections), layer.orders, mode
        )
        for order, value in layer(x).items():
            assert value.dtype == tf.float32
            assert_close(value, expected[order])


def graph_nodes(function):
    graph = function.get_concrete_function().graph.as_graph_def(add_shapes=True)
    return [
        node
        for body in (graph.node, *(f.node_def for f in graph.library.function))
        for node in body
    ]


@pytest.mark.parametrize("mode", ["cascaded", "independent"])
def test_no_step_holds_a_map_of_products(mode):
    batch, size, channels, dim = 8, 8, 4, 2048
    x = tf.constant(maps(0, batch, size, size, channels))
    layer = layer_for(x, 5, dim, mode)
    trained = [variable.value for variable in layer.trainable_variables]

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = sum(tf.reduce_sum(v) for v in layer(x).values())
        return tape.gradient(value, [x, *trained])

    nodes = graph_nodes(step)
    shapes = [
        [d.size for d in shape.dim]
        for node in nodes
        for shape in node.attr["_output_shapes"].list.shape
    ]
    assert [batch * size**2, 256] in shapes
    assert max(np.prod(shape) for shape in shapes) <= batch * size**2 * 256
    loops = [node for node in nodes if node.op in ("While", "StatelessWhile")]
    assert loops
    # Steps that ran ahead would each hold a block.
    assert {node.attr["parallel_iterations"].i for node in loops} == {1}


@pytest.mark.parametrize("reduce_to", [None, 3])
@pytest.mark.parametrize(
    ("mode", "size"), [("cascaded", 5), ("independent", 5), ("random", None), ("random", 5)]
)
def test_embeddings_are_projected_and_of_unit_length(mode, size, reduce_to):
    x = maps()
    layer = MomentEmbeddings(4, 8, size, mode, reduce_to)
    found = layer(x)
    dense = (
        [values(layer.dense[f"order_{order}"].weights)[0] for order in layer.orders]
        if size
        else None
    )
    reduction = values(layer.reduction.weights)[0] if reduce_to else None
    expected = slow.embeddings(
        x, values(layer.moments.projections), dense, layer.orders, mode, reduction
    )
    for order, value in expected.items():
        assert_close(found[order], value)
        assert layer.compute_output_spec(keras.KerasTensor(x.shape))[order].shape == value.shape


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3, 1e6])
def test_embeddings_of_small_and_large_features_are_those_of_ordinary_ones(scale):
    x = maps()
    layer = MomentEmbeddings(5, 8, 4)
    expected = layer(x)
    for order, value in layer(x * np.float32(scale)).items():
        assert_close(value, expected[order])


def test_embedding_of_an_empty_map_is_zero():
    layer = MomentEmbeddings(5, 8, 4)
    x = tf.zeros((2, 2, 2, 4))
    with tf.GradientTape() as tape:
        tape.watch(x)
        found = layer(x)
        value = sum(tf.reduce_sum(v) for v in found.values())
    np.testing.assert_array_equal(tape.gradient(value, x), np.zeros(x.shape))
    np.testing.assert_array_equal(found[5], np.zeros((2, 4)))
