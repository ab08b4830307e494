"""What a run measures of its steps: throughput without the steps that compile."""

import json
import types

import pytest

from tests.training import runs
from tests.training.run.stopping import make_quick
from tfdml.training.run import monitor
from tfdml.training.run.monitor import TrainingMonitor
from tfdml.training.run.results import Evaluator


@pytest.mark.parametrize(("objectives", "compiling"), [("contrastive", 1), ("rank_mi(statistics_steps=1)", 2)])
def test_throughput_leaves_out_images_and_seconds_of_steps_that_compile(objectives, compiling, tmp_path, monkeypatch):
    make_quick(monkeypatch)
    now = [0.0]
    began, each_epoch = TrainingMonitor.on_train_batch_begin, Evaluator.each_epoch

    def step(self, batch, logs=None):
        # A step takes 2 seconds, one that compiles 100.
        now[0] += 100.0 if self._steps_here < compiling else 2.0
        began(self, batch, logs)

    def evaluate(self, learner, epoch):
        now[0] += 1000.0
        return each_epoch(self, learner, epoch)

    monkeypatch.setattr(monitor, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(TrainingMonitor, "on_train_batch_begin", step)
    monkeypatch.setattr(Evaluator, "each_epoch", evaluate)
    result = runs.train(tmp_path / "run", objectives=objectives, epochs=2, steps_per_epoch=4, watch_every=0)
    assert result["images_per_second"] == pytest.approx(8 / 2.0)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("images_per_second") for line in lines] == [None, 4.0, 4.0]
