"""`tfdml doctor`: the verdict, and what it says of what is missing."""

import importlib.metadata

import pytest

from tfdml_command import doctor

METADATA = [
    "numpy>=1.26",
    "nosuch-package>=2",
    "pip>=9999",
    "nosuch-extra; extra == 'onnx'",
    "pytest[dev]>=8; extra == 'ray'",
    "pytest>=8; extra == 'jax'",
    "nosuch-tool; extra == 'dev'",
]


@pytest.fixture
def quick(monkeypatch):
    """No training."""
    monkeypatch.setattr(doctor, "_trial", list)


@pytest.mark.usefixtures("quick")
def test_missing_packages_are_named_with_the_command_that_installs_them(capsys, monkeypatch):
    requires = importlib.metadata.requires
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: METADATA if name == "tfdml" else requires(name))
    assert doctor.main([]) == 1
    said = capsys.readouterr().out
    assert "  nosuch-package        missing     needs >=2\n" in said
    assert "missing nosuch-extra: pip install 'tfdml[onnx]'" in said
    assert "pip install 'nosuch-package>=2' 'pip>=9999'" in said
    assert "  jax                   installed\n" in said
    assert "nosuch-tool" not in said
    assert said.endswith("tfdml does not work here yet.\n")
    # An extra of an extra, such as tensorflow[and-cuda].
    ray = next(line for line in said.splitlines() if line.startswith("  ray "))
    assert "missing" in ray
    assert "pytest," not in ray


@pytest.mark.usefixtures("quick")
def test_a_full_disk_is_a_problem(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_requirements", lambda: ({}, {}))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2**20}))
    assert doctor.main([]) == 1
    assert "problem: less than 1 GB is free in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("raise ImportError('no library')", "a training step fails: ImportError: no library"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "a training step fails: the process ended with"),
        ("print('STEPS[3, NaN]')", "the loss of a training step is not a number"),
    ],
)
def test_a_training_that_fails_is_a_problem(program, fault, monkeypatch):
    monkeypatch.setattr(doctor, "_TRIAL", program)
    assert doctor._trial()[0].startswith(fault)
