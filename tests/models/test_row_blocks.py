"""What is worked out by blocks of rows is what is worked out at once."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tests.losses.test_replicas import MAKE, make
from tests.mathematics import assert_close, random_batch
from tests.models.networks import SIZE, tiny_embedder
from tfdml import losses, objectives, pairwise, replicas
from tfdml.losses.base import EmbeddingLoss
from tfdml.models import MetricLearner
from tfdml.models.row_blocks import RowBlocks

B = 10


def divides(name):
    loss = make(name, "sum")
    return isinstance(loss, EmbeddingLoss) and loss.divides


def value_and_gradient(function, *tensors):
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        value = function(*tensors)
    return value.numpy(), [tf.convert_to_tensor(gradient).numpy() for gradient in tape.gradient(value, tensors)]


def check(part, *arrays, size=4):
    """A part of a sum over rows, of which all rows at once give the whole."""
    tensors = [tf.constant(array) for array in arrays]

    def whole(*tensors):
        with pairwise.only_rows(pairwise.Rows(0, B, B)):
            return part(*tensors)

    expected, gradients = value_and_gradient(whole, *tensors)
    value, found = value_and_gradient(lambda *x: RowBlocks(B, size).sum_of(part, x), *tensors)
    assert_close(value, expected)
    for one, other in zip(found, gradients, strict=True):
        assert np.any(other)
        assert_close(one, other, floor=1e-7)


@pytest.mark.one_quick_case
@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size"])
@pytest.mark.parametrize("name", [name for name in MAKE if divides(name)])
def test_every_loss_that_divides_has_the_value_and_gradient_of_the_whole_batch(name, reduction):
    loss = make(name, reduction)
    labels, x = random_batch(4, B, 4, 4)
    x = tf.constant(x)
    expected, (gradient,) = value_and_gradient(lambda x: loss(labels, x), x)
    for size in (4, 5, 1):
        blocks = RowBlocks(B, size)
        value, (found,) = value_and_gradient(
            lambda x, blocks=blocks: blocks.sum_of(lambda x: loss.of_batch(tf.constant(labels), x), [x]), x
        )
        assert_close(value, expected)
        assert_close(found, gradient, floor=1e-7)


def test_sums_that_depend_on_sums_have_their_gradient():
    generator = np.random.default_rng(3)

    def part(x, w):
        own = pairwise.own(x)
        mean = replicas.summed(ops.sum(own * w)) / B
        spread = replicas.summed(ops.sum(ops.square(own - mean)))
        # The last sum needs the one before it, the value all three; one of them has no gradient.
        count = replicas.summed(ops.sum(ops.cast(own > 0, "float32")))
        skew = replicas.summed(ops.sum(ops.power(own - mean, 3) / spread))
        return ops.sum(own * w) * skew / count + replicas.share_of_rows() * ops.log(spread)

    check(part, generator.normal(size=(B, 3)).astype("float32"), generator.normal(size=3).astype("float32"))


@pytest.mark.parametrize("shape", [(B,), (B, 2), (B, 2, 3)])
def test_values_of_all_rows_stand_in_their_places(shape):
    x = np.random.default_rng(4).normal(size=shape).astype("float32")

    def part(x):
        every = replicas.all_rows(ops.square(pairwise.own(x)))
        assert tuple(every.shape[1:]) == shape[1:]
        at = ops.arange(B)[: len(shape)]
        first = replicas.all_rows(ops.cast(pairwise.own(ops.arange(B)) > 6, "int32"))
        assert first.dtype == tf.int32
        return ops.sum(pairwise.own(x) * ops.take(every, at[-1])) + ops.sum(
            pairwise.own(x * ops.reshape(ops.cast(first, "float32"), (B, *[1] * (len(shape) - 1))))
        )

    check(part, x)


def test_what_is_learned_and_what_is_drawn():
    """A weight's gradient; draws that are the same in every pass and every block, of a state that moves once."""
    weight, generator = keras.Variable(2.0), keras.random.SeedGenerator(5)
    other = keras.random.SeedGenerator(5)
    x = tf.constant(np.random.default_rng(1).normal(size=(B,)).astype("float32"))

    def part(x, generator):
        draws = keras.random.uniform((B,), seed=generator)
        total = replicas.summed(ops.sum(pairwise.own(x * draws)))
        return weight * ops.sum(pairwise.own(ops.square(x) * draws)) / total

    with tf.GradientTape() as tape:
        tape.watch(x)
        states = [generator.state]
        value = RowBlocks(B, 4).sum_of(lambda x: part(x, generator), [x], [weight], states)
        # As an objective's memory moves on after the loss is known.
        generator.state.assign(generator.state + 7)
    found = tape.gradient(value, [x, weight.value])
    with tf.GradientTape() as tape:
        tape.watch(x)
        expected = part(x, other)
    assert_close(value, expected)
    for one, another in zip(found, tape.gradient(expected, [x, weight.value]), strict=True):
        assert_close(one, another)
    np.testing.assert_array_equal(generator.state - 7, other.state)


def test_what_is_the_same_in_each_block():
    labels, x = random_batch(4, B, 4, 4)

    def observed(x):
        return {"distance": replicas.mean_of(pairwise.distances(x), pairwise.negative_mask(labels))}

    labels = tf.constant(labels)
    found = RowBlocks(B, 4).same_of_each(observed, [tf.constant(x)])
    assert_close(found["distance"], observed(x)["distance"])


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_in_a_graph(compiled):
    """Of an unknown batch size; by XLA, of a known one."""
    loss = losses.MultiSimilarityLoss()
    labels, x = random_batch(4, B, 4, 4)

    def value(labels, x):
        return RowBlocks(ops.shape(labels)[0], 4).sum_of(lambda x: loss.of_batch(labels, x), [x])

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
        objectives.EnergyConfusion(),
        objectives.DensityAdaptivity(3, reference_density=[1.0, 2.0, 0.5]),
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
