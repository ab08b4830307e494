import numpy as np
import pytest
import tensorflow as tf

from tests.marks import first_quick
from tests.mathematics import assert_close, random_batch, value_and_gradients
from tests.models.networks import coloured_batch, images, tiny_embedder, values
from tests.objectives import references_classes as references
from tests.objectives.checks import (
    check_config,
    check_degenerate,
    check_formula,
    check_gradient,
    check_labels,
    check_large,
    check_nothing_to_learn,
    check_symmetries,
    total_loss,
)
from tfdml import losses, models
from tfdml.objectives import EnergyConfusion, MetricLoss
from tfdml.pairs import pairs_by_name
from tfdml.training.terms import build_objectives

FORMS = ("log", "plain", "log_of_mean")
every_form = pytest.mark.parametrize("form", FORMS)
every_mode = pytest.mark.parametrize("mode", ["eager", "xla"])
every_case = pytest.mark.parametrize(
    ("form", "reduction"), [(form, reduction) for form in FORMS for reduction in ("mean", "sum")]
)
# The paper's, as it writes them: sums.
BASES = {
    "triplet": lambda: MetricLoss(losses.TripletLoss(margin=0.1, reduction="sum")),
    "n pair": lambda: MetricLoss(losses.NPairLoss(reduction="sum"), "projection"),
    "binomial": lambda: MetricLoss(losses.BinomialDevianceLoss(2.0, 0.5, 25.0, reduction="sum")),
}
WEIGHTS = {"triplet": 0.02, "n pair": 0.3, "binomial": 0.13}


def on_embedding(form="log", reduction="mean"):
    objective = EnergyConfusion(form, reduction=reduction)
    return lambda labels, x: objective({"embedding": x}, labels)


def reference(form="log", reduction="mean"):
    return lambda labels, x: references.energy_confusion(labels, x, form, reduction)


def gradients(learner, labels, x):
    """Of the learner's loss, by part; None where there is no path."""
    parts = learner.parts()
    with tf.GradientTape() as tape:
        loss = learner.compute_loss(x, tf.constant(labels), learner(x, training=True), training=True)
    return tape.gradient(loss, {part: [v.value for v in variables] for part, variables in parts.items()})


def make_learner(objectives, **options):
    learner = models.MetricLearner(tiny_embedder(batch_norm="statistics", **options), objectives)
    learner.build((None, 12, 12, 3))
    return learner


@every_case
def test_equals_the_paper(form, reduction):
    check_formula(on_embedding(form, reduction), reference(form, reduction))


@every_case
@every_mode
def test_gradient_equals_finite_differences(form, reduction, mode):
    check_gradient(on_embedding(form, reduction), reference(form, reduction), mode)


@every_form
@every_mode
def test_degenerate_batches(form, mode):
    check_degenerate(on_embedding(form), reference(form), mode)


@every_form
def test_one_class_teaches_nothing(form):
    check_nothing_to_learn(on_embedding(form), "no negative", "one image")


@every_form
def test_symmetries(form):
    check_symmetries(on_embedding(form))


@every_form
def test_labels(form):
    check_labels(on_embedding(form))
    labels, x = random_batch(2, 12, 3, 6)
    np.testing.assert_array_equal(on_embedding(form)(labels + 2**53, x), on_embedding(form)(labels, x))


@pytest.mark.slow
def test_a_batch_of_four_thousand():
    check_large(on_embedding())


@every_form
def test_descending_pulls_classes_together(form):
    labels, x = random_batch(3, 12, 3, 5)
    _, (gradient,) = value_and_gradients(lambda e: on_embedding(form)(labels, e), x)
    moved = x - 0.1 * gradient / np.abs(gradient).max()
    assert references.energy_confusion(labels, moved, "plain") < references.energy_confusion(labels, x, "plain")


@pytest.mark.parametrize("representation", ["embedding", "projection"])
def test_the_gradient_reaches_the_projection_and_no_other_layer(representation):
    labels, x = coloured_batch()
    learner = make_learner([EnergyConfusion(representation=representation)])
    parts = gradients(learner, labels, x)
    assert len(parts["backbone"]) > 0
    for gradient in parts["backbone"]:
        assert gradient is None or not np.any(gradient)
    assert np.any(parts["projection"][0])


