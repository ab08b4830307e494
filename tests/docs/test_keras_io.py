"""The tutorials for keras.io: their format, and their code on made images."""

import re

import keras
import matplotlib
import numpy as np
import pytest

from tests.docs.pages import ROOT

TUTORIALS = sorted((ROOT / "docs" / "keras_io").glob("*.py"))
# As scripts/tutobooks.py of keras-io reads them.
HEADER = r'"""\nTitle: .+\nAuthors?: .+\nDate created: {date}\nLast modified: {date}\n'
HEADER += r'Description: [A-Z].{{0,98}}\.\nAccelerator: (GPU|TPU|None)\n"""\n'
DATE = r"\d{4}/(0[1-9]|1[0-2])/(0[1-9]|[12]\d|3[01])"


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_has_the_format_of_keras_io(path):
    text = path.read_text()
    assert re.match(HEADER.format(date=DATE), text)
    # Each text stands between two lines of quotes, one of which may name a shell cell.
    quotes = re.findall(r'^.*""".*$', text, re.MULTILINE)
    assert {*quotes} <= {'"""', '"""shell'}
    assert len(quotes) % 2 == 0


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
    matplotlib.use("agg")
    splits = made_images(1000, 1), made_images(1500, 2)
    monkeypatch.setattr(keras.datasets.cifar10, "load_data", lambda: splits)
    names = {}
    exec(compile(path.read_text().replace("epochs=10", "epochs=2"), path.name, "exec"), names)
    printed = capsys.readouterr().out
    assert "500 images to train on, 750 of unseen classes" in printed
    assert names["after"] > 0.5
    assert re.search(r"trucks named right: 0\.\d|1\.00", printed)
