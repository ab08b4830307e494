"""Density adaptivity, energy confusion, entropy, orthogonality, intra-class."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests import references as plain_references
from tests.mathematics import assert_close, finite_differences, random_batch, value_and_gradients
from tests.models.networks import colored_batch, images, tiny_embedder, values
from tests.objectives import references_classes as references
from tests.objectives.checks import (
    check_degenerate,
    check_formula,
    check_gradient,
    check_labels,
    check_nothing_to_learn,
    check_symmetries,
)
from tfdml import losses, models
from tfdml.objectives import (
    DensityAdaptivity,
    EnergyConfusion,
    EntropySpread,
    GlobalOrthogonal,
    IntraClassPenalty,
    MetricLoss,
)
from tfdml.objectives.regularizers import class_densities
from tfdml.pairs import pairs_by_name

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


def make(reference=REFERENCE, targets=TARGETS, **arguments):
    """An objective with these targets, or (hard) with the first of them as their mean."""
    objective = DensityAdaptivity(len(TARGETS), reference_density=reference, **arguments)
    objective.build({})
    objective.target_density.assign(targets[0] if objective.constraint == "hard" else targets)
    return objective


def on_embedding(**arguments):
    return of(make(**arguments))


def of(objective):
    """The objective as a function of labels and embeddings."""
    return lambda labels, x: objective({"embedding": x}, labels)


def reference(labels, x, targets=None, given=REFERENCE, **arguments):
    if targets is None:
        targets = TARGETS[0] if arguments.get("constraint") == "hard" else TARGETS
    return references.density_adaptivity(labels, x, targets, given, **arguments)


# What every regularizer does


def density_case(arguments):
    return make(**arguments), functools.partial(reference, **arguments)


def energy_case(form, **arguments):
    return EnergyConfusion(form, **arguments), functools.partial(references.energy_confusion, form=form, **arguments)


def entropy_case(function, form="pairs", **arguments):
    return EntropySpread(form, **arguments), functools.partial(function, **arguments)


def penalty_case(reduction):
    of_reduction = functools.partial(plain_references.intra_class_penalty, reduction=reduction)
    return IntraClassPenalty(reduction=reduction), of_reduction


FORMS = ("log", "plain", "log_of_mean")
#: Each objective and its reference; of a DensityAdaptivity the gradient, also of its targets, has a test of its own.
ALL = {
    **{f"density {name}": density_case(arguments) for name, arguments in CASES.items()},
    **{f"energy {form} {r}": energy_case(form, reduction=r) for form in FORMS for r in ("mean", "sum")},
    "energy with an offset": energy_case("log_of_mean", offset=2.0),
    "pairs": entropy_case(references.entropy_of_pairs),
    "pairs sum": entropy_case(references.entropy_of_pairs, reduction="sum"),
    "pairs at 2.5": entropy_case(references.entropy_of_pairs, threshold=2.5),
    "nearest": entropy_case(references.nearest_entropy, "nearest"),
    "nearest sum": entropy_case(references.nearest_entropy, "nearest", reduction="sum"),
    "orthogonal": (GlobalOrthogonal(), references.global_orthogonal),
    "penalty mean": penalty_case("mean"),
    "penalty sum": penalty_case("sum"),
}
WITHOUT_WEIGHTS = {name: case for name, case in ALL.items() if not name.startswith("density")}
DEFAULTS = ("density soft", *(f"energy {form} mean" for form in FORMS), "pairs", "nearest", "orthogonal", "penalty sum")
every_default = pytest.mark.parametrize("name", DEFAULTS)
every_mode = pytest.mark.parametrize("mode", ["eager", "xla"])


@pytest.mark.parametrize(("objective", "reference"), ALL.values(), ids=ALL)
def test_equals_the_formula(objective, reference):
    check_formula(of(objective), reference)


@pytest.mark.parametrize(("objective", "reference"), WITHOUT_WEIGHTS.values(), ids=WITHOUT_WEIGHTS)
@every_mode
def test_gradient_equals_finite_differences(objective, reference, mode):
    check_gradient(of(objective), reference, mode)


@pytest.mark.one_quick_case
@pytest.mark.parametrize("name", [name for name in ALL if "sum" not in name and "eta" not in name] + ["penalty sum"])
@every_mode
def test_degenerate_batches(name, mode):
    objective, reference = ALL[name]
    check_degenerate(of(objective), reference, mode)


@pytest.mark.one_quick_case
@every_default
def test_symmetries_and_labels(name):
    function = of(ALL[name][0])
    check_symmetries(function, relabeling=not name.startswith("density"))
    check_labels(function)
    if not name.startswith("density"):
        labels, x = random_batch(2, 12, 3, 6)
        np.testing.assert_array_equal(function(labels + 2**53, x), function(labels, x))


@pytest.mark.parametrize(
    ("names", "batches"),
    [
        ([f"energy {form} mean" for form in FORMS], ("no negative", "one image")),
        (["orthogonal"], ("no negative", "one image")),
        (["pairs", "nearest"], ("one image",)),
        (["penalty mean", "penalty sum"], ("one image", "two images of two classes")),
    ],
)
def test_batches_that_teach_nothing(names, batches):
    for name in names:
        check_nothing_to_learn(of(ALL[name][0]), *batches)


# Density adaptivity


@every_case
@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_gradients_of_embeddings_and_targets_equal_finite_differences(arguments, mode):
    labels, x = random_batch(11, 8, 4, 4)
    objective = make(**arguments)
    weights = [objective.target_density]
    value, gradients = value_and_gradients(lambda e: objective({"embedding": e}, labels), x, mode=mode, weights=weights)
    start = np.asarray(objective.target_density)
    assert_close(value, reference(labels, x, start, **arguments))
    expected = finite_differences(lambda e, t: reference(labels, e, t, **arguments), x, start)
    for actual, wanted in zip(gradients, expected, strict=True):
        assert np.any(wanted)
        assert_close(actual, wanted)


def test_the_hard_constraint_holds_exactly():
    objective = make(constraint="hard", eta=0.5)
    targets, given = values([objective.targets()])[0], np.array(REFERENCE)
    known = given > 0
    assert_close(targets[known] / targets[0], np.sqrt(given[known] / given[0]), 1e-6)
    assert_close(targets[known].mean(), TARGETS[0], 1e-6)
    assert_close(targets[~known], [TARGETS[0]], 1e-6)


def test_a_normalized_reference_has_no_scale():
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
    for key, (total, count) in observed.items():
        assert_close(total / count, expected[key])
        assert count == len(present)


# Energy confusion

every_form = pytest.mark.parametrize("form", FORMS)
# The paper's, as it writes them: sums.
ENERGY_BASES = {
    "triplet": lambda: MetricLoss(losses.TripletLoss(margin=0.1, reduction="sum")),
    "n pair": lambda: MetricLoss(losses.NPairLoss(reduction="sum"), "projection"),
    "binomial": lambda: MetricLoss(losses.BinomialDevianceLoss(2.0, 0.5, 25.0, reduction="sum")),
}
WEIGHTS = {"triplet": 0.02, "n pair": 0.3, "binomial": 0.13}


def energy_learner(objectives, **options):
    learner = models.MetricLearner(tiny_embedder(batch_norm="statistics", **options), objectives)
    learner.build((None, 12, 12, 3))
    return learner


def gradients(learner, labels, x):
    """Of the learner's loss, by part; None where there is no path."""
    parts = learner.parts()
    with tf.GradientTape() as tape:
        loss = learner.compute_loss(x, tf.constant(labels), learner(x, training=True), training=True)
    return tape.gradient(loss, {part: [v.value for v in variables] for part, variables in parts.items()})


