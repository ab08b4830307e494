"""Steps of the embedder and steps of what an objective learns about it, in turn."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.marks import first_quick
from tests.mathematics import assert_close, dtype_policy
from tests.models.networks import SIZE, colored_batch, tiny_embedder, values
from tfdml import losses
from tfdml.models import MetricLearner
from tfdml.models.alternation import EMBEDDER, STATISTICS, AlternatingOptimizer
from tfdml.objectives import MetricLoss, ProxyLoss, RankMI
from tfdml.pairs import pairs_by_name
from tfdml.training.optimizers import build_optimizer, step_schedule


def rank_mi(k=1, **arguments):
    return RankMI(statistics_steps=k, hidden=8, depth=1, seed=5, **arguments)


def make(objectives=None, optimizer=None, built=True, batch_norm="train", **options):
    embedder = tiny_embedder(batch_norm=batch_norm)
    learner = MetricLearner(embedder, objectives or [rank_mi()])
    if built:
        learner.build((None, SIZE, SIZE, 3))
    learner.compile(optimizer or keras.optimizers.Adam(0.01), **options)
    return learner


def one_step(learner, batch=None):
    labels, x = batch or colored_batch()
    return learner.fit(x, labels, batch_size=len(x), shuffle=False, verbose=0).history


def groups(learner):
    """The values of the embedder's variables, moving statistics included; of V; and of the other objectives."""
    own = {id(variable) for variable in learner.statistics_variables}
    others = [v for v in learner.parts()["objectives"] if id(v) not in own]
    return {
        "embedder": values(learner.embedder.variables),
        "statistics": values(learner.statistics_variables),
        "others": values(others),
    }


def changed(before, after):
    return {name for name in before if any(np.any(a != b) for a, b in zip(before[name], after[name], strict=True))}


@pytest.mark.one_quick_case
@pytest.mark.parametrize("k", first_quick([1, 3]))
@pytest.mark.parametrize("built", [True, False])
def test_each_phase_changes_its_own_variables_only(k, built):
    learner = make([rank_mi(k), MetricLoss(losses.MarginLoss())], built=built, run_eagerly=True)
    phases = []
    for _ in range(2 * (k + 1)):
        before = groups(learner) if learner.built else None
        one_step(learner)
        if before is not None:
            phases.append(changed(before, groups(learner)))
    expected = [{"embedder"}, *[{"statistics"}] * k] * 2
    assert phases == (expected if built else expected[1:])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", first_quick(["adamw", "sgd", "rmsprop"]))
def test_momentum_and_decay_do_not_move_the_other_phase(optimizer):
    learner = make(optimizer="adam")
    learner.compile(build_optimizer(optimizer, learner, 0.01, {}, weight_decay=0.1, clip_norm=1.0), run_eagerly=True)
    phases = []
    for _ in range(6):
        before = groups(learner)
        one_step(learner)
        phases.append(changed(before, groups(learner)))
    assert phases == [{"embedder"}, {"statistics"}] * 3


@pytest.mark.slow
def test_equals_two_optimizers_by_hand():
    """Against a loop with a tape, two Adam optimizers and the objective's two losses."""
    labels, x = colored_batch()
    learner = make([rank_mi(2, negatives="all"), losses.ContrastiveLoss()], batch_norm="statistics")
    twin = make([rank_mi(2, negatives="all"), losses.ContrastiveLoss()], batch_norm="statistics")
    for a, b in zip(twin.variables, learner.variables, strict=True):
        a.assign(b)
    learner.fit(np.tile(x, (9, 1, 1, 1)), np.tile(labels, 9), batch_size=len(x), shuffle=False, verbose=0)

    mutual, contrastive = twin.objectives
    optimizers = {EMBEDDER: keras.optimizers.Adam(0.01), STATISTICS: keras.optimizers.Adam(0.01)}
    own = {id(v) for v in twin.statistics_variables}
    variables = {
        EMBEDDER: [v for v in twin.trainable_variables if id(v) not in own],
        STATISTICS: twin.statistics_variables,
    }
    mutual.beta.assign(mutual.network.root(mutual.beta))
    for t in range(9):
        phase = STATISTICS if t % 3 else EMBEDDER
        with tf.GradientTape() as tape:
            r = twin.embedder.represent(x, training=True)
            if phase == STATISTICS:
                loss = mutual.statistics_loss(pairs_by_name({"embedding": r["embedding"]}, labels))
            else:
                loss = mutual(r, labels) + contrastive(r, labels)
        optimizers[phase].apply(tape.gradient(loss, [v.value for v in variables[phase]]), variables[phase])
        if phase == STATISTICS:
            mutual.beta.assign(mutual.network.root(mutual.beta))
    for actual, expected in zip(values(learner.trainable_variables), values(twin.trainable_variables), strict=True):
        assert_close(actual, expected, 1e-4, floor=1e-6)
    assert_close(learner.objectives[0].network.root(learner.objectives[0].beta), mutual.beta, 1e-4)


