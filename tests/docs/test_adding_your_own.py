"""What docs/adding_your_own.md adds works from the command line, in what it saves, and in Python."""

import json
import shlex
import subprocess
import sys

import numpy as np
import pytest

from tests.docs.examples import ROOT, blocks
from tests.docs.test_commands import joined_lines

PAGE = ROOT / "docs" / "adding_your_own.md"
MODULE, *PYTHON = (block.code for block in blocks(PAGE) if block.language == "python")
_BASH = [block.code for block in blocks(PAGE) if block.language == "bash"]
COMMANDS = [shlex.split(line) for code in _BASH for line in joined_lines(code)]


def _run(arguments, folder, check=True):
    result = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert not check or result.returncode == 0, result.stderr[-3000:]
    return result


@pytest.mark.slow
def test_the_page_runs(tmp_path):
    labels = np.repeat(np.arange(12), 8)
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 32, 32, 3), np.uint8)
    np.savez(tmp_path / "shop.npz", images=images, labels=labels)
    (tmp_path / "my_own.py").write_text(MODULE)
    train, evaluate = (["-m", *words] for words in COMMANDS if words)
    _run(train, tmp_path)
    assert "--imports=my_own" in (tmp_path / "runs/shop/flags.txt").read_text()
    _run(evaluate, tmp_path)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert 0 <= metrics.get("metrics", metrics)["found@5"] <= 1
    again = "\nagain = keras.saving.load_model('learner.keras')\nassert type(again.objectives[0].loss) is type(loss)\n"
    _run(["-c", "\n".join([PYTHON[0], again, *PYTHON[1:]])], tmp_path)
    # Elsewhere the module is missing.
    (tmp_path / "my_own.py").rename(tmp_path / "renamed.py")
    result = _run(evaluate, tmp_path, check=False)
    assert result.returncode == 2
    assert "--import=my_own" in result.stderr.strip().splitlines()[-1]
    assert "Traceback" not in result.stderr
