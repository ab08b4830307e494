"""The commands, and a finished run."""

import pytest

from tests.cli import commands as in_this_process

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
def commands():
    """The commands within this process."""
    return in_this_process


@pytest.fixture(scope="session")
def tiny_flags():
    """The flags of a tiny run."""
    return TINY


@pytest.fixture(scope="session")
def finished_run(tiny_flags, tmp_path_factory):
    """The folder of a tiny run that has ended well."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    in_this_process.printed("train", *tiny_flags, f"--run_dir={folder}", "--checkpoint_steps=2")
    return folder
