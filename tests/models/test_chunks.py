"""A step by chunks of images is the step on the whole batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.models.networks import SIZE, Taking, colored_batch, images, tiny_embedder, values
from tests.models.test_learner import TERMS, learner
from tests.support.marks import JAX, QUICK_XLA, first_quick
from tests.support.mathematics import assert_close, public_classes
from tests.support.processes import run_python
from tests.training.method_steps import LEARNERS
from tfdml import losses, objectives
from tfdml.models import Embedder, MetricLearner

# Of 12 images: a chunk of 8, and 4 that are left.
CHUNK = 8
# HORDE's base loss, its moments and the ensemble's own terms are in one of them.
IDEAS = ("jrd", "horde on abe", "ecaml", "dml_da", "rank_mi")


def gradients(model, chunk, batch=None):
    """What a step makes of the variables, and its logs."""
    model.gradient_cache = chunk
    model.compile(Taking(), run_eagerly=True)
    labels, x = batch or colored_batch()
    logs = model.train_step((tf.nest.map_structure(tf.constant, x), tf.constant(labels)))
    return values(model.trainable_variables), {name: float(value) for name, value in logs.items()}


def check(made, chunk=CHUNK, batch=None, floor=1e-6):
    """The step by chunks is the plain one, and logs the same; the two learners after it."""
    plain, cached = made(), made()
    expected, logs = gradients(plain, 0, batch)
    actual, cached_logs = gradients(cached, chunk, batch)
    largest = max(np.abs(value).max() for value in expected)
    assert largest > 1e-3
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, 1e-5, floor=floor * largest)
    assert set(cached_logs) == set(logs)
    for name in logs:
        assert_close(cached_logs[name], logs[name], floor=1e-6)
    return plain, cached


# Those that TERMS and the methods leave out.
MORE = {
    "matryoshka": lambda: objectives.Matryoshka(losses.MultiSimilarityLoss(), [2, 4]),
    "matryoshka of proxies": lambda: objectives.MatryoshkaProxyLoss(
        losses.AMSoftmaxLoss(), 3, [2, 4]
    ),
    "curricular face": lambda: objectives.CurricularFace(3, scale=8.0, margin=0.2),
    "sphere face 2": lambda: objectives.SphereFace2(3, scale=8.0, margin=0.2),
    "instance": lambda: objectives.InstanceLoss(3),
    "joint intra": lambda: objectives.JointIntra(("pooled", "embedding")),
    "soft triple": lambda: objectives.RegularizedSoftTriple(3, 2),
    "prism": lambda: objectives.Prism(losses.ContrastiveLoss(1.3, "euclidean"), 3, size=24),
    "cross-batch memory": lambda: objectives.CrossBatchMemory(
        losses.ContrastiveLoss(1.3, "euclidean"), 24
    ),
}


@pytest.mark.one_quick_case
@pytest.mark.parametrize("name", [*MORE, *TERMS, *IDEAS])
def test_the_step_of_every_objective_is_a_plain_step(name):
    # Images of a chunk are embedded to the last digit of 6e-8, which the gradient of near images
    # divides by their distance: with the images in another order the largest difference is 3e-8 to
    # 3e-5 of the largest gradient.
    floor = 5e-5 if name in ("prism", "cross-batch memory") else 1e-6
    learners = check(
        lambda: of_idea(name) if name in IDEAS else learner((TERMS | MORE)[name]()), floor=floor
    )
    if name in MORE:  # with a state
        for one, other in zip(
            *(values(model.non_trainable_variables) for model in learners), strict=True
        ):
            assert_close(one, other, 1e-5)


def test_no_objective_is_left_out():
    made = [make() for make in (*TERMS.values(), *MORE.values())] + [
        LEARNERS[name]()[1] for name in IDEAS
    ]
    listed = [
        term for terms in made for term in (terms if isinstance(terms, (list, tuple)) else [terms])
    ]
    seen = {type(term).__name__ for term in listed} | {
        "MetricLoss"
    }  # what a plain loss is wrapped in
    seen |= {
        "AcrossViews",
        "SigmoidAcrossViews",
        "SoftmaxAcrossViews",
    }  # in test_text.py, of two embedders
    assert not public_classes(objectives).keys() - seen


def of_idea(name):
    keras.utils.set_random_seed(3)
    embedder, terms = LEARNERS[name]()
    # Of chunks, statistics in training are others.
    config = (
        {**embedder.get_config(), "batch_norm": "frozen"}
        if embedder.batch_norm == "train"
        else None
    )
    model = MetricLearner(type(embedder).from_config(config) if config else embedder, terms)
    model.build((None, SIZE, SIZE, 3))
    return model


@pytest.mark.one_quick_case
@pytest.mark.parametrize(("size", "chunk"), [(7, 6), (12, 1), (5, 5), (3, 64)])
def test_chunks_need_not_divide_the_batch(size, chunk):
    labels, x = colored_batch()
    rows = np.random.default_rng(1).permutation(12)[:size]
    check(lambda: learner(TERMS["pairs"]()), chunk, (labels[rows], x[rows]))


def test_chunks_on_devices_of_jax_keep_the_order_of_the_batch():
    pytest.importorskip("jax")
    two = {**JAX, "XLA_FLAGS": f"{QUICK_XLA} --xla_force_host_platform_device_count=2"}
    run_python("-m", "tests.models.jax_chunks", environment=two)


def random_learner(few):
    """With all that differs from call to call: dropout, augmentation within the network, BatchNorm
    in training."""
    keras.utils.set_random_seed(5)
    x = inputs = keras.Input((SIZE, SIZE, 3))
    x = keras.layers.RandomFlip("horizontal", seed=1)(x)
    x = keras.layers.Conv2D(6, 3, strides=2, padding="same")(x)
    x = keras.layers.BatchNormalization(momentum=0.5)(x)
    x = keras.layers.SpatialDropout2D(0.3, seed=2)(keras.layers.ReLU()(x))
    embedder = Embedder(
        keras.Model(inputs, x), embedding_dim=5, image_size=SIZE, batch_norm="train", dropout=0.4
    )
    terms = [
        objectives.ProxyLoss(losses.AMSoftmaxLoss(5.0), 3),
        objectives.JointRepresentationSimilarity(),
        objectives.HighOrderMomentLoss(losses.BinomialDevianceLoss(), orders=3, dim=8),
        objectives.EnergyConfusion(weight=0.3),
    ]
    model = MetricLearner(embedder, terms[:1] if few else terms, gradient_cache=CHUNK)
    model.embedder.dense.kernel_regularizer = keras.regularizers.L2(0.1)
    model.build((None, SIZE, SIZE, 3))
    return model


def by_one_tape(model, x, labels):
    """The gradient through all chunks at once, which keeps the activations of all; and what it
    leaves of the states."""
    variables = model.trainable_variables
    with tf.GradientTape() as tape:
        chunks = [x[first : first + CHUNK] for first in range(0, x.shape[0], CHUNK)]
        found = [model(chunk, training=True) for chunk in chunks]
        whole = {name: tf.concat([part[name] for part in found], 0) for name in found[0]}
        loss = model.compute_loss(None, tf.convert_to_tensor(labels), whole)
    through = tape.gradient(loss, [variable.value for variable in variables])
    return [
        v.value if g is None else tf.convert_to_tensor(g)
        for v, g in zip(variables, through, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mode", first_quick(["eager", "graph of unknown size", "xla"]))
def test_random_layers_draw_the_same_in_both_passes_and_chunks_are_virtual_batches(mode):
    labels, x = colored_batch()
    reference, model = random_learner(few=mode == "xla"), random_learner(few=mode == "xla")
    # XLA draws other numbers.
    run = (
        tf.function(by_one_tape, jit_compile=True, autograph=False)
        if mode == "xla"
        else by_one_tape
    )
    expected = [value.numpy() for value in run(reference, x, labels)]
    before = values(model.non_trainable_variables)
    model.compile(Taking(), run_eagerly=mode == "eager", jit_compile=mode == "xla")
    rows = tf.data.Dataset.from_tensor_slices((x, labels))
    model.fit(rows.batch(12, drop_remainder=mode == "xla"), verbose=0)
    largest = max(np.abs(value).max() for value in expected)
    for one, other in zip(values(model.trainable_variables), expected, strict=True):
        assert_close(one, other, 1e-5, floor=1e-6 * largest)
    after = values(model.non_trainable_variables)
    # Moving statistics and random states, once for each chunk.
    for one, other in zip(after, values(reference.non_trainable_variables), strict=True):
        assert_close(one, other, 1e-6)
    assert (
        sum(not np.array_equal(one, other) for one, other in zip(after, before, strict=True)) == 5
    )


@pytest.mark.slow
def test_mixed_precision_scales_the_loss_and_leaves_out_a_step_that_overflows():
    def made(chunk, scale):
        keras.config.set_dtype_policy("mixed_float16")
        try:
            keras.utils.set_random_seed(3)
            terms = [
                losses.ContrastiveLoss(1.3),
                objectives.HighOrderMomentLoss(losses.ContrastiveLoss(), 2, 8),
            ]
            model = MetricLearner(tiny_embedder(), terms, gradient_cache=chunk)
            model.build((None, SIZE, SIZE, 3))
        finally:
            keras.config.set_dtype_policy("float32")
        model.compile(
            keras.optimizers.LossScaleOptimizer(Taking(), initial_scale=scale), run_eagerly=True
        )
        before = values(model.trainable_variables)
        labels, x = colored_batch()
        model.fit(x, labels, batch_size=12, shuffle=False, verbose=0)
        return before, values(model.trainable_variables), float(model.optimizer.dynamic_scale)

    _, expected, _ = made(0, 1024.0)
    _, actual, _ = made(CHUNK, 1024.0)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, 1e-2)
    before, after, scale = made(CHUNK, 2.0**60)
    assert scale == 2.0**59
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))


def test_no_more_than_a_chunk_is_embedded_at_a_time(monkeypatch):
    sizes = []
    represent = Embedder.represent

    def watched(self, batch, **options):
        sizes.append(batch.shape[0])
        return represent(self, batch, **options)

    monkeypatch.setattr(Embedder, "represent", watched)
    gradients(learner(TERMS["pairs"]()), CHUNK)
    assert sizes == [8, 4] * 2
    # No feature map waits for the loss.
    assert learner(TERMS["moments"]()).reads == (
        "embedding",
        "high_order_moment_2",
        "high_order_moment_3",
    )


def test_losses_that_layers_add_and_other_backends_are_refused(monkeypatch):
    model = learner(TERMS["pairs"]())
    model.embedder.dense.activity_regularizer = keras.regularizers.L2(0.1)
    with pytest.raises(ValueError, match="add_loss"):
        gradients(model, CHUNK)
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(ValueError, match="works on TensorFlow and JAX, not on torch"):
        model.train_step((images(), np.zeros(8)))