@pytest.mark.slow
def test_loss_and_terms_are_those_of_the_embedders_steps():
    labels, x = colored_batch()
    learner = make([rank_mi(negatives="all", weight=0.5), losses.ContrastiveLoss()])
    expected = learner.evaluate(x, labels, batch_size=len(x), verbose=0, return_dict=True)
    twin = make([rank_mi(negatives="all", weight=0.5), losses.ContrastiveLoss()])
    for a, b in zip(twin.variables, learner.variables, strict=True):
        a.assign(b)
    # One step of each phase in an epoch.
    history = twin.fit(
        np.tile(x, (2, 1, 1, 1)), np.tile(labels, 2), batch_size=len(x), shuffle=False, verbose=0
    ).history
    names = {"loss", "rank_mi", "contrastive_loss", "d_pos", "d_neg", "violations"}
    assert set(history) == names | {"rank_mi_jsd", "rank_mi_beta", "rank_mi_no_root"}
    assert set(expected) == names
    assert history["loss"][0] == pytest.approx(0.5 * history["rank_mi"][0] + history["contrastive_loss"][0], rel=1e-5)


@pytest.mark.slow
def test_evaluation_reports_nothing_of_the_statistics():
    labels, x = colored_batch()
    learner = make([rank_mi()])
    found = learner.evaluate(x, labels, batch_size=len(x), verbose=0, return_dict=True)
    assert set(found) == {"loss", "rank_mi", "d_pos", "d_neg", "violations"}
    assert len(learner.evaluate(x, labels, batch_size=len(x), verbose=0)) == len(found)


def test_statistics_phase_sees_what_the_embedders_phase_sees():
    x = colored_batch()[1]
    learner = make([rank_mi()])
    with learner.in_phase(STATISTICS):
        fixed = learner(x, training=True)
    before = values(learner.embedder.variables)
    ordinary = learner(x, training=True)
    assert changed({"": before}, {"": values(learner.embedder.variables)})
    for name, value in ordinary.items():
        assert_close(fixed[name], value, 1e-6)


