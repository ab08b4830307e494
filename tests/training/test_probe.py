"""What a few steps say of a whole run."""

import numpy as np
import pytest

from tests.training import runs
from tfdml.training import assembly
from tfdml.training.assembly import assemble
from tfdml.training.probe import Probe, probe


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
