"""The rows of the studies, and their published tables."""

import json
import pathlib

import pytest

from benchmarks import defaults
from benchmarks.study import STUDIES, table
from tfdml.expressions import parse_sum
from tfdml.training import Experiment
from tools.numbers import lookup

ROOT = pathlib.Path(__file__).resolve().parents[1]


def settings_of(row):
    text = (ROOT / "configs" / "small" / f"{row.flagfile}.flags").read_text()
    return Experiment.from_flags("\n".join([text, *row.flags]), run_dir="unused")


@pytest.mark.parametrize("study", STUDIES)
def test_each_row_is_an_experiment_beside_a_base_that_differs_in_its_terms_alone(study):
    rows = {row.name: row for row in STUDIES[study]}
    assert len(rows) == len(STUDIES[study])
    settings = {}
    for name, row in rows.items():
        settings[name] = settings_of(row)
        parse_sum(settings[name].objectives, "--objectives")
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
        assert own.steps_per_epoch == base.steps_per_epoch


def test_the_published_table_is_that_of_the_stored_runs():
    runs = json.loads((ROOT / "benchmarks" / "results" / "ten_cars196.json").read_text())
    assert [list(row) for row in table(runs)] == lookup("ten_cars196/table")["rows"]
    for study, rows in STUDIES.items():
        bases = {row.name: row.base for row in rows}
        assert all(bases[row[0]] == row[1] for row in lookup(f"{study}/table")["rows"])


def test_each_recipe_is_an_experiment_and_the_default_has_no_flag_of_its_own():
    for dataset in defaults.SETS:
        for recipe in defaults.RECIPES:
            assert ("--evaluate_every=0" in defaults.settings(dataset, recipe, 0)) == (recipe != "selection")
    assert defaults.flags("grocery", "default", 2) == [*defaults.SETS["grocery"], "--evaluate_every=0", "--seed=2"]
    assert "--backbone=resnet50" in defaults.settings("grocery", "default", 0, "resnet50")
    assert defaults.flags("glyphs", "default", 0, "resnet50") == defaults.flags("glyphs", "default", 0)
    # A run is repeated when its recipe has changed.
    assert {"--min_steps=480", "--objective_rate=0.01"} <= set(defaults.settings("grocery", "default", 0))
    assert "--min_steps=1200" in defaults.settings("glyphs", "default", 0)
