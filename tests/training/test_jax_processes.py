"""Training on Keras's JAX backend: equal to TensorFlow, over devices and processes, and after a
kill."""

import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.cli.conftest import TINY
from tests.support import fork_server, marks
from tests.support.fork_server import ROOT
from tests.training import method_steps

pytest.importorskip("jax")
pytestmark = pytest.mark.slow

JAX = {**marks.JAX, "TF_CPP_MIN_LOG_LEVEL": "3"}


def finished(*processes):
    for process in processes:
        out = process.communicate(timeout=400)[0]
        assert process.returncode == 0, out[-3000:]


def start(*command, environment=JAX):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, **pipes)


@pytest.fixture(scope="module")
def first():
    return method_steps.first_weights()


@pytest.fixture(scope="module")
def on_jax(first, tmp_path_factory):
    path = tmp_path_factory.mktemp("methods") / "steps.npz"
    np.savez(path, **first)
    finished(start("-m", "tests.training.method_steps", str(path)))
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
KILLED = """
import os, signal, sys
replace = os.replace
def kill_after(source, target):
    replace(source, target)
    if str(target).endswith(("step-00000003.npz", "step-00000004.npz")):
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = kill_after
from tfdml.cli import train
from tfdml.cli.command_line import run
run(train.COMMAND, sys.argv[1:])
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of an uninterrupted run; of one killed within its epoch and resumed; of two processes that
    resume it together."""
    folder = tmp_path_factory.mktemp("runs")
    environment = {**JAX, "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    train = ("bin/train",)
    for name, flags in (("", RUN), ("drawn ", TOGETHER)):
        finished(
            start(*train, *flags, f"--run_dir={folder / f'{name}whole'}", environment=environment)
        )
        resumed = folder / f"{name}resumed"
        killed = start("-c", KILLED, *flags, f"--run_dir={resumed}", environment=environment)
        out = killed.communicate(timeout=400)[0]
        assert killed.returncode == -signal.SIGKILL, out[-3000:]
        if not name:
            shutil.copytree(resumed, folder / "together")
        finished(start(*train, "--resume", f"--run_dir={resumed}", environment=environment))
    port = 20000 + os.getpid() % 20000
    cluster = {
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": f"localhost:{port}",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
    }
    resume = (*train, "--resume", f"--run_dir={folder / 'together'}")
    finished(
        *[
            start(*resume, environment=JAX | cluster | {"KERAS_DISTRIBUTION_PROCESS_ID": str(i)})
            for i in (0, 1)
        ]
    )
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
    done = fork_server.run(
        "export", f"--run_dir={folders / 'resumed'}", f"--out={folders / 'models'}", "--images=40"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (folders / "models" / "1" / "saved_model.pb").is_file()
