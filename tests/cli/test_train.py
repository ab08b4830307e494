"""`tfdml train`: the run folder, dry runs, and what it says of wrong input."""

import json
import re
import signal

import keras
import numpy as np
import pytest

from tests.cli import commands
from tfdml.cli.train import _of_second, _rows
from tfdml.evaluation.intervals import Interval
from tfdml.training import Experiment, RunFolder, trainer
from tfdml.training.interruption import Interrupted
from tfdml.training.results import TrainingRun, combine


def test_the_run_folder_holds_what_it_promises(finished_run):
    result = json.loads((finished_run / "result.json").read_text())
    assert set(result["metrics"]) >= {
        "recall@1",
        "recall@2",
        "recall@4",
        "recall@8",
        "map@r",
        "r_precision",
        "nmi",
    }
    assert 0 <= result["metrics"]["recall@1"] <= 1
    mean, low, high, error = result["intervals"]["recall@1"]
    assert mean == pytest.approx(result["metrics"]["recall@1"])
    assert low <= mean <= high
    assert error >= 0
    assert result["selection"] == "the last epoch"
    assert result["images_per_second"] > 0
    records = [
        json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()
    ]
    assert [record["epoch"] for record in records] == [0, 1, 2]
    assert [record["step"] for record in records] == [0, 6, 12]
    assert set(records[1]["train"]) >= {"loss", "am_softmax", "jrs", "d_pos", "d_neg"}
    assert records[2]["test"]["recall@1"] == pytest.approx(result["metrics"]["recall@1"])
    assert json.loads((finished_run / "environment.json").read_text())["packages"]["tensorflow"]
    assert "--objectives=am_softmax + jrs" in (finished_run / "flags.txt").read_text()
    assert (finished_run / "report" / "index.html").is_file()
    assert list((finished_run / "tensorboard").iterdir())
    assert keras.saving.load_model(finished_run / "embedder.keras")(
        np.zeros((1, 28, 28, 3), np.uint8)
    ).shape == (1, 16)
    assert not list(finished_run.rglob(".partial*"))


def test_a_run_is_measured_again_and_compared_with_itself(finished_run, tmp_path):
    metrics, report = tmp_path / "metrics.json", tmp_path / "report.html"
    said = commands.printed(
        "evaluate", f"--model={finished_run}", f"--json={metrics}", f"--report={report}"
    )
    assert f"written: {report}" in said
    assert "Recall@1" in report.read_text("utf-8")
    result = json.loads((finished_run / "result.json").read_text())
    again = json.loads(metrics.read_text())
    assert again["recall@1"] == pytest.approx(result["metrics"]["recall@1"])
    differences = tmp_path / "differences.json"
    folders = f"--compare={finished_run},{finished_run}"
    said = commands.printed("evaluate", folders, f"--json={differences}")
    assert re.search(r"Recall@1 +\+0\.0 +0\.0 to 0\.0 over classes", said)
    (both,) = json.loads(differences.read_text())["differences"]
    assert both["over_classes"]["recall@1"][:3] == [0, 0, 0]


def test_several_runs_have_the_mean_of_their_metrics(finished_run):
    experiment = Experiment.from_flags((finished_run / "flags.txt").read_text())
    result = RunFolder(finished_run).read_result()
    runs = {name: TrainingRun(experiment, result) for name in ("seed_0", "seed_1")}
    together = combine(runs)
    for part in ("metrics", "metrics_before"):
        assert together[part] == pytest.approx(result[part])
    assert together["intervals"]["recall@1"] == pytest.approx(result["intervals"]["recall@1"])
    assert together["intervals_runs"]["recall@1"].standard_error == 0
    assert [row["run"] for row in together["runs"]] == [*runs]
    assert together["train_seconds"] == 2 * result["train_seconds"]


def test_a_signal_to_a_run_is_one_line_and_its_status(monkeypatch, tmp_path):
    def train(*_, **__):
        raise Interrupted(signal.SIGTERM, "the checkpoint of step 3 is saved")

    monkeypatch.setattr(trainer, "train", train)
    status, _, errors = commands.run("train", f"--run_dir={tmp_path / 'run'}")
    assert (status, errors) == (
        143,
        "train: stopped by SIGTERM: the checkpoint of step 3 is saved\n",
    )


def test_each_metric_is_a_line_with_both_starts_and_its_intervals():
    result = {
        "metrics": {"recall@1": 0.5, "nmi": 0.25, "images": 3},
        "metrics_before": {"recall@1": 0.1},
        "metrics_features": {"recall@1": 0.05},
        "chance": {"recall@1": 0.01},
        "intervals": {"recall@1": list(Interval(0.5, 0.4, 0.6, 0.05))},
        "intervals_runs": {"recall@1": list(Interval(0.5, 0.45, 0.55, 0.02))},
        "runs": [{"run": "seed_0"}, {"run": "seed_1"}],
    }
    assert list(_rows(result)) == [
        "  features: without a head; start: with the untrained head; end: trained",
        "               features  start       end",
        "  recall@1          5.0   10.0 ->  50.0 %   (95 % interval over classes 40.0 .. 60.0)"
        "   (chance 1.0 %)",
        " " * 42 + "(95 % interval over 2 seeds 45.0 .. 55.0)",
        "  nmi                              25.0 %",
    ]
    also = {"metrics_also": {"recall@1": 0.3}, "metrics_also_before": {}}
    of_second = _of_second({**result, **also, "metrics_also_features": {"recall@1": 0.4}})
    assert list(_rows(of_second))[2] == "  recall@1         40.0            30.0 %"
    final = {**result, "metrics_before": {}, "metrics_features": {}}
    assert next(_rows(final)).split()[:3] == ["recall@1", "50.0", "%"]
