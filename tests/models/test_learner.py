import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import references
from tests.marks import first_quick
from tests.mathematics import assert_close
from tests.models.networks import SIZE, coloured_batch, config_of, images, jrd, tiny_embedder, values
from tests.objectives import references_classes
from tfdml import losses
from tfdml.models import MetricLearner
from tfdml.objectives import (
    DensityAdaptivity,
    EnergyConfusion,
    JointRepresentationSimilarity,
    MetricLoss,
    ProxyLoss,
    RankMI,
)

MULTIPLIERS = {"pooled": (0.5, 1.0, 2.0), "embedding": (0.5, 1.0, 2.0), "class": (1.0,)}


def compiled(objectives, rate=0.1, seed=0, jit_compile="auto", run_eagerly=False, **options):
    learner = MetricLearner(tiny_embedder(seed, **options), objectives)
    learner.compile(optimizer=keras.optimizers.SGD(rate), jit_compile=jit_compile, run_eagerly=run_eagerly)
    return learner


def reported(learner, x, y):
    """What one step without an update reports."""
    return learner.evaluate(x, y, batch_size=len(x), verbose=0, return_dict=True)


def expected_terms(learner, x, labels):
    """The JRD terms of the present weights, slowly."""
    r = {name: np.asarray(value, "float64") for name, value in learner(x).items()}
    proxies = values([learner.objectives[0].class_proxies.proxies])[0]
    r["class"] = references.class_similarities(r["embedding"], proxies)
    grams = [references.gaussian(r[level], None, multipliers) for level, multipliers in MULTIPLIERS.items()]
    return {
        "am_softmax_loss": references.am_softmax(labels, r["class"]),
        "joint_representation_similarity": references.joint_representation_similarity(labels, grams),
    }


@pytest.mark.one_quick_case
@pytest.mark.parametrize("weight", [1.0, 0.4, 0.0])
def test_reports_each_term_unweighted_and_their_weighted_sum(weight):
    labels, x = coloured_batch()
    learner = compiled(jrd(weight=weight))
    logs = reported(learner, x, labels)
    terms = expected_terms(learner, x, labels)
    assert set(logs) == {"loss", "am_softmax_loss", "joint_representation_similarity", "d_pos", "d_neg"}
    for name, value in terms.items():
        assert_close(logs[name], value)
    assert_close(logs["loss"], terms["am_softmax_loss"] + weight * terms["joint_representation_similarity"])


@pytest.mark.one_quick_case
@pytest.mark.parametrize("jit_compile", [False, True])
def test_reports_what_objectives_observe_as_means_over_classes_and_pairs_of_the_batches(jit_compile):
    labels, x = coloured_batch()
    order = np.random.default_rng(0).permutation(len(x))
    labels, x = labels[order], x[order]
    terms = [DensityAdaptivity(3, constraint=None), EnergyConfusion(name="confusion")]
    learner = compiled(terms, jit_compile=jit_compile)
    learner.build(x.shape)
    learner.objectives[0].target_density.assign([0.2, 0.5, 0.9])
    logs = learner.evaluate(x, labels, batch_size=5, verbose=0, return_dict=True)
    embeddings = np.asarray(learner(x)["embedding"], "float64")
    densities, targets, energies = [], [], []
    for start in range(0, len(x), 5):
        y, e = labels[start : start + 5], embeddings[start : start + 5]
        classes = references_classes.classes_of(y)
        densities += [references_classes.density(y, e, c) for c in classes]
        targets += [[0.2, 0.5, 0.9][c] for c in classes]
        count = len(references_classes.class_pairs(y))
        energies += [references_classes.energy_confusion(y, e, "plain")] * count
    assert_close(logs["density_adaptivity_d_avg"], np.mean(densities))
    assert_close(logs["density_adaptivity_target"], np.mean(targets))
    assert_close(logs["confusion_energy"], np.mean(energies))


