"""Training on Keras's JAX backend: equal to TensorFlow, over devices and processes, and after a
kill."""

import os
import shutil
import signal

import numpy as np
import pytest

from tests.cli import commands
from tests.cli.conftest import TINY
from tests.support.marks import JAX
from tests.support.processes import run_python
from tests.training import kill_driver, method_steps

pytest.importorskip("jax")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def first():
    return method_steps.first_weights()


@pytest.fixture(scope="module")
def on_jax(first, tmp_path_factory):
    path = tmp_path_factory.mktemp("methods") / "steps.npz"
    np.savez(path, **first)
    run_python("-m", "tests.training.method_steps", path, environment=JAX)
    return dict(np.load(path))


@pytest.mark.parametrize("name", method_steps.LEARNERS)
def test_ten_steps_are_those_of_tensorflow(first, on_jax, name):
    expected = method_steps.steps(name, first)
    for key, value in expected.items():
        np.testing.assert_allclose(on_jax[key], value, atol=1e-4, rtol=1e-4, err_msg=key)


# With draws (of dropout), a measurement before the first step, and a checkpoint within the epoch.
RUN = [
    *TINY,
    "--backbone=conv4(width=4)",
    "--dropout=0.2",
    "--objectives=contrastive + density + horde(loss=contrastive, orders=2, dim=8)",
    "--epochs=1",
    "--steps_per_epoch=5",
    "--checkpoint_steps=3",
    "--noreport",
]
# With classes that are drawn, in chunks, several steps an execution.
TOGETHER = [
    *(flag for flag in RUN if not flag.startswith(("--objectives", "--steps_per_epoch"))),
    "--objectives=am_softmax(sample=0.3) + jrs",
    "--gradient_cache=5",
    "--steps_per_epoch=6",
    "--steps_per_execution=2",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of an uninterrupted run; of one killed within its epoch and resumed; of two processes that
    resume it together."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name, flags, **options):
        return {"flags": [*flags, f"--run_dir={folder / name}"], **options}

    # Of several steps an execution the fourth is the first that is kept.
    kill = ["after", "step-0000000[34].npz", 1]
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    begun = [
        run("whole", RUN),
        run("resumed", RUN, kill=kill),
        run("drawn whole", TOGETHER),
        run("drawn resumed", TOGETHER, kill=kill),
        run("drawn resumed", TOGETHER),
    ]
    status, errors = kill_driver.drive(begun, **{**JAX, **cache})
    assert status == [0, -signal.SIGKILL, 0, -signal.SIGKILL, 0], errors[-3000:]
    shutil.copytree(folder / "resumed", folder / "together")
    cluster = {
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": f"localhost:{20000 + os.getpid() % 20000}",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
    }
    two = [{**cluster, "KERAS_DISTRIBUTION_PROCESS_ID": str(index)} for index in (0, 1)]
    ended = [run("resumed", RUN), run("together", RUN, environments=two)]
    status, errors = kill_driver.drive(ended, **{**JAX, **cache})
    assert status == [0, 0, 0], errors[-3000:]
    return folder


def last(folder):
    *_, path = sorted((folder / "checkpoints").iterdir())
    with np.load(path) as file:
        return {name: file[name] for name in file.files if name != "state"}


@pytest.mark.parametrize("name", ["", "drawn "])
def test_a_killed_run_ends_bit_for_bit_as_an_uninterrupted_one(name, folders):
    expected, found = last(folders / f"{name}whole"), last(folders / f"{name}resumed")
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name


def test_two_processes_resume_to_the_weights_of_one(folders):
    expected, found = last(folders / "whole"), last(folders / "together")
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_what_jax_has_trained_is_exported_by_tensorflow(folders):
    flags = [f"--run_dir={folders / 'resumed'}", f"--out={folders / 'models'}", "--images=40"]
    commands.printed("export", *flags)
    assert (folders / "models" / "1" / "saved_model.pb").is_file()
