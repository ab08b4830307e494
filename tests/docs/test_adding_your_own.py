"""What docs/adding_your_own.md adds works from the command line, in what it saves, and in
Python."""

import json

import numpy as np
import pytest

from tests.docs.pages import ROOT, blocks, command_lines
from tests.support.processes import run_python

PAGE = ROOT / "docs" / "adding_your_own.md"
MODULE, *PYTHON = (block.code for block in blocks(PAGE, "python"))
LINES = command_lines("\n".join(block.code for block in blocks(PAGE, "bash")))
LOADED = """
again = keras.saving.load_model("learner.keras")
assert type(again.objectives[0].loss) is type(loss)
"""


@pytest.mark.slow
def test_the_page_runs(tmp_path):
    labels = np.repeat(np.arange(12), 8)
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 32, 32, 3), np.uint8)
    np.savez(tmp_path / "shop.npz", images=images, labels=labels)
    (tmp_path / "my_own.py").write_text(MODULE)
    # In a process of its own, as what it registers stays.
    commands = [f"commands.printed(*{words})" for words in LINES]
    program = ["from tests.cli import commands", *commands, PYTHON[0], LOADED, *PYTHON[1:]]
    run_python("-c", "\n".join(program), environment={"PYTHONPATH": ROOT}, cwd=tmp_path)
    assert "--import=my_own" in (tmp_path / "runs/shop/flags.txt").read_text()
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert 0 <= metrics.get("metrics", metrics)["found@5"] <= 1