@pytest.mark.parametrize("representation", ["embedding", "projection"])
def test_the_gradient_reaches_the_projection_and_no_other_layer(representation):
    labels, x = colored_batch()
    learner = energy_learner([EnergyConfusion(representation=representation)])
    parts = gradients(learner, labels, x)
    assert len(parts["backbone"]) > 0
    for gradient in parts["backbone"]:
        assert gradient is None or not np.any(gradient)
    assert np.any(parts["projection"][0])


@pytest.mark.parametrize("base", ENERGY_BASES)
def test_beside_a_base_loss_the_backbone_sees_the_base_alone(base):
    labels, x = np.arange(12) % 3, images(size=12)
    alone = gradients(energy_learner([ENERGY_BASES[base]()]), labels, x)
    both = gradients(
        energy_learner([ENERGY_BASES[base](), EnergyConfusion(reduction="sum", weight=WEIGHTS[base])]), labels, x
    )
    for before, after in zip(alone["backbone"], both["backbone"], strict=True):
        assert np.any(before)
        assert_close(after, before, 1e-5)
    assert np.any(np.abs(both["projection"][0] - alone["projection"][0]) > 1e-4)


@every_form
def test_observes_the_mean_energy_of_pairs_of_classes(form):
    for size, classes in ((13, 4), (5, 1)):
        labels, x = random_batch(4, size, classes, 5)
        objective = EnergyConfusion(form)
        ((total, count),) = objective.observe(pairs_by_name({"detached_embedding": x}, labels)).values()
        assert_close(total / max(float(count), 1.0), references.energy_confusion(labels, x, "plain"))
        assert count == len(references.class_pairs(labels))