def test_reports_the_mean_distances_of_positives_and_negatives():
    labels, x = coloured_batch()
    learner = compiled(losses.ContrastiveLoss())
    logs = reported(learner, x, labels)
    e = np.asarray(learner(x)["embedding"], "float64")
    for name, pairs in (("d_pos", references.positive_pairs(labels)), ("d_neg", references.negative_pairs(labels))):
        assert_close(logs[name], references.mean([np.linalg.norm(e[i] - e[j]) for i, j in pairs]))


def test_reported_terms_add_up_to_the_reported_loss_over_batches_of_any_size():
    labels, x = coloured_batch()
    learner = compiled(jrd(weight=0.4))
    order = np.random.default_rng(0).permutation(len(x))
    logs = learner.evaluate(x[order], labels[order], batch_size=5, verbose=0, return_dict=True)
    assert_close(logs["loss"], logs["am_softmax_loss"] + 0.4 * logs["joint_representation_similarity"])
    assert_close(logs["am_softmax_loss"], expected_terms(learner, x, labels)["am_softmax_loss"])


def test_batch_without_positives_does_not_count_in_their_mean_distance():
    labels, x = coloured_batch(per_class=2)
    order = [0, 1, 2, 4]
    learner = compiled(losses.ContrastiveLoss())
    logs = learner.evaluate(x[order], labels[order], batch_size=2, verbose=0, return_dict=True)
    first = reported(learner, x[:2], labels[:2])
    assert_close(logs["d_pos"], first["d_pos"])


def test_regularisers_of_layers_count_once():
    labels, x = coloured_batch()
    learner = compiled(losses.ContrastiveLoss())
    plain = reported(learner, x, labels)["loss"]
    learner = compiled(losses.ContrastiveLoss())
    learner.embedder.dense.kernel_regularizer = keras.regularizers.L2(0.1)
    learner.build((None, SIZE, SIZE, 3))
    penalty = 0.1 * float(np.sum(values([learner.embedder.dense.kernel])[0] ** 2))
    assert_close(reported(learner, x, labels)["loss"], plain + penalty)


def test_loss_falls():
    labels, x = coloured_batch()
    learner = compiled(jrd())
    history = learner.fit(x, labels, batch_size=len(x), epochs=15, verbose=0).history
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    assert history["d_pos"][-1] < history["d_neg"][-1]


@pytest.mark.slow
def test_jit_compilation_does_not_change_the_update():
    labels, x = coloured_batch()
    results = []
    for jit_compile in (False, True):
        learner = compiled(jrd(), jit_compile=jit_compile)
        learner.fit(x, labels, batch_size=len(x), epochs=2, verbose=0)
        results.append(values(learner.trainable_variables))
    for plain, jit in zip(*results, strict=True):
        assert_close(jit, plain, 1e-5)


def test_objectives_weights_are_trained():
    labels, x = coloured_batch()
    learner = compiled(jrd())
    learner.build((None, SIZE, SIZE, 3))
    before = values(learner.parts()["objectives"])
    learner.fit(x, labels, batch_size=len(x), verbose=0)
    assert [array.shape for array in before] == [(3, 5)]
    assert np.any(values(learner.parts()["objectives"])[0] != before[0])


def test_parts_divide_the_trainable_variables():
    learner = compiled(jrd())
    learner.build((None, SIZE, SIZE, 3))
    parts = learner.parts()
    assert list(parts) == ["backbone", "projection", "objectives"]
    named = [id(variable) for variables in parts.values() for variable in variables]
    assert sorted(named) == sorted(id(variable) for variable in learner.trainable_variables)


def test_predict_gives_embeddings():
    learner = compiled(jrd())
    embeddings = learner.predict(images(), verbose=0)
    assert_close(embeddings, learner.embedder(images()))
    assert set(learner(images())) == {"feature_map", "pooled", "projection", "embedding"}


def test_predict_and_predict_on_batch_agree():
    learner = compiled(losses.ContrastiveLoss())
    x = images()
    np.testing.assert_array_equal(learner.predict_on_batch(x), learner.predict(x, batch_size=len(x), verbose=0))


