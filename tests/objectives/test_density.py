import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.marks import first_quick
from tests.mathematics import assert_close, finite_differences, random_batch, value_and_gradients
from tests.models.networks import coloured_batch, tiny_embedder, values
from tests.objectives import references_classes as references
from tests.objectives.checks import (
    check_config,
    check_degenerate,
    check_formula,
    check_labels,
    check_large,
    check_saved_with_its_learner,
    check_symmetries,
    total_loss,
)
from tfdml import losses, models
from tfdml.objectives import DensityAdaptivity, MetricLoss
from tfdml.objectives.density import class_densities
from tfdml.pairs import pairs_by_name
from tfdml.training.terms import build_objectives

REFERENCE = [4.0, 1.0, 0.25, 9.0, 2.0, 0.0, 1.5, 3.0, 7.0]
TARGETS = [0.5, 0.2, 0.9, 0.4, 0.7, 0.3, 0.6, 0.1, 0.8]
CASES = {
    "soft": {},
    "soft sum": {"reduction": "sum"},
    "soft, eta 1": {"eta": 1.0},
    "soft, eta 0": {"eta": 0.0},
    "hard": {"constraint": "hard"},
    "none": {"constraint": None},
    "none sum": {"constraint": None, "reduction": "sum"},
}
every_case = pytest.mark.parametrize("arguments", CASES.values(), ids=CASES)
# The paper's: margins of 1, and sums.
BASES = {
    "contrastive": lambda: MetricLoss(losses.ContrastiveLoss(1.0, reduction="sum")),
    "triplet": lambda: MetricLoss(losses.TripletLoss(1.0, reduction="sum")),
    "n pair": lambda: MetricLoss(losses.NPairLoss(reduction="sum")),
}


def make(reference=REFERENCE, targets=TARGETS, **arguments):
    """An objective with these targets, or (hard) with the first of them as their mean."""
    objective = DensityAdaptivity(len(TARGETS), reference_density=reference, **arguments)
    objective.build({})
    objective.target_density.assign(targets[0] if objective.constraint == "hard" else targets)
    return objective


def on_embedding(**arguments):
    objective = make(**arguments)
    return lambda labels, x: objective({"embedding": x}, labels)


def reference(labels, x, targets=None, given=REFERENCE, **arguments):
    if targets is None:
        targets = TARGETS[0] if arguments.get("constraint") == "hard" else TARGETS
    return references.density_adaptivity(labels, x, targets, given, **arguments)


@every_case
def test_equals_the_paper(arguments):
    check_formula(on_embedding(**arguments), functools.partial(reference, **arguments))


