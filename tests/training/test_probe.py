"""What a few steps say of a whole run."""

import importlib
import types

import numpy as np
import pytest

from tests.training import runs
from tfdml.training import assembly
from tfdml.training.assembly import assemble
from tfdml.training.probe import Probe, probe

# `tfdml.training.probe` may name the function, too.
probing = importlib.import_module("tfdml.training.probe")


def found(**changes):
    values = {
        "batch_size": 100,
        "steps": 3600,
        "together": 0.5,
        "input": 0.1,
        "decoding": 0.4,
        "model": 0.4,
        "evaluations": 3,
        "evaluated": 1200,
        "embedding": 0.5,
        "peak": 2.0 * 2**30,
        "free": 8.0 * 2**30,
    }
    return Probe(**{**values, **changes})


def test_the_figures_of_the_run_follow_from_those_of_the_steps():
    assert found().images_per_second == pytest.approx(200)
    # 3,600 steps of half a second, and 3 passes over 1,200 images of half a second each.
    assert found().hours == pytest.approx(0.5 + 0.5)


@pytest.mark.parametrize(
    ("changes", "said", "not_said"),
    [
        ({}, "the model is the bottleneck", "advice"),
        ({"input": 0.6, "decoding": 0.6}, "--cache=true", "CPU cores"),
        ({"input": 0.6, "decoding": 1.2}, "more CPU cores", "--cache=true"),
        ({"free": 0.1 * 2**30}, "--cache=false", "CPU cores"),
        (
            {"free": 0.1 * 2**30},
            "--gradient_cache, a smaller batch, --image_size or --evaluation_batch_size",
            "the input",
        ),
    ],
)
def test_the_bottleneck_and_the_advice(changes, said, not_said):
    text = "\n".join(found(**changes).lines())
    assert said in text
    assert not_said not in text


def test_a_run_is_probed_without_a_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(assembly, "load_splits", lambda *arguments: runs.SPLITS)
    experiment = runs.experiment(tmp_path / "run", cache="true", evaluate_every=1, epochs=4)
    result = probe(experiment, assemble(experiment), steps=2)
    assert (result.batch_size, result.steps, result.evaluations) == (8, 4 * runs.STEPS, 5)
    assert result.evaluated == sum(len(split) for split in runs.SPLITS.evaluated().values())
    measured = (result.together, result.input, result.decoding, result.model, result.embedding, result.peak)
    assert np.isfinite(measured).all()
    assert min(measured) > 0
    assert not (tmp_path / "run").exists()


def test_no_time_of_compiling_is_probed(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(assembly, "load_splits", lambda *arguments: runs.SPLITS)
    monkeypatch.setattr(probing, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    parts = assemble(runs.experiment(tmp_path / "run", evaluation_batch_size=8))
    fits = []

    def fit(batches, steps_per_epoch, **options):
        # The first steps of a process take 100 seconds longer.
        now[0] += 2.0 * steps_per_epoch + (0.0 if fits else 100.0)
        fits.append(steps_per_epoch)

    def compiled(model, function):
        def embed(batch):
            now[0] += 3.0 * len(batch) + (0.0 if seen else 100.0)
            seen.append(len(batch))
            return batch

        seen = []
        return embed

    monkeypatch.setattr(parts.learner, "fit", fit)
    monkeypatch.setattr(probing, "compiled", compiled)
    found = probe(runs.experiment(tmp_path / "run", evaluation_batch_size=8), parts, steps=4)
    assert (found.model, found.together, found.embedding) == pytest.approx((2.0, 2.0, 3.0))


def test_the_first_batch_of_images_is_not_timed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(probing, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def batches():
        for seconds in (100.0, 2.0, 2.0, 2.0):
            now[0] += seconds
            yield

    assert probing._seconds_per_batch(batches(), 3) == pytest.approx(2.0)