@pytest.mark.parametrize("objective", [losses.ContrastiveLoss, lambda: RankMI(1.5, hidden=4, depth=1)])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss": losses.ContrastiveLoss()},
            r"takes no loss, .* MetricLearner\(embedder, \[MetricLoss\(loss, weight=1.0",
        ),
        ({"loss_weights": [1.0]}, "takes no loss"),
        ({"metrics": ["accuracy"]}, r"takes no metrics, .*evaluate_retrieval\(learner.predict\(images\), labels\)"),
        ({"weighted_metrics": ["accuracy"]}, "takes no metrics"),
    ],
)
def test_a_compiled_loss_or_metric_is_refused_with_the_alternative(objective, options, message):
    learner = MetricLearner(tiny_embedder(), objective())
    with pytest.raises(ValueError, match=message):
        learner.compile("sgd", **options)


@pytest.mark.slow
@pytest.mark.parametrize("form", first_quick(["dataset", "column", "float"]))
def test_labels_of_every_usual_form_train_alike(form):
    labels, x = coloured_batch()
    learner = compiled(jrd())
    expected = reported(learner, x, labels)["loss"]
    if form == "dataset":
        data = tf.data.Dataset.from_tensor_slices((x, labels.astype("int64"))).batch(len(x))
        logs = learner.evaluate(data, verbose=0, return_dict=True)
    else:
        logs = reported(learner, x, labels[:, None] if form == "column" else labels.astype("float32"))
    assert_close(logs["loss"], expected, 1e-6)


@pytest.mark.one_quick_case
@pytest.mark.parametrize("base", [2**24, 2**53])
def test_large_ids_do_not_collide(base):
    labels, x = coloured_batch()
    learner = compiled([losses.ContrastiveLoss(), JointRepresentationSimilarity(("pooled", "embedding"))])
    expected = reported(learner, x, labels)
    logs = reported(learner, x, labels.astype("int64") + base)
    for name, value in expected.items():
        assert_close(logs[name], value, 1e-6)


DEGENERATE = {
    "one class": ([1] * 6, 6),
    "every image its own class": (range(6), 6),
    "identical images": ([0, 0, 1, 1, 2, 2], 1),
    "black images": ([0, 0, 1, 1, 2, 2], 0),
    "one image": ([0], 1),
}


@pytest.mark.one_quick_case
@pytest.mark.parametrize(
    ("policy", "batch_norm"), [("float32", "frozen"), ("mixed_bfloat16", "train"), ("mixed_float16", "frozen")]
)
def test_degenerate_batches_leave_every_weight_finite(policy, batch_norm):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        pair_losses = [losses.ContrastiveLoss(1.0, "euclidean"), losses.BinomialDevianceLoss()]
        learner = compiled([*jrd(num_classes=6), *pair_losses], batch_norm=batch_norm, run_eagerly=True)
        for name, (labels, different) in DEGENERATE.items():
            x = np.zeros((len(labels), SIZE, SIZE, 3), "uint8")
            if different:
                x = images(size=different, dtype="uint8")[np.arange(len(labels)) % different]
            history = learner.fit(x, np.array(labels), batch_size=len(labels), verbose=0).history
            assert np.all(np.isfinite([value[0] for value in history.values()])), name
            assert all(np.all(np.isfinite(array)) for array in values(learner.variables)), name
        embedding = learner(images())["embedding"]
    finally:
        keras.config.set_dtype_policy(before)
    assert embedding.dtype == tf.float32
    assert_close(np.linalg.norm(embedding, axis=1), np.ones(8), 1e-6)


