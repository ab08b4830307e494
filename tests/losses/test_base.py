import functools
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import references
from tests.marks import first_quick
from tests.mathematics import assert_close, random_batch, value_and_gradients
from tfdml import losses, objectives
from tfdml.mining.composing import named_miners
from tfdml.pairs import Pairs

MAKE = {
    "contrastive": losses.ContrastiveLoss,
    "contrastive euclidean": lambda **k: losses.ContrastiveLoss(0.7, "euclidean", "all", **k),
    "binomial": losses.BinomialDevianceLoss,
    "am": losses.AMSoftmaxLoss,
    "norm": losses.NormSoftmaxLoss,
}
every_loss = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
PAIR_LOSSES = ("contrastive", "contrastive euclidean", "binomial")


def batch(seed=1):
    labels, x = random_batch(seed, 9, 4, 6)
    return labels, x


@every_loss
def test_one_value_per_image_whose_mean_is_the_loss(make):
    labels, x = batch()
    loss = make()
    values = loss.call(labels, x)
    assert values.shape == (9,)
    assert_close(np.mean(values), loss(labels, x))
    np.testing.assert_array_equal(make(reduction="none")(labels, x), values)


@every_loss
def test_sum_is_the_sum_of_its_values(make):
    labels, x = batch()
    loss = make(reduction="sum")
    assert_close(np.sum(loss.call(labels, x)), loss(labels, x))


@every_loss
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight", "sum"])
def test_sample_weights_weigh_the_images(make, reduction):
    labels, x = batch()
    loss = make(reduction=reduction)
    weights = np.linspace(0.0, 2.0, 9).astype("float32")
    values = np.asarray(loss.call(labels, x)) * weights
    divisor = {"sum_over_batch_size": 9, "mean_with_sample_weight": weights.sum(), "sum": 1}[reduction]
    assert_close(loss(labels, x, sample_weight=weights), values.sum() / divisor)
    assert_close(loss(labels, x, sample_weight=weights[:, None]), values.sum() / divisor)


@every_loss
def test_no_weight_at_all_gives_zero(make):
    labels, x = batch()
    assert float(make(reduction="mean_with_sample_weight")(labels, x, sample_weight=np.zeros(9, "float32"))) == 0.0


@every_loss
def test_forms_of_labels_agree(make):
    labels, x = batch()
    expected = make()(labels, x)
    for form in (labels[:, None], labels.tolist(), labels.astype("uint8"), tf.constant(labels, tf.int32)):
        np.testing.assert_array_equal(make()(form, x), expected)
    np.testing.assert_array_equal(make()(tf.constant(labels[:, None], tf.int64), x), expected)


@every_loss
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_arithmetic_stays_float32_under_a_mixed_policy(make, policy):
    labels, x = batch()
    expected = make()(labels, x)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        value = make()(labels, x)
        half = make()(labels, tf.cast(x, policy.removeprefix("mixed_")))
    finally:
        keras.config.set_dtype_policy(before)
    assert value.dtype == half.dtype == tf.float32
    np.testing.assert_array_equal(value, expected)
    assert_close(half, expected, 0.1)


@every_loss
@pytest.mark.parametrize("reduction", ["sum", "none", "sum_over_batch_size"])
def test_serialisation_restores_the_loss(make, reduction):
    labels, x = batch()
    loss = make(reduction=reduction, name="mine")
    for again in (
        type(loss).from_config(loss.get_config()),
        keras.losses.deserialize(keras.losses.serialize(loss)),
        keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(loss)),
    ):
        assert type(again) is type(loss)
        assert again.name == "mine"
        assert again.get_config() == loss.get_config()
        np.testing.assert_array_equal(again(labels, x), loss(labels, x))


# What becomes of labels on their way does not depend on the loss: one takes every way quickly.
@pytest.mark.one_quick_case
@pytest.mark.parametrize("name", first_quick(PAIR_LOSSES))
@pytest.mark.parametrize("base", [2**24, 2**53])
@pytest.mark.parametrize("source", ["numpy", "dataset", "column"])
def test_large_ids_do_not_collide_on_their_way_through_fit(name, base, source):
    labels, x = batch()
    large = labels.astype("int64") + base
    inputs = keras.Input((6,))
    outputs = keras.layers.Dense(6, use_bias=False, kernel_initializer="identity")(inputs)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss=MAKE[name]())
    y = large[:, None] if source == "column" else large
    data = (tf.data.Dataset.from_tensor_slices((x, y)).batch(9),) if source == "dataset" else (x, y)
    options = {} if source == "dataset" else {"batch_size": 9}
    expected = float(MAKE[name]()(labels, x))
    assert_close(model.evaluate(*data, verbose=0, **options), expected)
    history = model.fit(*data, verbose=0, shuffle=False, **options).history["loss"]
    assert_close(history[0], expected)


