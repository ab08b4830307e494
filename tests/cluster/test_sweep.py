"""Which runs a sweep has, and by what they are compared."""

import json

import pytest

from tests.training import runs
from tfdml.cluster.sweep import parse_sweep, score_of, trials
from tfdml.errors import UserError
from tfdml.report.sweep import sweep_table, write_sweep
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


def test_values_are_combined_and_ranges_drawn(tmp_path):
    base = runs.experiment(tmp_path, objectives="am_softmax(scale=20.0) + 0.4 * jrs(levels=[pooled, embedding])")
    axes = parse_sweep("objectives.weight=0.1,1; learning_rate=1e-4..1e-2; flip=true")
    found = trials(base, axes, samples=20)
    assert len(found) == 40
    rates = [experiment.learning_rate for _, experiment in found]
    assert len(set(rates)) == 40
    assert min(rates) >= 1e-4
    assert max(rates) <= 1e-2
    assert 14 < sum(rate < 1e-3 for rate in rates) < 26  # evenly in the logarithm
    assert [values for values, _ in found] == [values for values, _ in trials(base, axes, samples=20)]
    first, last = found[0][1], found[-1][1]
    assert first.objectives == "am_softmax(scale=20.0) + 0.1 * jrs(levels=['pooled', 'embedding'])"
    assert last.objectives == "am_softmax(scale=20.0) + jrs(levels=['pooled', 'embedding'])"
    assert (first.flip, first.seed, first.epochs) == (True, base.seed, base.epochs)
    assert len({experiment.run_dir for _, experiment in found}) == 40


def test_a_named_term_and_several_weights(tmp_path):
    base = runs.experiment(tmp_path, objectives="contrastive + 2 * jrs + 3 * horde(loss=contrastive, orders=2)")
    ((_, changed),) = trials(base, parse_sweep("objectives.jrs=0.5; objectives.weight=7"), samples=1)
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
        ("learning_rate=a..b", "no range of two numbers"),
        ("learning_rate=0..1", "from a positive number"),
        ("learning_rate=1e-2..1e-3", "to a larger one"),
        ("epochs=many", "'many' is no value of epochs"),
        ("flip=maybe", "'maybe' is no value of flip"),
        ("epochs=-1", "--epochs"),
        ("objectives.jrs=1", "no term 'jrs'"),
        ("batch_size=10,20", "--batch_size=10 has no effect: it needs --sampling=shuffle or whole_classes"),
    ],
)
def test_what_cannot_be_varied_is_told(tmp_path, text, words):
    with pytest.raises(UserError, match=words):
        trials(runs.experiment(tmp_path), parse_sweep(text), samples=1)


@pytest.mark.parametrize(
    "name",
    ["selection", "selection_metric", "holdout_classes", "holdout_sampling", "dataset", "data_dir", "seed", "ks"],
)
def test_what_trials_are_compared_by_is_not_varied(name):
    with pytest.raises(UserError, match=f"'{name}' is no setting that can be varied"):
        parse_sweep(f"learning_rate=0.1; {name}=1,2")


def test_the_table_and_the_plot(tmp_path):
    rows = [
        {"trial": 1, "values": {"learning_rate": "0.01", "optimizer": "sgd"}, "recall@1": 0.5},
        {"trial": 0, "values": {"learning_rate": "0.1", "optimizer": "adam"}, "error": "it diverged"},
    ]
    header, best, failed = sweep_table(rows, "recall@1")
    assert header.split() == ["trial", "learning_rate", "optimizer", "recall@1"]
    assert best.split() == ["1", "0.01", "sgd", "50.0", "%"]
    assert failed.endswith("failed: it diverged")
    write_sweep(tmp_path, rows, "recall@1")
    assert (tmp_path / "sweep.csv").read_text().splitlines() == [
        "trial,learning_rate,optimizer,recall@1,error",
        "1,0.01,sgd,0.5,",
        "0,0.1,adam,,it diverged",
    ]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
