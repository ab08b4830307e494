"""The rows of the papers' tables, in configs/papers.txt, are commands that build."""

import re

import pytest

from tests.experiments import ROOT, experiment_of, terms_of

LINES = (ROOT / "configs" / "papers.txt").read_text().splitlines()


def expanded(row):
    """A row with braces as those that it stands for: the first of each braces, the second of each, ..."""
    braces = re.findall(r"\{([^}]*)\}", " ".join(row))
    for values in zip(*(found.split(",") for found in braces), strict=True):
        rest = iter(values)
        yield tuple(re.sub(r"\{[^}]*\}", lambda _, rest=rest: next(rest), text) for text in row)
    if not braces:
        yield row


ROWS = [row for line in LINES if not line.startswith("#") for row in expanded(tuple(line.split("\t")))]


@pytest.mark.one_quick_case
@pytest.mark.parametrize(("method", "name", "command"), ROWS, ids=[f"{method} {name}" for method, name, _ in ROWS])
def test_a_row_builds(method, name, command):
    # A shell would take parentheses that are not in quotes for its own.
    assert "(" not in re.sub('"[^"]*"', "", command)
    experiment = experiment_of(command, run_dir="unused")
    assert len(terms_of(experiment)) == experiment.objectives.count(" + ") + 1


def test_each_row_is_there_once_and_another_experiment():
    names = [(method, name) for method, name, _ in ROWS]
    assert len(set(names)) == len(names)
    commands = [(method, name.partition(",")[0], command) for method, name, command in ROWS]
    assert len(set(commands)) == len(commands)