def test_saves_and_loads_with_its_objectives_and_optimizer(tmp_path):
    labels, x = coloured_batch()
    learner = MetricLearner(tiny_embedder(batch_norm="train"), jrd(weight=0.4), name="mine")
    learner.compile(optimizer=keras.optimizers.Adam(0.01))
    learner.fit(x, labels, batch_size=len(x), epochs=2, verbose=0)
    learner.save(tmp_path / "learner.keras")
    again = keras.saving.load_model(tmp_path / "learner.keras")
    assert config_of(again) == config_of(learner)
    np.testing.assert_array_equal(again.predict(x, verbose=0), learner.predict(x, verbose=0))
    assert reported(again, x, labels) == reported(learner, x, labels)
    for model in (learner, again):
        model.fit(x, labels, batch_size=len(x), epochs=2, verbose=0)
    for actual, expected in zip(values(again.trainable_variables), values(learner.trainable_variables), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.slow
def test_objectives_stay_behind_when_the_embedder_is_saved(tmp_path):
    labels, x = coloured_batch()
    learner = compiled(jrd())
    learner.fit(x, labels, batch_size=len(x), verbose=0)
    learner.embedder.save(tmp_path / "embedder.keras")
    again = keras.saving.load_model(tmp_path / "embedder.keras")
    assert not any("proxies" in variable.path for variable in again.variables)
    np.testing.assert_array_equal(again.predict(x, verbose=0), learner.predict(x, verbose=0))


def test_plain_loss_is_wrapped():
    learner = compiled(losses.BinomialDevianceLoss())
    assert [type(objective) for objective in learner.objectives] == [MetricLoss]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (list, "at least one objective"),
        (lambda: MetricLoss(losses.ContrastiveLoss(), name="d_pos"), "called 'd_pos', a name that the logs use"),
        (
            lambda: [losses.ContrastiveLoss(), losses.ContrastiveLoss(2.0)],
            "two objectives are called 'contrastive_loss'",
        ),
        (
            lambda: [EnergyConfusion(name="a"), MetricLoss(losses.ContrastiveLoss(), name="a_energy")],
            "two objectives are called 'a_energy'",
        ),
        (lambda: [MetricLoss(losses.ContrastiveLoss(), "pool")], "needs the representation 'pool'"),
        (lambda: [JointRepresentationSimilarity()], "'class' comes from a ProxyLoss"),
        (lambda: jrd()[::-1], "before this objective"),
        (
            lambda: [ProxyLoss(losses.AMSoftmaxLoss(), 3), ProxyLoss(losses.NormSoftmaxLoss(), 3)],
            "provides the representation 'class', which is there already",
        ),
        (lambda: ["contrastive"], "an objective must be"),
    ],
)
def test_objectives_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        MetricLearner(tiny_embedder(), make())


def test_something_other_than_an_embedder_is_refused():
    with pytest.raises(ValueError, match="embedder must be"):
        MetricLearner(tiny_embedder().backbone, losses.ContrastiveLoss())


def test_sample_weights_are_refused():
    labels, x = coloured_batch()
    with pytest.raises(ValueError, match="without sample weights"):
        compiled(losses.ContrastiveLoss()).fit(x, labels, sample_weight=np.ones(len(x)), verbose=0)


def test_embedder_alone_trains_with_a_compiled_loss():
    labels, x = coloured_batch()
    embedder = tiny_embedder()
    embedder.compile(optimizer=keras.optimizers.Adam(0.01), loss=losses.ContrastiveLoss())
    history = embedder.fit(x, labels, batch_size=len(x), epochs=15, verbose=0).history["loss"]
    assert history[-1] < 0.8 * history[0]


@pytest.mark.slow
def test_embedder_alone_and_learner_make_the_same_update():
    labels, x = coloured_batch()
    embedder = tiny_embedder()
    embedder.compile(optimizer=keras.optimizers.SGD(0.1), loss=losses.ContrastiveLoss())
    embedder.fit(x, labels, batch_size=len(x), epochs=2, verbose=0)
    learner = compiled(losses.ContrastiveLoss())
    learner.fit(x, labels, batch_size=len(x), epochs=2, verbose=0)
    for alone, learnt in zip(values(embedder.variables), values(learner.embedder.variables), strict=True):
        assert_close(learnt, alone, 1e-6, floor=1e-12)


def test_detached_representations_are_made_only_for_objectives_that_read_them():
    plain = MetricLearner(tiny_embedder(), [losses.ContrastiveLoss()])
    assert list(plain(images())) == ["feature_map", "pooled", "projection", "embedding"]
    read = MetricLearner(tiny_embedder(), [MetricLoss(losses.ContrastiveLoss(), "detached_projection")])(images())
    np.testing.assert_array_equal(read["detached_projection"], read["projection"])
