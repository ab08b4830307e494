"""The rows of the studies, and their published tables."""

import pathlib

import pytest

from benchmarks.study import run_folder
from benchmarks.study_rows import SECOND_LEVEL, STUDIES, Row
from benchmarks.study_table import draw, gains, tables
from tfdml.training import Experiment
from tfdml.training.expressions import parse_terms
from tools.numbers import NUMBERS, lookup

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROWS = {**STUDIES, "second_level": SECOND_LEVEL}


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


@pytest.mark.parametrize("study", [name for name in ROWS if (NUMBERS / f"{name}.json").is_file()])
def test_the_published_table_has_the_rows_and_their_bases(study):
    if study == "second_level":
        assert {row.name.removeprefix("+ ") for row in SECOND_LEVEL if row.base} <= set(
            lookup(study)["table"]["columns"]
        )
        return
    bases = {row.name: row.base for row in ROWS[study]}
    published = [row for part in ("table", "one seed") for row in lookup(f"{study}/{part}")["rows"]]
    assert len(published) > 20
    assert all(bases[row[0]] == row[1] for row in published)


def a_run(values, seed):
    by_class = {name: [round(value + 0.01 * seed, 6) for value in values] for name in ("recall@1", "map@r")}
    return {"metrics": {name: sum(means) / 2 for name, means in by_class.items()}, "by_class": by_class}


def test_the_table_of_a_study(tmp_path):
    base = {"base": "", "flags": [], "seeds": {str(seed): a_run([0.2, 0.4], seed) for seed in (0, 1)}}
    better = {"base": "base", "flags": [], "seeds": {str(seed): a_run([0.3, 0.5], seed) for seed in (0, 1)}}
    failed = {"base": "base", "flags": [], "seeds": {"0": {"ended": "the embedding collapsed"}}}
    study = {"classes": [4, 7], "queries": [3, 3], "rows": {"base": base, "+ term": better, "+ other": failed}}
    [row] = gains(study)
    assert row["gain"]["recall@1"].mean == pytest.approx(0.1)
    assert row["over_seeds"].high > 0.101
    [paired] = gains({**study, "study": "ten_cars196"})
    assert paired["over_seeds"][:3] == pytest.approx([0.1, 0.1, 0.1])
    study["rows"]["+ once"] = {**better, "seeds": {"0": better["seeds"]["0"]}}
    several, once = tables(study).values()
    assert [row[0] for row in several] == ["+ term"]
    assert [row[0] for row in once] == ["+ once", "+ other"]
    assert list(several[0][2:5]) == ["40.0 / 41.0", "30.0 / 31.0", "+10.0"]
    draw(study, tmp_path / "gains.png")
    assert (tmp_path / "gains.png").stat().st_size
