"""The layers of the imports, as `make lint` checks them."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("importlinter", reason="pip install 'tfdml[dev]'")
ROOT = pathlib.Path(__file__).resolve().parents[1]


def _lint(folder):
    """`lint-imports` on the tree in `folder`."""
    return subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(ROOT / "tfdml", tmp_path / "tfdml", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_no_import_goes_upwards_or_in_a_circle(copy):
    done = _lint(copy)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "2 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "line", "told"),
    [
        ("losses/triplet.py", "from tfdml import training", "tfdml.losses is not allowed to import tfdml.training"),
        ("data/catalogue.py", "from tfdml import models", "tfdml.data is not allowed to import tfdml.models"),
        ("mining/miners.py", "from tfdml.mining import base", ""),
        ("pairwise.py", "from tfdml import kernels", "tfdml.pairwise is not allowed to import tfdml.kernels"),
    ],
)
def test_an_upward_import_is_told(copy, module, line, told):
    path = copy / "tfdml" / module
    path.write_text(
        path.read_text().replace(
            "from __future__ import annotations\n", f"from __future__ import annotations\n{line}\n"
        )
    )
    done = _lint(copy)
    assert (done.returncode == 0) == (not told), done.stdout[-3000:]
    assert told in " ".join(done.stdout.split())


def test_a_new_package_must_be_given_a_layer(copy):
    (copy / "tfdml" / "helpers.py").write_text('"""Helpers."""\n')
    done = _lint(copy)
    assert done.returncode != 0
    assert "helpers" in done.stdout