@pytest.mark.parametrize("base", BASES)
def test_beside_a_base_loss_the_backbone_sees_the_base_alone(base):
    labels, x = np.arange(12) % 3, images(size=12)
    alone = gradients(make_learner([BASES[base]()]), labels, x)
    both = gradients(make_learner([BASES[base](), EnergyConfusion(reduction="sum", weight=WEIGHTS[base])]), labels, x)
    for before, after in zip(alone["backbone"], both["backbone"], strict=True):
        assert np.any(before)
        assert_close(after, before, 1e-5)
    assert np.any(np.abs(both["projection"][0] - alone["projection"][0]) > 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("base", first_quick(BASES))
def test_learner_steps_with_the_base_losses_of_the_paper(base):
    labels, x = coloured_batch()
    learner = make_learner([BASES[base](), EnergyConfusion(reduction="sum", weight=WEIGHTS[base])])
    learner.compile(optimizer="adam")
    before = values(learner.trainable_variables)
    history = learner.fit(x, labels, batch_size=len(x), epochs=3, verbose=0).history
    assert np.all(np.isfinite(history["loss"]))
    assert np.all(np.array(history["energy_confusion"]) > 0)
    assert any(np.any(old != new) for old, new in zip(before, values(learner.trainable_variables), strict=True))


def test_two_of_them_share_a_learner_and_a_detached_form_is_read_where_there_is_one():
    labels, x = coloured_batch()
    learner = make_learner([EnergyConfusion(), EnergyConfusion("plain", "projection", weight=0.5, name="raw")])
    given = learner(x, training=False)
    expected = references.energy_confusion(labels, np.asarray(given["embedding"]))
    expected += 0.5 * references.energy_confusion(labels, np.asarray(given["projection"]), "plain")
    assert_close(total_loss(learner, labels, x), expected)
    # Were the plain form read, its value would count.
    value = EnergyConfusion()({"embedding": 9.0 * x[:, 0, 0, :], "detached_embedding": given["embedding"]}, labels)
    assert_close(value, references.energy_confusion(labels, np.asarray(given["embedding"])))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy):
    labels, x = coloured_batch()
    learner = make_learner([EnergyConfusion()], dtype=policy)
    parts = gradients(learner, labels, x)
    assert np.all(np.isfinite(parts["projection"][0]))
    expected = references.energy_confusion(labels, np.asarray(learner(x, training=False)["embedding"]))
    assert_close(total_loss(learner, labels, x), expected)


def test_missing_representation_is_named():
    with pytest.raises(ValueError, match="needs the representation 'detached_projection'"):
        EnergyConfusion(representation="projection")({"embedding": np.eye(2, dtype="float32")}, [0, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"form": "exp"}, "form must be .log., .plain. or .log_of_mean."),
        ({"representation": "pooled"}, "'embedding' or 'projection'"),
        ({"reduction": "max"}, "'mean' or 'sum'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        EnergyConfusion(**arguments)


def test_configuration():
    check_config(EnergyConfusion("plain", "projection", "sum", weight=0.3, name="ec"))


@pytest.mark.parametrize("form", ["log", "plain", "log_of_mean"])
def test_observes_the_mean_energy_of_pairs_of_classes(form):
    for size, classes in ((13, 4), (5, 1)):
        labels, x = random_batch(4, size, classes, 5)
        objective = EnergyConfusion(form)
        ((value, count),) = objective.observe(pairs_by_name({"detached_embedding": x}, labels)).values()
        assert_close(value, references.energy_confusion(labels, x, "plain"))
        assert count == len(references.class_pairs(labels))


def test_command_line_names_it():
    (term,) = build_objectives("0.13 * ecaml(form=plain, reduction=sum)", 3)
    assert isinstance(term, EnergyConfusion)
    assert (term.weight, term.form, term.reduction, term.name) == (0.13, "plain", "sum", "ecaml")
