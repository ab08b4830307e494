"""Sums computed by blocks of rows equal those of the whole batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tests.losses.test_replicas import MAKE, make
from tests.mathematics import assert_close, random_batch
from tests.models.networks import SIZE, tiny_embedder
from tfdml import losses, objectives
from tfdml.losses.base import PairLoss
from tfdml.models import MetricLearner
from tfdml.models.row_blocks import RowBlocks
from tfdml.pairs import Pairs

B = 10


def by_rows(name):
    loss = make(name, "sum")
    return isinstance(loss, PairLoss) and not loss.needs_whole_batch


def value_and_gradient(function, *tensors):
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        value = function(*tensors)
    return value.numpy(), [tf.convert_to_tensor(gradient).numpy() for gradient in tape.gradient(value, tensors)]


def of_rows(loss, labels):
    """The part of a loss that some rows make up, as `RowBlocks` asks for it."""
    return lambda rows, total, x: loss.of_pairs(Pairs.of_batch(x, labels, rows=rows, total=total))


@pytest.mark.one_quick_case
@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size"])
@pytest.mark.parametrize("name", [name for name in MAKE if by_rows(name)])
def test_every_loss_by_rows_has_the_value_and_gradient_of_the_whole_batch(name, reduction):
    loss = make(name, reduction)
    labels, x = random_batch(4, B, 4, 4)
    x = tf.constant(x)
    expected, (gradient,) = value_and_gradient(lambda x: loss(labels, x), x)
    for size in (4, 5, 1):
        blocks = RowBlocks(B, size)
        value, (found,) = value_and_gradient(
            lambda x, blocks=blocks: blocks.sum_of(of_rows(loss, tf.constant(labels)), [x]), x
        )
        assert_close(value, expected)
        assert_close(found, gradient, floor=1e-7)


def test_totals_may_depend_on_totals_and_carry_no_gradient():
    generator = np.random.default_rng(3)
    x, w = (tf.constant(generator.normal(size=size).astype("float32")) for size in ((B, 3), (3,)))

    def part(rows, total, x, w):
        pairs = Pairs.of_batch(x, rows=rows, total=total)
        mean = pairs.total(ops.sum(pairs.anchors * w)) / B
        spread = pairs.total(ops.sum(ops.square(pairs.anchors - mean)))
        return ops.sum(pairs.anchors * w) / spread

    expected, gradients = value_and_gradient(lambda *x: part(None, None, *x), x, w)
    for size in (4, 3):
        value, found = value_and_gradient(lambda *x, size=size: RowBlocks(B, size).sum_of(part, x), x, w)
        assert_close(value, expected)
        for one, other in zip(found, gradients, strict=True):
            assert np.any(other)
            assert_close(one, other, floor=1e-7)


def test_what_is_learned_and_what_is_drawn():
    """A weight's gradient; draws that are the same in every pass and every block, of a state that moves once."""
    weight, generator = keras.Variable(2.0), keras.random.SeedGenerator(5)
    other = keras.random.SeedGenerator(5)
    x = tf.constant(np.random.default_rng(1).normal(size=(B,)).astype("float32"))

    def part(rows, total, x, generator=generator):
        pairs = Pairs.of_batch(x, rows=rows, total=total)
        draws = pairs.of_anchors(keras.random.uniform((B,), seed=generator))
        return weight * ops.sum(ops.square(pairs.anchors) * draws) / pairs.total(ops.sum(pairs.anchors * draws))

    with tf.GradientTape() as tape:
        tape.watch(x)
        states = [generator.state]
        value = RowBlocks(B, 4).sum_of(part, [x], [weight], states)
        # As an objective's memory moves on after the loss is known.
        generator.state.assign(generator.state + 7)
    found = tape.gradient(value, [x, weight.value])
    with tf.GradientTape() as tape:
        tape.watch(x)
        expected = part(None, None, x, other)
    assert_close(value, expected)
    for one, another in zip(found, tape.gradient(expected, [x, weight.value]), strict=True):
        assert_close(one, another)
    np.testing.assert_array_equal(generator.state - 7, other.state)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_in_a_graph(compiled):
    """Of an unknown batch size; by XLA, of a known one."""
    loss = losses.MultiSimilarityLoss()
    labels, x = random_batch(4, B, 4, 4)

    def value(labels, x):
        return RowBlocks(ops.shape(labels)[0], 4).sum_of(of_rows(loss, labels), [x])

    size = B if compiled else None
    signature = [tf.TensorSpec((size,), "int64"), tf.TensorSpec((size, 4))]
    graph = tf.function(value, jit_compile=compiled, input_signature=signature, autograph=False)
    for few in (B,) if compiled else (B, 8, 4, 3):
        some, part = tf.constant(labels[:few], "int64"), tf.constant(x[:few])
        expected, (gradient,) = value_and_gradient(lambda x, some=some: loss(some, x), part)
        found, (actual,) = value_and_gradient(lambda x, some=some: graph(some, x), part)
        assert_close(found, expected)
        assert_close(actual, gradient, floor=1e-7)


def test_a_step_by_chunks_makes_no_matrix_of_all_pairs():
    terms = [
        losses.ContrastiveLoss(),
        objectives.JointRepresentationSimilarity("embedding"),
        objectives.CrossBatchMemory(losses.TripletLoss(), 32, name="xbm"),
    ]
    model = MetricLearner(tiny_embedder(batch_norm="statistics"), terms, gradient_cache=8)
    model.build((None, SIZE, SIZE, 3))
    model.compile("sgd")
    batch = (tf.TensorSpec((44, SIZE, SIZE, 3)), tf.TensorSpec((44,), "int64"))
    for chunk, some in ((8, False), (0, True)):
        model.gradient_cache = chunk
        graph = tf.function(lambda *x: model.train_step(x), autograph=False).get_concrete_function(*batch).graph
        graphs = [graph, *(function.graph for function in graph._functions.values() if hasattr(function, "graph"))]
        operations = [op for each in graphs for op in each.get_operations()]
        assert any(op.type == "MatMul" for op in operations)
        whole = [
            op.name for op in operations for x in op.outputs if x.shape.rank == 2 and x.shape[0] == 44 <= x.shape[1]
        ]
        assert bool(whole) == some, whole