@pytest.mark.parametrize("name", PAIR_LOSSES)
@pytest.mark.parametrize("shape", [(4,), (4, 2, 2)])
def test_something_other_than_embeddings_is_refused(name, shape):
    with pytest.raises(ValueError, match="expected embeddings"):
        MAKE[name]()([0, 0, 1, 1], np.zeros(shape, "float32"))


@pytest.mark.one_quick_case
@pytest.mark.parametrize("name", first_quick(PAIR_LOSSES))
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_plain_compile_and_fit_learn(name, mode):
    labels, x = random_batch(3, 32, 4, 8, unit=False)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.UnitNormalization()])
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss=MAKE[name](), jit_compile=mode == "xla")
    history = model.fit(x, labels, batch_size=32, epochs=30, verbose=0).history["loss"]
    assert history[-1] < 0.9 * history[0]


def test_model_with_a_compiled_loss_saves_and_loads(tmp_path):
    labels, x = batch()
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
    model.compile(optimizer="sgd", loss=losses.ContrastiveLoss(0.7, "euclidean", reduction="sum"))
    expected = model.evaluate(x, labels, batch_size=9, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.loss.get_config() == model.loss.get_config()
    assert_close(again.evaluate(x, labels, batch_size=9, verbose=0), expected, 1e-6)


def test_sum_reduction_is_the_papers_sum():
    labels, x = batch()
    expected = references.contrastive(labels, x, reduction="sum")
    assert_close(losses.ContrastiveLoss(reduction="sum")(labels, x), expected)


@functools.cache
def with_every_mining(name):
    """A loss, and the same with each mining that it takes, each with its name."""
    make = getattr(losses, name)
    if "mining" not in inspect.signature(make).parameters:
        return {name: make()}
    own = losses.triplet.MINING if make is losses.TripletLoss else ()
    return {name: make(), **{f"{name} {mining}": make(mining=mining) for mining in (*own, *named_miners())}}


every_name = pytest.mark.parametrize("name", losses.__all__)


@every_name
def test_a_nan_is_not_hidden(name):
    for key, loss in with_every_mining(name).items():
        labels, x = batch()
        for image in (0, 8):
            hidden = x.copy()
            hidden[image, 2] = np.nan
            assert np.isnan(loss(labels, hidden)), key
        of_one = np.isnan(loss.call(labels, hidden))
        assert np.all(of_one) or list(np.flatnonzero(of_one)) == [8], key


@every_name
def test_a_batch_without_images_costs_nothing_and_has_no_gradient(name):
    for key, loss in with_every_mining(name).items():
        value, (gradient,) = value_and_gradients(lambda x, loss=loss: loss(np.zeros(0, "int64"), x), np.zeros((0, 5)))
        assert value == 0.0, key
        assert gradient.shape == (0, 5), key


@pytest.mark.parametrize("key", ["TripletLoss hard", "QuadrupletLoss", *(f"NTXentLoss {m}" for m in named_miners())])
def test_a_batch_of_unknown_size_may_turn_out_to_be_empty(key):
    loss = with_every_mining(key.split()[0])[key]

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, 5])], autograph=False)
    def run(labels, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = loss(labels, x)
        return value, tape.gradient(value, x)

    value, gradient = run(np.zeros(0, "int64"), np.zeros((0, 5), "float32"))
    assert value == 0.0
    assert gradient.shape == (0, 5)


@every_name
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_computed_in_float32_on_every_path(name, dtype):
    labels, x = batch()
    half = tf.cast(x, dtype)
    exact = tf.cast(half, "float32")
    for loss in (getattr(losses, name)(), *([losses.NPairLoss(l2=0.1)] if name == "NPairLoss" else [])):
        np.testing.assert_array_equal(loss.call(labels, half), loss.call(labels, exact))
        if isinstance(loss, losses.PairLoss):
            expected = loss.of_pairs(Pairs.of_batch(exact, labels))
            term = objectives.MetricLoss(loss, representation="projection")
            for value in (loss.of_pairs(Pairs.of_batch(half, labels)), term({"projection": half}, labels)):
                assert value.dtype == tf.float32
                np.testing.assert_array_equal(value, expected)


class ReducesItself(losses.PairLoss):
    def anchor_losses(self, pairs):
        return keras.ops.mean(pairs.anchors)


def test_a_scalar_from_anchor_losses_is_refused():
    loss = ReducesItself(name="mine")
    for call in (loss, lambda labels, x: loss.of_pairs(Pairs.of_batch(x, labels))):
        with pytest.raises(ValueError, match=r"mine: expected one value per anchor \(b,\) from anchor_losses.*\(\)"):
            call(np.array([0, 0]), np.eye(2, dtype="float32"))
