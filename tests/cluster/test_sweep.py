"""Which runs a sweep has, and by what they are compared."""

import json

import pytest

from tests.training import runs
from tfdml.cluster.sweep import combinations, open_study, parse_sweep, run_of, score_of
from tfdml.errors import UserError
from tfdml.training.expressions import with_weight


@pytest.mark.parametrize("metric", ["map@r", "recall@1"])
@pytest.mark.parametrize(("epoch", "expected"), [(2, 0.4), (3, 0.4), (4, 0.3)])
def test_a_trial_is_scored_at_the_epoch_that_counts(metric, epoch, expected, tmp_path):
    """Measured every second epoch; neither the best nor the last counts, but the last up to the chosen one."""
    other = {"map@r": "recall@1", "recall@1": "map@r"}[metric]
    measured = {0: 0.9, 2: 0.4, 4: 0.3, 6: 0.8}
    lines = [{"epoch": 0, "validation": {metric: measured[0], other: 0.0}}]
    lines += [
        {"epoch": n, **({"validation": {metric: measured[n], other: 0.0}} if n in measured else {})}
        for n in range(1, 7)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "result.json").write_text(json.dumps({"epoch": epoch, "metrics": {}}))
    run = runs.experiment(tmp_path, holdout_classes=0.2, selection="validation", selection_metric=metric)
    assert score_of(run) == expected


def test_values_are_combined(tmp_path):
    base = runs.experiment(tmp_path, objectives="am_softmax(scale=20.0) + 0.4 * jrs(levels=[pooled, embedding])")
    axes = parse_sweep("objectives.weight=0.1,1; learning_rate=1e-4..1e-2; flip=true")
    assert axes == {"objectives.weight": ("0.1", "1"), "learning_rate": (1e-4, 1e-2), "flip": ("true",)}
    found = combinations(base, axes)
    assert found == [{"objectives.weight": weight, "flip": "true"} for weight in ("0.1", "1")]
    first, last = (run_of(base, trial, {**values, "learning_rate": 3e-3}) for trial, values in enumerate(found))
    assert first.objectives == "am_softmax(scale=20.0) + 0.1 * jrs(levels=['pooled', 'embedding'])"
    assert last.objectives == "am_softmax(scale=20.0) + jrs(levels=['pooled', 'embedding'])"
    assert (first.flip, first.learning_rate, first.seed, first.epochs) == (True, 3e-3, base.seed, base.epochs)
    assert [run.run_dir for run in (first, last)] == [f"{tmp_path}/trials/00{trial}" for trial in (0, 1)]


def test_a_named_term_and_several_weights(tmp_path):
    base = runs.experiment(tmp_path, objectives="contrastive + 2 * jrs + 3 * horde(loss=contrastive, orders=2)")
    changed = run_of(base, 0, {"objectives.jrs": "0.5", "objectives.weight": "7"})
    assert changed.objectives == "contrastive + 0.5 * jrs + 7.0 * horde(loss='contrastive', orders=2)"
    assert with_weight("a + b(c=d(e=1))", 2.0, "--objectives") == "a + 2.0 * b(c=d(e=1))"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "varies nothing"),
        ("learning_rate", "is not name=values"),
        ("speed=1,2", "'speed' is no setting"),
        ("run_dir=a,b", "'run_dir' is no setting"),
        ("epochs=1; epochs=2", "twice"),
        ("learning_rate=a..b", "a range goes from a positive number"),
        ("learning_rate=0..1", "from a positive number"),
        ("learning_rate=1e-2..1e-3", "to a larger one"),
        ("epochs=many", "--epochs=many is not of type int"),
        ("flip=maybe", "--flip=maybe is not of type bool"),
        ("epochs=-1", "--epochs"),
        ("learning_rate=1e-3; epochs=1..3", "--epochs=1.0 is not of type int"),
        ("objectives.weight=much", "'much' is no value of objectives.weight"),
        ("objectives.jrs=1", "no term 'jrs'"),
        ("batch_size=10,20", "--batch_size=10 has no effect: it needs --sampling=shuffle or whole_classes"),
    ],
)
def test_what_cannot_be_varied_is_told(tmp_path, text, words):
    with pytest.raises(UserError, match=words):
        combinations(runs.experiment(tmp_path), parse_sweep(text))


@pytest.mark.parametrize(
    "name",
    ["selection", "selection_metric", "holdout_classes", "holdout_sampling", "dataset", "data_dir", "seed", "ks"],
)
def test_what_trials_are_compared_by_is_not_varied(name):
    with pytest.raises(UserError, match=f"'{name}' is no setting that can be varied"):
        parse_sweep(f"learning_rate=0.1; {name}=1,2")


def test_draws_follow_the_seed_within_the_range_and_go_on_when_resumed(tmp_path):
    distributions = pytest.importorskip("optuna").distributions
    space = {"learning_rate": distributions.FloatDistribution(1e-4, 1e-2, log=True)}

    def draws(name, *counts):
        experiment = runs.experiment(tmp_path / name)
        (tmp_path / name).mkdir()
        found = []
        for count in counts:
            study = open_study(experiment)
            found += [study.ask(space).params["learning_rate"] for _ in range(count)]
        return found

    rates = draws("a", 10)
    assert rates == draws("b", 10)
    assert len(set(draws("c", 5, 5))) == 10
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)


def test_a_run_below_the_median_is_pruned_after_a_third_of_the_epochs(tmp_path):
    pytest.importorskip("optuna")
    study = open_study(runs.experiment(tmp_path, epochs=6))
    for value in (0.1, 0.2, 0.3, 0.4, 0.5):
        trial = study.ask()
        for epoch in range(1, 7):
            trial.report(value, epoch)
        study.tell(trial, value)
    for value, pruned in ((0.25, [False, False, True]), (0.35, [False, False, False])):
        trial, found = study.ask(), []
        for epoch in (0, 1, 2):
            trial.report(value, epoch)
            found.append(trial.should_prune())
        assert found == pruned
