"""`tfdml train`: the run folder, dry runs, and what it says of wrong input."""

import dataclasses
import json

import keras
import numpy as np
import pytest

import tfdml  # noqa: F401  (registers the classes that a saved embedder names)
from tests.cli import commands
from tfdml.training import Experiment, TrainingRun, trainer


@pytest.mark.slow
def test_the_run_folder_holds_what_it_promises(finished_run):
    result = json.loads((finished_run / "result.json").read_text())
    assert set(result["metrics"]) >= {"recall@1", "recall@2", "recall@4", "recall@8", "map@r", "r_precision", "nmi"}
    assert 0 <= result["metrics"]["recall@1"] <= 1
    mean, low, high, error = result["intervals"]["recall@1"]
    assert mean == pytest.approx(result["metrics"]["recall@1"])
    assert low <= mean <= high
    assert error >= 0
    assert result["selection"] == "the last epoch"
    assert result["images_per_second"] > 0
    assert "never seen" in result["protocol"]
    records = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records] == [0, 1, 2]
    assert [record["step"] for record in records] == [0, 6, 12]
    assert set(records[1]["train"]) >= {"loss", "am_softmax", "jrs", "d_pos", "d_neg"}
    assert records[2]["test"]["recall@1"] == pytest.approx(result["metrics"]["recall@1"])
    assert json.loads((finished_run / "environment.json").read_text())["packages"]["tensorflow"]
    assert "--objectives=am_softmax + jrs" in (finished_run / "flags.txt").read_text()
    assert "95% interval over classes" in (finished_run / "report" / "index.html").read_text(encoding="utf-8")
    assert list((finished_run / "tensorboard").iterdir())
    assert keras.saving.load_model(finished_run / "embedder.keras")(np.zeros((1, 28, 28, 3), np.uint8)).shape == (1, 16)
    assert not list(finished_run.rglob(".partial*"))


def test_dry_run_prints_the_experiment_and_writes_nothing(tiny_flags, tmp_path):
    done = commands.finished("train", *tiny_flags, f"--run_dir={tmp_path / 'run'}", "--dry_run")
    assert done.returncode == 0, done.stderr[-3000:]
    for expected in ("am_softmax", "jrs", "batches      16 images", "6 steps an epoch", "--embedding_dim=16"):
        assert expected in done.stdout
    assert not (tmp_path / "run").exists()


def test_help_shows_examples_and_flags():
    done = commands.finished("train", "--help")
    assert done.returncode == 0
    assert "--flagfile=configs/quickstart.flags" in done.stdout
    # By stage, in the order in which one thinks of them; each flag once.
    shown = [
        "Which images", "--dataset\n", "--image_size\n", "The embedder:", "--backbone\n", "--objectives\n",
        "--learning_rate\n", "--ks\n", "--run_dir\n", "--[no]resume\n", "Where a run is trained:", "--workers\n",
    ]  # fmt: skip
    places = [done.stdout.index(words) for words in shown]
    assert places == sorted(places)
    for field in dataclasses.fields(Experiment):
        assert sum(line in (f"  --{field.name}", f"  --[no]{field.name}") for line in done.stdout.splitlines()) == 1


@pytest.mark.slow
def test_several_seeds_are_trained_together(command, tiny_flags, tmp_path):
    chosen = ["--holdout_classes=0.1", "--holdout_sampling=stratified", "--selection=validation", "--steps_per_epoch=2"]
    folder = tmp_path / "two"
    done = command("train", *tiny_flags, *chosen, "--seeds=2", "--noreport", f"--run_dir={folder}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "95 % interval over 2 seeds" in done.stdout
    of_all = json.loads((folder / "result.json").read_text())
    assert of_all["selection"] == "the best epoch on held-out training classes, by map@r"
    # The flags are those of the folder; nothing is left to do.
    done = command("train", f"--run_dir={folder}", "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    done = command("evaluate", f"--compare={folder / 'seed_3'},{folder}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "over classes" in done.stdout
    assert "seeds" not in done.stdout.partition("\n")[2]  # one of them has one seed
    for refused in (["embed", f"--out={tmp_path / 'e'}"], ["evaluate"]):
        done = command(*refused, f"--model={folder}")
        assert done.returncode == 2
        assert "name the run of one seed, such as" in done.stderr


def test_what_was_found_is_printed_beside_what_was_before(monkeypatch, tmp_path):
    result = {"protocol": "zero-shot", "selection": "the last epoch", "metrics_before": {"recall@1": 0.019}}
    result |= {
        "metrics": {"recall@1": 0.847, "nmi": 0.834, "num_queries": 5},
        "intervals": {"recall@1": (0, 0.82, 0.871)},
    }

    def train(experiment, *_, **__):
        return TrainingRun(dataclasses.replace(experiment, report=False), result)

    monkeypatch.setattr(trainer, "train", train)
    status, said, errors = commands.run("train", f"--run_dir={tmp_path / 'run'}")
    assert status == 0, errors
    assert "  recall@1       1.9 ->  84.7 %   (95 % interval over classes 82.0 .. 87.1)\n" in said
    assert "  nmi                    83.4 %\n" in said
    assert "num_queries" not in said
