"""The rows of the studies, and the figures that are kept of them."""

import json
import pathlib

import pytest

from benchmarks import second_level
from benchmarks.study import run_folder
from benchmarks.study_rows import SECOND_LEVEL, STUDIES, Row
from benchmarks.study_table import gains, lines
from tests.docs.examples import NumberChecker
from tfdml.training import Experiment
from tfdml.training.expressions import parse_terms

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROWS = {**STUDIES, "second_level": SECOND_LEVEL}
KEPT = sorted((ROOT / "docs" / "studies").glob("*.json"))


def settings_of(row):
    text = (ROOT / "configs" / "small" / f"{row.flagfile}.flags").read_text()
    return Experiment.from_flags("\n".join([text, *row.flags]), run_dir="unused")


@pytest.mark.parametrize("study", ROWS)
def test_each_row_is_an_experiment_beside_a_base_that_differs_in_its_terms_alone(study):
    rows = {row.name: row for row in ROWS[study]}
    assert len(rows) == len(ROWS[study])
    settings = {}
    for name, row in rows.items():
        settings[name] = settings_of(row)
        parse_terms(settings[name].objectives, "--objectives")
    for name, row in rows.items():
        if not row.base:
            continue
        base, own = settings[row.base], settings[name]
        assert base.objectives != own.objectives
        assert (own.epochs, own.image_size, own.resize) == (
            base.epochs,
            base.image_size,
            base.resize,
        )
        # RankMI spends every second step on its statistics.
        alternating = own.objectives.startswith("rank_mi")
        assert own.steps_per_epoch == base.steps_per_epoch * (2 if alternating else 1)


@pytest.mark.parametrize(
    ("study", "row", "recipe"),
    [("cars196", "+ JRS + HORDE", "cars_recipe"), ("omniglot", "both + JRS", "omniglot_recipe")],
)
def test_the_recipe_of_a_study_is_a_flag_file(study, row, recipe):
    measured = next(one for one in STUDIES[study] if one.name == row)
    assert settings_of(Row("", recipe)) == settings_of(measured)


def test_a_run_that_was_interrupted_is_resumed_by_the_same_flags_and_seed_alone(tmp_path):
    first, second = STUDIES["omniglot"][:2]
    wanted = [(first, 0, ["--data_dir=a"]), (first, 1, ["--data_dir=a"]), (first, 0, ["--data_dir=b"]), (second, 0, [])]
    folders = [run_folder(tmp_path, *one) for one in wanted]
    assert len(set(folders)) == len(wanted)
    assert folders == [run_folder(tmp_path, *one) for one in wanted]


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_figures_are_of_the_rows(path):
    found = json.loads(path.read_text())
    studies = {path.stem: (found, STUDIES[path.stem])} if path.stem in STUDIES else {}
    studies |= {name: (study, SECOND_LEVEL) for name, study in found.items() if path.stem == "second_level"}
    assert studies
    for name, (study, rows) in studies.items():
        by_name = {row.name: row for row in rows}
        for row, kept in study["rows"].items():
            assert kept["flags"] == by_name[row].command(), (name, row)
            assert kept["base"] == by_name[row].base
        assert [row["name"] for row in gains(study)]
        assert all(line.count("|") == 9 for line in lines(study))


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_the_page_says_what_is_kept(path):
    page, found = (ROOT / "docs" / "study.md").read_text(), json.loads(path.read_text())
    told = lines(found) if path.stem in STUDIES else second_level.lines(second_level.table(found))
    # To 0.1 points, the last digit: the order of a sum decides a quantile that lies between two digits.
    same = NumberChecker().check_output
    missing = [line for line in told if not any(same(line, written, 0) for written in page.splitlines())]
    assert not missing