@every_case
@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_gradients_of_embeddings_and_targets_equal_finite_differences(arguments, mode):
    labels, x = random_batch(11, 8, 4, 4)
    objective = make(**arguments)

    @tf.function(jit_compile=mode == "xla", autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = objective({"embedding": x}, labels)
        return value, tape.gradient(value, [x, objective.target_density.value])

    tf.config.run_functions_eagerly(mode == "eager")
    try:
        value, gradients = run(tf.constant(x))
    finally:
        tf.config.run_functions_eagerly(False)
    start = np.asarray(objective.target_density)
    assert_close(value, reference(labels, x, start, **arguments))
    expected = finite_differences(lambda e, t: reference(labels, e, t, **arguments), x, start)
    for actual, wanted in zip(gradients, expected, strict=True):
        assert np.any(wanted)
        assert_close(actual, wanted)


@pytest.mark.parametrize("mode", ["eager", "xla"])
@pytest.mark.parametrize("arguments", [{}, {"constraint": "hard"}, {"constraint": None}], ids=["soft", "hard", "none"])
def test_degenerate_batches(arguments, mode):
    check_degenerate(on_embedding(**arguments), functools.partial(reference, **arguments), mode)


def test_symmetries():
    check_symmetries(on_embedding(), relabelling=False)


def test_labels():
    check_labels(on_embedding())


@pytest.mark.slow
def test_a_batch_of_four_thousand():
    objective = DensityAdaptivity(100, reference_density=np.linspace(1.0, 2.0, 100))
    check_large(lambda labels, x: objective({"embedding": x}, labels))


def test_the_paper_s_defaults():
    objective = DensityAdaptivity(3)
    objective.build({})
    assert (objective.eta, objective.constraint, objective.reduction) == (0.5, "soft", "mean")
    np.testing.assert_array_equal(values([objective.target_density])[0], [0.5, 0.5, 0.5])
    assert [v.path.split("/")[-1] for v in objective.trainable_variables] == ["target_density"]
    assert objective.calibrates_on == "pooled"


def test_the_hard_constraint_holds_exactly():
    objective = make(constraint="hard", eta=0.5)
    targets, given = values([objective.targets()])[0], np.array(REFERENCE)
    known = given > 0
    assert_close(targets[known] / targets[0], np.sqrt(given[known] / given[0]), 1e-6)
    assert_close(targets[known].mean(), TARGETS[0], 1e-6)
    assert_close(targets[~known], [TARGETS[0]], 1e-6)


def test_the_soft_constraint_vanishes_where_the_hard_one_holds():
    labels, x = random_batch(3, 10, 4, 5)
    targets = values([make(constraint="hard").targets()])[0]
    soft, none = (on_embedding(targets=targets, constraint=name)(labels, x) for name in ("soft", None))
    assert_close(soft, none, 1e-6)


def test_targets_and_densities_grow():
    labels, x = np.repeat([0, 1], 5), random_batch(3, 10, 2, 5)[1] * np.float32(0.1)
    objective = make()
    with tf.GradientTape() as tape:
        embeddings = tf.Variable(x)
        value = objective({"embedding": embeddings}, labels)
    by_x, by_target = tape.gradient(value, [embeddings, objective.target_density.value])
    moved = x - 0.01 * by_x.numpy() / np.abs(by_x.numpy()).max()
    assert references.density(labels, moved, 0) > references.density(labels, x, 0)
    # Of the two classes in the batch; those outside it stay.
    np.testing.assert_array_equal(by_target.numpy()[2:], 0.0)


def test_fixed_targets_are_not_trained():
    objective = make(learn_targets=False)
    assert objective.trainable_variables == []
    labels, x = random_batch(3, 10, 4, 5)
    assert_close(objective({"embedding": x}, labels), reference(labels, x))


def test_a_normalised_reference_has_no_scale():
    labels, x = random_batch(3, 10, 4, 5)
    given = np.array(REFERENCE)
    scaled = given / given[given > 0].mean()
    for factor in (1.0, 1000.0):
        value = on_embedding(reference=given * factor, normalize_reference=True)(labels, x)
        assert_close(value, reference(labels, x, given=scaled))


@pytest.mark.parametrize("label", [-1, 9, 2**40])
@pytest.mark.parametrize("constraint", ["soft", "hard", None])
def test_a_label_without_a_target_is_not_a_number(label, constraint):
    labels, x = random_batch(3, 6, 3, 4)
    labels[2] = label
    assert np.isnan(on_embedding(constraint=constraint)(labels, x))


@pytest.mark.parametrize("labels", [np.arange(3).repeat(4), np.array([0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 4])])
def test_reference_densities_are_those_of_the_classes(labels):
    x = 100.0 + random_batch(3, len(labels), 1, 6, unit=False)[1]
    order = np.random.default_rng(0).permutation(len(labels))
    densities = class_densities(x[order], labels[order], 5)
    assert densities.dtype == np.float32
    present = references.classes_of(labels)
    expected = [references.density(labels, x, c) if c in present else 0.0 for c in range(5)]
    assert_close(densities, expected, 1e-6)
    np.testing.assert_array_equal(class_densities(x[:0], labels[:0], 2), [0.0, 0.0])


def test_calibration_is_the_same_as_giving_the_densities():
    labels, x = random_batch(3, 10, 4, 5)
    features, of = random_batch(4, 40, 1, 7, unit=False)[1], np.arange(40) % 9
    objective = make(reference=None)
    objective.calibrate(features, of)
    expected = reference(labels, x, given=[references.density(of, features, c) for c in range(9)])
    assert_close(objective({"embedding": x}, labels), expected)


def test_before_calibration_there_is_no_constraint():
    labels, x = random_batch(3, 10, 4, 5)
    assert_close(on_embedding(reference=None)(labels, x), reference(labels, x, constraint=None))
    hard = on_embedding(reference=None, constraint="hard")(labels, x)
    assert_close(hard, reference(labels, x, [TARGETS[0]] * 9, constraint=None))


@pytest.mark.parametrize("arguments", [{"reference": REFERENCE}, {"reference": None, "constraint": None}])
def test_what_needs_no_calibration_ignores_it(arguments):
    objective = make(**arguments)
    assert objective.calibrates_on is None
    before = values(objective.weights)
    objective.calibrate(np.ones((4, 2)), np.arange(4))
    for old, new in zip(before, values(objective.weights), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (np.ones((4, 2, 2)), np.arange(4), "expected features"),
        (np.ones((4, 2)), np.arange(3), "expected features"),
        (np.ones((4, 2)), np.arange(4), "labels must lie in 0 .. 2"),
        (np.full((3, 2), np.nan), np.arange(3), "finite"),
    ],
)
def test_measurements_that_make_no_sense_are_refused(features, labels, message):
    with pytest.raises(ValueError, match=message):
        DensityAdaptivity(3).calibrate(features, labels)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_classes": 0}, "num_classes must be a positive integer"),
        ({"eta": -1.0}, "eta must not be negative"),
        ({"eta": float("nan")}, "eta must be a finite number"),
        ({"initial_target": 0.0}, "initial_target must be positive"),
        ({"constraint": "firm"}, "constraint must be .soft., .hard. or None"),
        ({"reduction": "max"}, "'mean' or 'sum'"),
        ({"reference_density": [1.0, 2.0]}, r"must have shape \(3,\)"),
        ({"reference_density": [1.0, 2.0, -1.0]}, "finite and not negative"),
        ({"reference_density": [1.0, 2.0, float("inf")]}, "finite and not negative"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DensityAdaptivity(**{"num_classes": 3, **arguments})


def make_learner(base, **options):
    learner = models.MetricLearner(
        tiny_embedder(batch_norm="statistics", **options), [BASES[base](), DensityAdaptivity(3, weight=10.0)]
    )
    learner.build((None, 12, 12, 3))
    return learner


@pytest.mark.slow
@pytest.mark.parametrize("base", first_quick(BASES))
def test_learner_steps_with_the_base_losses_of_the_paper(base):
    labels, x = coloured_batch()
    learner = make_learner(base)
    density = learner.objectives[1]
    density.calibrate(np.asarray(learner(x, training=False)["pooled"]), labels)
    learner.compile(optimizer=keras.optimizers.Adam(0.01))
    history = learner.fit(x, labels, batch_size=len(x), epochs=3, verbose=0).history
    assert np.all(np.isfinite(history["loss"]))
    assert np.all(values([density.target_density])[0] != 0.5)


def test_mixed_precision():
    labels, x = coloured_batch()
    learner = make_learner("contrastive", dtype="mixed_bfloat16")
    embeddings = np.asarray(learner(x, training=False)["embedding"])
    objective = learner.objectives[1]
    assert_close(objective({"embedding": embeddings}, labels), reference(labels, embeddings, [0.5] * 3, None))
    assert np.isfinite(total_loss(learner, labels, x))
    half, _ = value_and_gradients(lambda e: on_embedding()(labels, tf.cast(e, "bfloat16")), embeddings)
    assert half.dtype == np.float32


def test_targets_and_measurements_are_saved_with_the_learner(tmp_path):
    labels, x = coloured_batch()
    learner = make_learner("contrastive")
    learner.objectives[1].calibrate(np.random.default_rng(0).normal(size=(30, 6)), np.arange(30) % 3)
    learner.objectives[1].target_density.assign([0.1, 0.2, 0.3])
    check_saved_with_its_learner(learner, tmp_path / "learner.keras", lambda m: total_loss(m, labels, x))


@every_case
def test_configuration(arguments):
    check_config(make(**arguments))
    check_config(DensityAdaptivity(7, 0.3, 0.4, None, weight=10.0, name="da", learn_targets=False))


@pytest.mark.parametrize("constraint", ["soft", "hard", None])
def test_observes_the_mean_density_and_target_of_the_classes_of_a_batch(constraint):
    objective = make(constraint=constraint)
    labels, x = random_batch(4, 13, 4, 5)
    observed = objective.observe(pairs_by_name({"embedding": x}, labels))
    present = references.classes_of(labels)
    assert set(observed) == set(objective.observes)
    expected = {
        "d_avg": np.mean([references.density(labels, x, c) for c in present]),
        "target": np.mean([float(objective.targets()[c]) for c in present]),
    }
    for key, (value, count) in observed.items():
        assert_close(value, expected[key])
        assert count == len(present)


def test_command_line_names_it_and_gives_it_the_classes():
    (term,) = build_objectives("10 * density(eta=0.3, constraint=none)", 98)
    assert isinstance(term, DensityAdaptivity)
    assert (term.weight, term.eta, term.num_classes, term.constraint) == (10.0, 0.3, 98, None)
