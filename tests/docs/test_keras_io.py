"""The tutorials for keras.io: their format, and their code on made images."""

import datetime
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

from tests.docs.pages import ROOT

TUTORIALS = sorted((ROOT / "docs" / "keras_io").glob("*.py"))
# Line by line, as scripts/tutobooks.py of keras-io reads them.
HEADER = [
    r'"""',
    r"Title: .+",
    r"Authors?: .+",
    r"Date created: (\d{4}/\d{2}/\d{2})",
    r"Last modified: (\d{4}/\d{2}/\d{2})",
    r"Description: [A-Z].{0,98}\.",
    r"Accelerator: (GPU|TPU|None)",
    r'"""',
]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_has_the_format_of_keras_io(path):
    text = path.read_text()
    lines = text.split("\n")
    for line, pattern in zip(lines, HEADER, strict=False):
        assert re.fullmatch(pattern, line), (line, pattern)
    for date in re.findall(r"\d{4}/\d{2}/\d{2}", "\n".join(lines[:7])):
        datetime.datetime.strptime(date, "%Y/%m/%d")
    # Each text stands between two lines of quotes, one of which may name a shell cell.
    quotes = [line for line in lines if '"""' in line]
    assert set(quotes) <= {'"""', '"""shell'}
    assert len(quotes) % 2 == 0
    assert not any(line.endswith(" ") for line in lines)
    # Its own check runs Black, which ruff's formatter follows.
    check = ["format", "--isolated", "--line-length=88", "--check", str(path)]
    done = subprocess.run([sys.executable, "-m", "ruff", *check], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout


def made_images(count, seed):
    """As `keras.datasets.cifar10` gives them: noise around the color of each class."""
    labels = np.arange(count) % 10
    colors = np.random.default_rng(0).integers(30, 220, (10, 4, 4, 3))
    noise = np.random.default_rng(seed).normal(0, 25, (count, 32, 32, 3))
    images = colors[labels].repeat(8, axis=1).repeat(8, axis=2) + noise
    return np.clip(images, 0, 255).astype(np.uint8), labels[:, None].astype(np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(path, monkeypatch, capsys):
    import matplotlib

    matplotlib.use("agg")
    splits = made_images(1000, 1), made_images(1500, 2)
    monkeypatch.setattr(keras.datasets.cifar10, "load_data", lambda: splits)
    names = {}
    exec(compile(path.read_text().replace("epochs=10", "epochs=2"), path.name, "exec"), names)
    printed = capsys.readouterr().out
    assert "500 images to train on, 750 of unseen classes" in printed
    assert names["after"] > 0.5
    assert re.search(r"trucks named right: 0\.\d|1\.00", printed)
