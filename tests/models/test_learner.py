"""The learner: its terms, its logs, its data, and its step on one device and on several
replicas."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tests.models.networks import SIZE, colored_batch, config_of, images, jrd, tiny_embedder, values
from tests.support import references
from tests.support.mathematics import assert_close, dtype_policy
from tests.support.played_replicas import play
from tfdml import kernels, losses, objectives, pairwise, replicas
from tfdml.errors import UserError
from tfdml.losses import ContrastiveLoss
from tfdml.models import Embedder, MetricLearner
from tfdml.models.learner_inputs import LearnerInputs
from tfdml.objectives import (
    DensityAdaptivity,
    EnergyConfusion,
    JointRepresentationSimilarity,
    MetricLoss,
    RankMI,
)

MULTIPLIERS = {"pooled": (0.5, 1.0, 2.0), "embedding": (0.5, 1.0, 2.0), "class": (1.0,)}


def compiled(objectives, rate=0.1, seed=0, jit_compile=None, **options):
    """A learner that steps eagerly, which is quicker than to build a graph for a step or two; or as
    asked."""
    learner = MetricLearner(tiny_embedder(seed, **options), objectives)
    learner.compile(
        keras.optimizers.SGD(rate), jit_compile=bool(jit_compile), run_eagerly=jit_compile is None
    )
    return learner


def reported(learner, x, y):
    """What one step without an update reports."""
    return learner.evaluate(x, y, batch_size=len(x), verbose=0, return_dict=True)


def expected_terms(learner, x, labels):
    """The JRD terms of the present weights, slowly."""
    r = {name: np.asarray(value, "float64") for name, value in learner(x).items()}
    proxies = values([learner.objectives[0].class_proxies.proxies])[0]
    r["class"] = references.class_similarities(r["embedding"], proxies)
    grams = [
        references.gaussian(r[level], None, multipliers)
        for level, multipliers in MULTIPLIERS.items()
    ]
    return {
        "am_softmax_loss": references.am_softmax(labels, r["class"]),
        "joint_representation_similarity": references.joint_representation_similarity(
            labels, grams
        ),
    }


@pytest.mark.one_quick_case
@pytest.mark.parametrize("weight", [0.4, 0.0])
def test_reports_each_term_unweighted_and_their_weighted_sum(weight):
    labels, x = colored_batch()
    learner = compiled(jrd(weight=weight))
    logs = reported(learner, x, labels)
    terms = expected_terms(learner, x, labels)
    assert set(logs) == {"loss", *terms, "d_pos", "d_neg", "violations"}
    for name, value in terms.items():
        assert_close(logs[name], value)
    order = np.random.default_rng(0).permutation(len(x))
    for size in (len(x), 5):
        logs = learner.evaluate(
            x[order], labels[order], batch_size=size, verbose=0, return_dict=True
        )
        assert_close(
            logs["loss"], logs["am_softmax_loss"] + weight * logs["joint_representation_similarity"]
        )
        assert_close(logs["am_softmax_loss"], terms["am_softmax_loss"])


def test_reports_mean_distances_and_the_share_of_negatives_nearer_than_the_furthest_positive():
    _, x = colored_batch()
    labels = np.array([0, 1, 2, 0, 0, 1, 1, 2, 2, 0, 1, 3])
    learner = compiled(losses.ContrastiveLoss())
    logs, e = reported(learner, x, labels), np.asarray(learner(x)["embedding"], "float64")
    same, other = references.positive_pairs(labels), references.negative_pairs(labels)
    for name, pairs in (("d_pos", same), ("d_neg", other)):
        assert_close(logs[name], references.mean([np.linalg.norm(e[i] - e[j]) for i, j in pairs]))
    furthest = {i: max(np.linalg.norm(e[i] - e[j]) for k, j in same if k == i) for i in range(11)}
    violations = [np.linalg.norm(e[i] - e[j]) < furthest[i] for i, j in other if i < 11]
    assert 0.2 < np.mean(violations) < 0.95
    assert_close(logs["violations"], np.mean(violations))


def test_regularizers_of_layers_count_once():
    labels, x = colored_batch()
    learner = compiled(losses.ContrastiveLoss())
    plain = reported(learner, x, labels)["loss"]
    learner = compiled(losses.ContrastiveLoss())
    learner.embedder.dense.kernel_regularizer = keras.regularizers.L2(0.1)
    learner.build((None, SIZE, SIZE, 3))
    penalty = 0.1 * float(np.sum(values([learner.embedder.dense.kernel])[0] ** 2))
    assert_close(reported(learner, x, labels)["loss"], plain + penalty)


def test_loss_falls_and_predict_gives_embeddings():
    labels, x = colored_batch()
    learner = compiled(jrd(), jit_compile=False)
    history = learner.fit(x, labels, batch_size=len(x), epochs=15, verbose=0).history
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    assert history["d_pos"][-1] < history["d_neg"][-1]
    assert_close(learner.predict(images(), verbose=0), learner.embedder(images()))
    assert set(learner(images())) == {"feature_map", "pooled", "projection", "embedding", "class"}


@pytest.mark.one_quick_case
@pytest.mark.parametrize("base", [2**24, 2**53])
def test_large_ids_do_not_collide(base):
    labels, x = colored_batch()
    learner = compiled(
        [losses.ContrastiveLoss(), JointRepresentationSimilarity(("pooled", "embedding"))]
    )
    expected = reported(learner, x, labels)
    logs = reported(learner, x, labels.astype("int64") + base)
    for name, value in expected.items():
        assert_close(logs[name], value, 1e-6)


def test_labels_that_keras_would_make_float32_are_made_integers_or_refused_by_fit():
    labels, x = colored_batch()
    learner = compiled([losses.ContrastiveLoss()])
    expected = reported(learner, x, labels)["loss"]
    large = 1e8 + labels.astype("float64")
    assert_close(reported(learner, x, large)["loss"], expected, 1e-6)
    history = learner.fit(
        x, large, batch_size=len(x), validation_data=(x, large), shuffle=False, verbose=0
    ).history
    assert_close(history["loss"][0], expected, 1e-6)
    assert np.isfinite(history["val_loss"][0])
    before = values(learner.variables)
    for wrong in (
        labels + 0.5,
        np.where(labels, np.nan, 0),
        np.array(list("abc"))[labels],
        large.astype("float32"),  # different ids become one
        np.eye(3)[labels],
        np.full(len(x), 7),  # one class teaches nothing
    ):
        with pytest.raises(UserError):
            learner.fit(x, wrong, verbose=0)
    for one, other in zip(before, values(learner.variables), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_label_of_a_dataset_that_has_no_proxy_is_refused_whatever_compiles_the_steps():
    proxies = objectives.ProxyLoss(losses.AMSoftmaxLoss(), num_classes=3)
    inputs = LearnerInputs(MetricLearner(tiny_embedder(), proxies))
    batches = tf.data.Dataset.from_tensors((np.zeros((2, SIZE, SIZE, 3)), [0, 3]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"labels must be classes 0 \.\. 2"):
        list(inputs.refusing(batches))


DEGENERATE = {
    "one class": ([1] * 6, 6),
    "every image its own class": (range(6), 6),
    "identical images": ([0, 0, 1, 1, 2, 2], 1),
    "black images": ([0, 0, 1, 1, 2, 2], 0),
    "one image": ([0], 1),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "batch_norm"),
    [("float32", "frozen"), ("mixed_bfloat16", "train"), ("mixed_float16", "frozen")],
)
def test_degenerate_batches_leave_every_weight_finite(policy, batch_norm):
    with dtype_policy(policy):
        pair_losses = [losses.ContrastiveLoss(1.0, "euclidean"), losses.BinomialDevianceLoss()]
        learner = compiled([*jrd(num_classes=6), *pair_losses], batch_norm=batch_norm)
        for name, (labels, different) in DEGENERATE.items():
            x = np.zeros((len(labels), SIZE, SIZE, 3), "uint8")
            if different:
                x = images(size=different, dtype="uint8")[np.arange(len(labels)) % different]
            logs = learner.train_on_batch(x, np.array(labels), return_dict=True)
            assert np.all(np.isfinite([*logs.values()])), name
            assert all(np.all(np.isfinite(array)) for array in values(learner.variables)), name
        embedding = learner(images())["embedding"]
    assert embedding.dtype == tf.float32
    assert_close(np.linalg.norm(embedding, axis=1), np.ones(8), 1e-6)


# V of RankMI has an optimizer of its own. A file of Keras holds no states of random generators.
SAVED = {
    "jrd": lambda: jrd(weight=0.4),
    "rank mi": lambda: [
        RankMI(1.5, hidden=8, depth=1, negatives="all"),
        losses.ContrastiveLoss(1.3),
    ],
}


@pytest.mark.one_quick_case
@pytest.mark.parametrize("name", SAVED)
def test_saves_and_loads_with_its_objectives_and_optimizer(name, tmp_path):
    labels, x = colored_batch()
    learner = MetricLearner(tiny_embedder(batch_norm="train"), SAVED[name](), name="mine")
    learner.compile(optimizer=keras.optimizers.Adam(0.01), run_eagerly=True)
    learner.fit(x, labels, batch_size=len(x), epochs=2, verbose=0)
    learner.save(tmp_path / "learner.keras")
    again = keras.saving.load_model(tmp_path / "learner.keras")
    assert config_of(again) == config_of(learner)
    np.testing.assert_array_equal(again.predict(x, verbose=0), learner.predict(x, verbose=0))
    assert reported(again, x, labels) == reported(learner, x, labels)
    for model in (learner, again):
        model.fit(x, labels, batch_size=len(x), epochs=2, verbose=0)
    for actual, expected in zip(values(again.weights), values(learner.weights), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MetricLoss(losses.ContrastiveLoss(), name="d_pos"), "the logs use"),
        (lambda: [EnergyConfusion(name="a"), EnergyConfusion(name="a")], "two objectives"),
        (lambda: [MetricLoss(losses.ContrastiveLoss(), "pool")], "'pool'"),
        (lambda: [JointRepresentationSimilarity()], "'class' comes from a ProxyLoss"),
        (lambda: jrd()[::-1], "before this objective"),
    ],
)
def test_objectives_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        MetricLearner(tiny_embedder(), make())


# What `fit` and `predict` are given


LABELS = np.repeat(np.arange(4), 3)
UNIT = np.random.default_rng(0).random((12, 8, 8, 3), "float32")


def small_learner():
    backbone = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3)])
    made = MetricLearner(Embedder(backbone, embedding_dim=4, image_size=8), ContrastiveLoss())
    made.build((None, 8, 8, 3))
    made.compile("adam", run_eagerly=True)
    return made


def warned(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [warning for warning in caught if "0 to 255" in str(warning.message)]


@pytest.mark.one_quick_case
@pytest.mark.parametrize("form", ["arrays", "tf.data"])
def test_fit_warns_once_of_images_in_the_unit_range(form):
    made = small_learner()
    data = (UNIT, LABELS) if form == "arrays" else (tf.data.Dataset.from_tensors((UNIT, LABELS)),)
    (warning,) = warned(lambda: made.fit(*data, epochs=2, verbose=0))
    assert warning.filename == __file__
    assert not warned(lambda: made.fit(*data, epochs=1, verbose=0))
    assert not warned(lambda: made.predict(UNIT, verbose=0))


def test_pixels_of_another_range_are_warned_of_and_usual_ones_are_not():
    for odd in (2 * UNIT - 1, 65280 * UNIT, np.full_like(UNIT, np.nan)):
        assert len(warned(lambda images=odd: small_learner().predict(images, verbose=0))) == 1
    for usual in (255 * UNIT, 0 * UNIT, 300 * UNIT - 20):
        assert not warned(lambda images=usual: small_learner().predict(images, verbose=0))


def test_labels_that_all_differ_are_warned_of():
    with pytest.warns(UserWarning, match="no two images have the same label"):
        small_learner().fit(255 * UNIT, np.arange(12), verbose=0)


def test_fit_asks_for_steps_of_batches_without_end():
    # Endless by its cardinality alone, so that a fit that accepts it fails and does not run
    # forever.
    batches = tf.data.Dataset.from_tensors((255 * UNIT, LABELS))
    batches = batches.apply(
        tf.data.experimental.assert_cardinality(tf.data.experimental.INFINITE_CARDINALITY)
    )
    with pytest.raises(UserError, match="steps_per_epoch"):
        small_learner().fit(batches, epochs=1)
    small_learner().fit(batches, epochs=1, steps_per_epoch=1, verbose=0)


# What a learner measures on its training set


def densities(learner, x, labels):
    """Eq. 5 on the pooled features, slowly."""
    pooled = np.asarray(learner.embedder.represent(x, training=False)["pooled"], "float64")
    means = [pooled[labels == c].mean(0) for c in range(3)]
    return [np.mean([np.sum((v - means[c]) ** 2) for v in pooled[labels == c]]) for c in range(3)]


FORMS_OF_BATCHES = {
    "a dataset": lambda x, y: tf.data.Dataset.from_tensor_slices((x, y)).batch(5),
    "a generator": lambda x, y: ((x[i : i + 5], y[i : i + 5]) for i in range(0, len(x), 5)),
    "a list": lambda x, y: [[x, y.reshape(-1, 1).tolist()]],
}


@pytest.mark.parametrize("form", FORMS_OF_BATCHES)
def test_the_learner_measures_every_training_image(form):
    (labels, x), learner = colored_batch(), compiled([ContrastiveLoss(), DensityAdaptivity(3)])
    learner.adapt(FORMS_OF_BATCHES[form](x, labels))
    density = learner.objectives[1]
    assert density.is_adapted
    np.testing.assert_allclose(density.measured_density, densities(learner, x, labels), rtol=1e-4)


# Several replicas


TERMS = {
    "pairs": lambda: losses.ContrastiveLoss(1.3, "euclidean"),
    "pairs sum": lambda: losses.BinomialDevianceLoss(reduction="sum"),
    "joint": jrd,
    "proxy anchor": lambda: objectives.ProxyLoss(losses.ProxyAnchorLoss(4.0), 3),
    "proxies sum": lambda: objectives.ProxyLoss(
        losses.AMSoftmaxLoss(reduction="sum"), 3, weight=0.1
    ),
    "moments": lambda: objectives.HighOrderMomentLoss(
        losses.ContrastiveLoss(1.3, "euclidean"), 3, 8
    ),
    "moments of classes": lambda: objectives.HighOrderMomentLoss(
        losses.AMSoftmaxLoss(), 3, 8, num_classes=3, weight=0.1
    ),
    "energy": lambda: objectives.EnergyConfusion(),
    "density": lambda: objectives.DensityAdaptivity(3, reference_density=[1.0, 2.0, 0.5]),
    "spread": lambda: [objectives.EntropySpread(), objectives.GlobalOrthogonal()],
    "joint norms": lambda: objectives.JointMMD(("pooled", "embedding")),
    "density hard sum": lambda: objectives.DensityAdaptivity(
        3, reference_density=[1.0, 2.0, 0.5], constraint="hard", reduction="sum"
    ),
    "energy of mean": lambda: objectives.EnergyConfusion("log_of_mean"),
    "nearest": lambda: objectives.EntropySpread("nearest"),
    "intra class": lambda: objectives.IntraClassPenalty(),
    "kernels of largest values": lambda: objectives.JointRepresentationSimilarity(
        "embedding", kernels.Polynomial(2), weight=0.1
    ),
    # V stands still: each step would move it, and the replicas that are played share one. Devices
    # have their own.
    "rank mi": lambda: objectives.RankMI(
        1.5, hidden=8, depth=1, negatives="all", learning_rate=1e-12
    ),
    "learned margin": lambda: objectives.LearnedMargin(3, beta=0.6, nu=0.1),
}


def learner(terms):
    keras.utils.set_random_seed(3)
    model = MetricLearner(tiny_embedder(batch_norm="statistics"), terms)
    # As the layers of a user may be: it counts once, however many replicas there are.
    model.embedder.dense.kernel_regularizer = keras.regularizers.L2(0.1)
    model.build((None, SIZE, SIZE, 3))
    return model


def step(model, sizes):
    """The loss, summed over replicas as Keras does, its gradients, and the value of each term over
    the images."""
    labels, x = colored_batch()
    reported = []

    def loss(y, images):
        model.reset_metrics()
        value = model.compute_loss(images, y, model(images, training=True), training=True)
        reported.append([float(tracker.result()) for tracker in model.term_trackers])
        return value

    with tf.GradientTape() as tape:
        if len(sizes) == 1:
            total = loss(tf.constant(labels), tf.constant(x))
        else:
            parts = zip(
                tf.split(tf.constant(labels), sizes), tf.split(tf.constant(x), sizes), strict=True
            )
            total = tf.add_n(play(loss, *parts))
    gradients = tape.gradient(total, [variable.value for variable in model.trainable_variables])
    return total.numpy(), gradients, np.average(reported[-len(sizes) :], axis=0, weights=sizes)


# A loss over the pairs of all replicas, one whose images each replica averages by itself, work on
# each image before they are gathered, and a whole batch. tests/objectives plays the replicas of
# every objective.
SLOW = ("moments", "moments of classes", "rank mi")


@pytest.mark.parametrize(
    "name", ["joint", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pairs", *SLOW))]
)
def test_the_gradient_is_that_of_one_device(name):
    model = learner(TERMS[name]())
    value, expected, terms = step(model, [12])
    largest = max(np.abs(gradient).max() for gradient in expected if gradient is not None)
    assert largest > 1e-3
    _, gradients, _ = step(model, [7, 5])
    for actual, wanted in zip(gradients, expected, strict=True):
        assert (actual is None) == (wanted is None)
        if wanted is not None:
            # The order of the batch alone, on one device, moves a bias by 2.5e-6 of the largest
            # gradient.
            assert_close(actual, wanted, 1e-5, floor=5e-6 * largest)
    total, _, reported = step(model, [6, 6])
    assert_close(total, value)
    assert_close(reported, terms)


def test_the_logged_loss_of_unequal_replicas_is_that_of_one_device():
    """Keras multiplies the loss of a replica by their number, and weighs it by its images."""
    model = learner([TERMS["pairs"](), *TERMS["joint"]()])
    labels, x = map(tf.constant, colored_batch())

    def loss(y, images):
        return model.compute_loss(None, y, model(images))

    sizes = [7, 5]
    parts = zip(tf.split(labels, sizes), tf.split(x, sizes), strict=True)
    logged = [2 * share.numpy() for share in play(loss, *parts)]
    assert_close(np.average(logged, weights=sizes), loss(labels, x))


WITHOUT_PAIRS = {"proxy anchor", "moments of classes", "proxies sum"}
WHOLE = {"rank mi", "joint norms", "kernels of largest values", "energy of mean", "spread"}


@pytest.mark.one_quick_case
@pytest.mark.parametrize("name", sorted(set(TERMS) - WHOLE - WITHOUT_PAIRS))
def test_a_replica_makes_no_more_than_its_own_rows(name, monkeypatch):
    model = learner(TERMS[name]())
    made = []

    def watched(function):
        def watching(*args, **kwargs):
            result = function(*args, **kwargs)
            made.append(tuple(result.shape))
            return result

        return watching

    for function in ("dot_products", "squared_distances", "absolute_distances", "together"):
        monkeypatch.setattr(pairwise, function, watched(getattr(pairwise, function)))
    step(model, [7, 5])
    # In the first round replicas take themselves for the others; distances within a replica are
    # logged.
    assert {(7, 12), (5, 12)} <= set(made)
    assert (12, 12) not in made


def test_a_network_that_trains_again_keeps_its_frozen_batch_norm():
    labels, x = colored_batch()
    made = compiled(losses.ContrastiveLoss())
    made.embedder.freeze_backbone()
    made.embedder.backbone.trainable = True
    made.fit(x, labels, batch_size=len(x), verbose=0)
    # The convolution and the projection, each with a bias.
    assert len(made.trainable_variables) == 4


def test_a_replica_without_images_is_refused():
    model = learner(losses.ContrastiveLoss())
    x = colored_batch()[1]
    refused = pytest.raises(ValueError, match="fewer images than there are replicas")
    with refused, replicas.explaining_empty_replicas():
        play(model, [x[:2]], [x[:0]])
    with (
        pytest.raises(ValueError, match="first batch cannot be split"),
        replicas.explaining_empty_replicas(),
    ):
        tf.add_n([tf.zeros((2, 1)), tf.zeros((1, 1))])


def fresh_learner(loss=None, **options):
    keras.utils.set_random_seed(0)
    backbone = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(4, 3),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
        ]
    )
    made = MetricLearner(
        Embedder(backbone, embedding_dim=4, image_size=8), loss or ContrastiveLoss()
    )
    made.compile("adam", **options)
    return made


X, WEIGHTS = 255 * UNIT, np.ones(len(LABELS))
WEIGHT_OF_CLASS = dict.fromkeys(range(10), 1.0)
REFUSED = {
    "class weights": lambda made: made.fit(X, LABELS, class_weight=WEIGHT_OF_CLASS, verbose=0),
    "image weights": lambda made: made.fit(X, LABELS, sample_weight=WEIGHTS, verbose=0),
    "three parts": lambda made: made.fit(
        tf.data.Dataset.from_tensors((X, LABELS, WEIGHTS)), verbose=0
    ),
    "labels": lambda made: made.fit(tf.data.Dataset.from_tensors((X, LABELS + 0.5)), verbose=0),
    "gray": lambda made: made.fit(X[..., :1], LABELS, verbose=0),
    "validation": lambda made: made.fit(X, LABELS, validation_data=(X[..., :1], LABELS), verbose=0),
    "predict": lambda made: made.predict(X[..., :1], verbose=0),
}


@pytest.mark.one_quick_case
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_leaves_a_learner_as_it_was(case):
    # By a compiled step in one case, which takes 10 s.
    options = {"jit_compile": False, "run_eagerly": case != "predict"}
    made, other = fresh_learner(**options), fresh_learner(**options)
    with pytest.raises(UserError):
        REFUSED[case](made)
    assert not made.built
    assert (made.train_function, made.test_function, made.predict_function) == (None, None, None)
    logs = [
        one.fit(X, LABELS, batch_size=len(X), verbose=0).history["loss"] for one in (made, other)
    ]
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)
    assert len(made.train_on_batch(X, LABELS)) == len(made.metrics)
    assert np.isfinite(made.evaluate(X, LABELS, verbose=0)).all()
    assert made.predict(X, verbose=0).shape == (len(X), 4)


@pytest.mark.slow
def test_executions_of_several_steps_train_as_single_steps_and_end_with_the_epoch(monkeypatch):
    makers = [
        fresh_learner(ContrastiveLoss(), steps_per_execution=steps, jit_compile=False)
        for steps in (1, 3)
    ]
    logs = [
        made.fit(X, LABELS, batch_size=3, shuffle=False, epochs=2, verbose=0).history
        for made in makers
    ]
    assert logs[0] == logs[1]
    for one, several in zip(
        *(values(made.variables + made.optimizer.variables) for made in makers), strict=True
    ):
        np.testing.assert_array_equal(several, one)
    made = fresh_learner(steps_per_execution=2, run_eagerly=True)
    made.fit(X, LABELS, batch_size=4, epochs=2, verbose=0)
    assert int(made.optimizer.iterations) == 2 * 3
    endless = tf.data.Dataset.from_tensors((X, LABELS)).repeat()
    with pytest.raises(UserError, match="no multiple"):
        made.fit(endless, steps_per_epoch=3, verbose=0)
    monkeypatch.setattr(tf.distribute.Strategy, "num_replicas_in_sync", 2)
    with pytest.raises(UserError, match="one device"):
        made.compile("adam", steps_per_execution=2)


def test_a_learner_is_saved_to_a_keras_file_alone(tmp_path):
    with pytest.raises(UserError, match=r"\.keras"):
        fresh_learner().save(tmp_path / "a.h5")
    assert not list(tmp_path.iterdir())


def test_a_function_of_labels_and_embeddings_is_a_loss():
    def first_component(labels, embeddings):
        return ops.cast(labels, "float32") * embeddings[:, 0]

    made = fresh_learner(first_component)
    value = made.objectives[0]({"embedding": ops.eye(4)}, ops.array([3, 5, 7, 9]))
    assert float(value) == pytest.approx(3 / 4)
    assert made.fit(X, LABELS, verbose=0).history.keys() >= {"loss", "first_component"}


@pytest.mark.parametrize("loss", [keras.losses.CosineSimilarity(), lambda y, x: x[0, 0]])
def test_a_loss_of_two_tensors_of_one_shape_is_refused(loss):
    with pytest.raises(UserError, match="does not go with labels"):
        fresh_learner(loss).fit(X, LABELS, verbose=0)
