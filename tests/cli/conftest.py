"""Running the commands as a user does: in a process of their own."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# A run of a few seconds: small glyphs, a narrow network, few steps.
TINY = [
    "--dataset=glyphs",
    "--dataset_options=images_per_class=4, size=32",
    "--image_size=28",
    "--resize=32",
    "--flip=false",
    "--backbone=conv4(width=8)",
    "--batch_norm=train",
    "--embedding_dim=16",
    "--objectives=am_softmax + jrs",
    "--classes_per_batch=8",
    "--images_per_class=2",
    "--epochs=2",
    "--steps_per_epoch=6",
    "--learning_rate=0.003",
    "--seed=3",
]


@pytest.fixture(scope="session")
def command():
    """Run `bin/<name>` with flags; returns the finished process."""

    def run(name, *flags, cwd=ROOT, timeout=300):
        return subprocess.run(
            [sys.executable, str(ROOT / "bin" / name), *flags],
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )

    return run


@pytest.fixture(scope="session")
def tiny_flags():
    """The flags of a tiny run."""
    return TINY


@pytest.fixture(scope="session")
def finished_run(command, tiny_flags, tmp_path_factory):
    """The folder of a tiny run that has ended well."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    done = command("train", *tiny_flags, f"--run_dir={folder}", "--checkpoint_steps=2")
    assert done.returncode == 0, done.stderr[-3000:]
    return folder
