"""The rows of the papers' tables, in docs/ideas.md, are commands that build."""

import dataclasses
import pathlib
import re
import shlex

import pytest

from tests.training.runs import learner
from tfdml.training import Experiment
from tfdml.training.terms import build_objectives

ROOT = pathlib.Path(__file__).parents[2]
TABLE = re.findall(r"^\| ([^|]+) \| `(--flagfile=[^`]+)` \|$", (ROOT / "docs" / "ideas.md").read_text(), re.MULTILINE)


def experiment_of(command, **changes):
    """The experiment of a row's flags."""
    flagfile, *flags = shlex.split(command)
    given = "\n".join(flags)
    text = (ROOT / flagfile.partition("=")[2]).read_text() + given
    return Experiment.from_flags(text, **changes)


def test_every_table_has_its_rows():
    names = [name for name, _ in TABLE]
    assert len(set(names)) == len(names)
    expected = {"table 2, ": 3, "table 3, k = ": 5, "table 4, k = ": 5, "table 4, ": 10, "table 5, k = ": 5}
    for table, rows in expected.items():
        assert sum(name.startswith(table) for name in names) >= rows, table


@pytest.mark.parametrize("command", [command for _, command in TABLE], ids=[name for name, _ in TABLE])
def test_a_row_builds(command, tmp_path):
    experiment = experiment_of(command, run_dir=str(tmp_path))
    if experiment.ensemble_heads:
        assert build_objectives(experiment.objectives, 5)
        return
    tiny = {"backbone": "conv4(width=4)", "weights": "none", "image_size": 32, "resize": 32, "embedding_dim": 8}
    tiny["objectives"] = experiment.objectives.replace("dim=8192", "dim=64")
    assert learner(dataclasses.replace(experiment, **tiny), 5).objectives
