"""The rows of the papers' tables, in configs/papers.txt, are commands that build."""

import re
from collections import Counter

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
# How many rows each table has, on all data sets together; a dagger of HORDE's is a row.
TABLES = {
    "JRD": {"table 1": 3, "table 2": 12, "table 3": 2, "table 4": 5},
    "HORDE": {"table 1": 24, "table 2": 6, "table 3": 5, "table 4": 5, "table 5": 5, "tables 3 to 5": 1},
    "ECAML": {"table 1": 18, "table 2": 8, "table 3": 5, "table 4": 6, "table 5": 6, "table 6": 6, "table 7": 6},
    "DML-DA": {"table 1": 18, "figure 3": 3, "figure 4": 18},
    "RankMI": {"table 1": 2, "table 2": 2, "table 3": 2, "supplement": 5},
}


@pytest.mark.parametrize("method", TABLES)
def test_every_table_has_its_rows_once(method):
    names = [name for section, name, _ in ROWS if section == method]
    assert len(set(names)) == len(names)
    counts = Counter()
    for name in names:
        # A row of two tables counts in both.
        for table in name.partition(",")[0].split(" and "):
            counts[table] += 1
    assert {table: counts[table] for table in TABLES[method]} == TABLES[method]


def test_the_rows_of_a_table_are_different_experiments():
    for method in TABLES:
        commands = [(name.partition(",")[0], command) for section, name, command in ROWS if section == method]
        assert len(set(commands)) == len(commands), method


@pytest.mark.one_quick_case
@pytest.mark.parametrize(("method", "name", "command"), ROWS, ids=[f"{method} {name}" for method, name, _ in ROWS])
def test_a_row_builds(method, name, command):
    # A shell would take parentheses that are not in quotes for its own.
    assert "(" not in re.sub('"[^"]*"', "", command)
    experiment = experiment_of(command, run_dir="unused")
    assert len(terms_of(experiment)) == experiment.objectives.count(" + ") + 1
