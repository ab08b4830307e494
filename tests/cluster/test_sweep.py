"""By what the runs of a sweep are compared."""

import json

import pytest

from tests.training import runs
from tfdml.cluster.sweep import score_of


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