@pytest.mark.slow
def test_jit_compilation_does_not_change_the_updates():
    labels, x = colored_batch()
    results = []
    for jit_compile in (False, True):
        learner = make([rank_mi(negatives="all")], batch_norm="frozen", jit_compile=jit_compile)
        keras.utils.set_random_seed(1)
        for variable in learner.statistics_variables:
            variable.assign(np.random.default_rng(0).normal(size=variable.shape) / 2)
        learner.fit(np.tile(x, (4, 1, 1, 1)), np.tile(labels, 4), batch_size=len(x), shuffle=False, verbose=0)
        results.append(values(learner.trainable_variables))
    for plain, jit in zip(*results, strict=True):
        assert_close(jit, plain, 1e-4, floor=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("policy", first_quick(["mixed_bfloat16", "mixed_float16"]))
def test_mixed_precision_trains_both_phases(policy):
    with dtype_policy(policy):
        learner = make([rank_mi()], batch_norm="frozen", run_eagerly=True)
    is_scaled = isinstance(learner.optimizer.embedder_optimizer, keras.optimizers.LossScaleOptimizer)
    assert is_scaled == (policy == "mixed_float16")
    phases = []
    for _ in range(4):
        earlier = groups(learner)
        history = one_step(learner)
        assert all(np.isfinite(value[0]) for value in history.values())
        phases.append(changed(earlier, groups(learner)))
    assert phases[1] == phases[3] == {"statistics"}
    assert phases[2] == {"embedder"}


@pytest.mark.slow
def test_saves_and_loads_and_goes_on_as_if_it_had_not(tmp_path):
    # With all negatives: a file of Keras holds no states of random generators.
    learner = make([rank_mi(2, negatives="all"), losses.ContrastiveLoss()], run_eagerly=True)
    for _ in range(4):
        one_step(learner)
    learner.save(tmp_path / "learner.keras")
    again = keras.saving.load_model(tmp_path / "learner.keras")
    assert isinstance(again.optimizer, AlternatingOptimizer)
    assert int(again.optimizer.iterations) == 4
    for a, b in zip(again.optimizer.variables, learner.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a, b)
    for model in (learner, again):
        for _ in range(4):
            one_step(model)
    for actual, expected in zip(values(again.weights), values(learner.weights), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_each_part_and_phase_has_its_rate():
    learner = make([rank_mi()])
    rates = {"backbone": 0.005, "projection": 0.02, "objectives": 0.1}
    optimizer = build_optimizer("sgd", learner, 0.01, rates, momentum=0.0)
    learner.compile(optimizer)
    before = {part: values(members) for part, members in learner.parts().items()}
    for phase in (EMBEDDER, STATISTICS):
        optimizer.phase = phase
        optimizer.apply([keras.ops.ones(v.shape) for v in learner.trainable_variables])
    for part, members in learner.parts().items():
        for old, new in zip(before[part], values(members), strict=True):
            np.testing.assert_allclose(old - new, rates[part], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_schedules_go_by_the_steps_of_both_phases():
    learner = make([rank_mi()])
    optimizer = build_optimizer("sgd", learner, step_schedule(1.0, [3], 0.1), {}, momentum=0.0)
    learner.compile(optimizer, run_eagerly=True)
    rates = []
    for _ in range(5):
        rates.append(float(optimizer.learning_rate))
        assert float(optimizer.statistics_optimizer.learning_rate) == pytest.approx(rates[-1])
        one_step(learner)
    np.testing.assert_allclose(rates, [1, 1, 1, 0.1, 0.1], rtol=1e-6)


def test_setting_the_rate_changes_both_in_proportion():
    optimizer = AlternatingOptimizer(keras.optimizers.Adam(1e-4), keras.optimizers.Adam(1e-2))
    optimizer.learning_rate = 1e-5
    assert float(optimizer.learning_rate) == pytest.approx(1e-5)
    assert float(optimizer.statistics_optimizer.learning_rate) == pytest.approx(1e-3)


def test_schedule_survives_saving():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2], [1e-2, 1e-3])
    optimizer = AlternatingOptimizer(keras.optimizers.Adam(schedule))
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert float(again.learning_rate) == pytest.approx(1e-2)
    again.iterations.assign(3)
    assert float(again.learning_rate) == float(again.statistics_optimizer.learning_rate) == pytest.approx(1e-3)


def test_learner_without_a_statistics_phase_keeps_its_optimizer():
    learner = make([losses.ContrastiveLoss()])
    assert type(learner.optimizer) is keras.optimizers.Adam
    assert type(learner) is MetricLearner


class Phases(keras.callbacks.Callback):
    """Which groups of variables each step has changed."""

    def __init__(self):
        super().__init__()
        self.changed = []

    def on_train_batch_begin(self, batch, logs=None):
        self.before = groups(self.model)

    def on_train_batch_end(self, batch, logs=None):
        self.changed.append(changed(self.before, groups(self.model)))


@pytest.mark.slow
def test_data_that_end_before_their_time_do_not_shift_the_phases():
    labels, x = colored_batch()
    learner, phases = make(run_eagerly=True), Phases()
    data = tf.data.Dataset.from_generator(
        lambda: ((x, labels) for _ in range(3)),
        output_signature=(tf.TensorSpec(x.shape, tf.uint8), tf.TensorSpec(labels.shape, tf.int64)),
    )
    learner.fit(data, epochs=2, verbose=0, callbacks=[phases])
    assert phases.changed == [{"embedder"}, {"statistics"}] * 3


class OfClasses(RankMI):
    """A RankMI whose statistics read the class similarities that another objective provides."""

    @property
    def reads(self):
        return ("embedding", "class")

    def statistics_step(self, pairs):
        self.seen = pairs["class"].anchors
        return super().statistics_step(pairs)


def test_statistics_may_read_what_another_objective_provides():
    proxies = ProxyLoss(losses.AMSoftmaxLoss(), 3)
    learner = make([proxies, OfClasses(hidden=8, depth=1)], run_eagerly=True)
    phases = []
    for _ in range(2):
        before = groups(learner)
        expected = proxies.represent(learner.embedder.represent(colored_batch()[1], training=False))["class"]
        one_step(learner)
        phases.append(changed(before, groups(learner)))
    assert phases == [{"embedder", "others"}, {"statistics"}]
    assert learner.objectives[1].seen.shape == expected.shape


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: make(steps_per_execution=2), "steps_per_execution must be 1"),
        (lambda: make(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)), "cannot be accumulated"),
        (lambda: make([rank_mi(1), rank_mi(2, name="other")]), "different statistics_steps"),
    ],
)
def test_what_does_not_go_with_alternation_is_refused(function, message):
    with pytest.raises(ValueError, match=message):
        function()
