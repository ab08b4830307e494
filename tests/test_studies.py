"""The rows of the studies, and their published tables; the benchmark of the defaults, and its data."""

import io
import json
import pathlib
import sys
import tarfile
import types

import pytest
from PIL import Image

from benchmarks import defaults, defaults_data
from benchmarks.study import run_folder
from benchmarks.study_rows import STUDIES, Row
from benchmarks.study_table import draw, gains, pairs_seeds, tables
from tests.data.preparations import encoded
from tests.docs.files import write_photos
from tfdml.expressions import parse_sum
from tfdml.training import Experiment
from tools.numbers import NUMBERS, Results, lookup

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


@pytest.mark.parametrize("study", [name for name in STUDIES if (NUMBERS / f"{name}.json").is_file()])
def test_the_published_table_has_the_rows_and_their_bases(study):
    bases = {row.name: row.base for row in STUDIES[study]}
    if pairs_seeds({"study": study}):
        published = lookup(f"{study}/table")["rows"]
        assert {row[0] for row in published} == {name for name, base in bases.items() if base}
    else:
        parts = [part for part in ("table", "one seed") if part in lookup(study)]
        published = [row for part in parts for row in lookup(f"{study}/{part}")["rows"]]
        assert len(published) >= min(21, sum(map(bool, bases.values())))
    assert all(bases[row[0]] == row[1] for row in published if row[0] in bases)


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
    assert row["over_seeds"]["recall@1"].high > 0.101
    [paired] = gains({**study, "study": "ten_cars196"})
    assert paired["gain"]["recall@1"][:3] == pytest.approx([0.1, 0.1, 0.1])
    [paired] = tables({**study, "study": "ten_cars196"})["table"][1]
    assert paired[2:] == ("40.5", "30.5", "+10.0", "+10.0 to +10.0", "2 of 2", "+10.0 (+10.0 to +10.0)")
    study["rows"]["+ once"] = {**better, "seeds": {"0": better["seeds"]["0"]}}
    (_, several), (_, once), (_, on_the_way) = tables(study).values()
    assert not on_the_way
    assert [row[0] for row in several] == ["+ term"]
    assert [row[0] for row in once] == ["+ once", "+ other"]
    assert list(several[0][2:5]) == ["40.0 / 41.0", "30.0 / 31.0", "+10.0"]
    paired = tables({**study, "study": "ten_cars196"})
    assert [[row[0] for row in rows] for _, rows in paired.values()] == [["+ term"], ["+ other"], []]
    for name in ("omniglot", "ten_omniglot"):
        draw({**study, "study": name}, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size
    assert (tmp_path / "omniglot.png").read_bytes() != (tmp_path / "ten_omniglot.png").read_bytes()


def test_a_study_shows_what_is_reached_on_the_way():
    tested = {str(epoch): {"recall@1": 0.1 * epoch, "map@r": 0.02 * epoch} for epoch in (0, 2, 4)}
    ended = {"base": "", "seeds": {str(seed): {**a_run([0.2, 0.4], seed), "tests": tested} for seed in (0, 1)}}
    stopped = {
        "base": "ended",
        "seeds": {"0": {"tests": {key: tested[key] for key in ("0", "2")}}, "1": ended["seeds"]["1"]},
    }
    study = {
        "classes": [4, 7],
        "queries": [3, 3],
        "rows": {"ended": ended, "stopped": stopped, "brief": {**ended, "seeds": {}}},
    }
    columns, rows = tables(study)["on the way"]
    assert columns == ("row", "0 epochs", "2 epochs", "4 epochs")
    assert rows == [
        ("ended", "0.0 (0.0)", "20.0 (4.0)", "40.0 (8.0)"),
        ("stopped", "0.0 (0.0)", "20.0 (4.0)", "40.0 (8.0)"),
    ]
    del stopped["seeds"]["1"]
    stopped["seeds"]["0"]["tests"]["3"] = tested["2"]
    assert tables(study)["on the way"][1][1] == ("stopped", "0.0 (0.0)", "20.0 (4.0)", "20.0 (4.0)", "")


def a_default_run(dataset, recipe, seed, before, after, *flags):
    sizes = {part: {"classes": 4, "images": 40} for part in ("train", "test")}
    metrics = {"before": {"recall@1": before, "map@r": 0.1}, "selected": {"recall@1": after, "map@r": 0.2}}
    return {"dataset": dataset, "recipe": recipe, "seed": seed, "flags": flags, "steps": 7, "sizes": sizes, **metrics}


def test_a_recipe_is_judged_by_its_mean_over_data_sets_and_by_its_worst(tmp_path):
    rows = [
        a_default_run("grocery", "default", 0, 0.7, 0.8),
        a_default_run("grocery", "default", 1, 0.7, 0.9),
        a_default_run("emoji", "default", 0, 0.5, 0.45),
        # Of a seed that emoji does not have yet, and a data set that the default does not have.
        # Over the networks with a random projection, not its own.
        a_default_run("grocery", "long", 1, 0.75, 0.95, "--head=whitened"),
        a_default_run("grocery", "linear", 1, 0.7, 0.7),
        a_default_run("icons", "long", 0, 0.4, 0.6),
        {"dataset": "clothing", "recipe": "long", "seed": 0, "refused": "--classes_per_batch=20: of 12"},
    ]
    of_characters = a_default_run("glyphs", "default", 0, 0.1, 0.5)
    found = defaults.summary(rows, "default")
    assert found["gain"] == pytest.approx([15, -5])  # each data set counts once, however many seeds it has
    assert (found["worst"][0], found["worst"][1]) == ("emoji", pytest.approx(-5))
    assert found["over seeds"] == pytest.approx([2.5])  # seed 0 alone is complete
    assert found["map@r"] == pytest.approx([10, 10])
    assert defaults.summary(rows, "long")["next to default"] == pytest.approx([5])
    path = tmp_path / "defaults.json"
    defaults.tables([*rows, of_characters], list(defaults.RECIPES), Results(str(path)))
    stored = json.loads(path.read_text())
    default, long, _, random = (
        dict(zip(stored["recipes"]["columns"], row, strict=True)) for row in stored["recipes"]["rows"]
    )
    assert (random["from"], random["mean gain"], random["worst data set"]) == ("random", "+40.0", "glyphs +40.0")
    assert (default["from"], long["from"], default["recipe"]) == ("ImageNet", "ImageNet", "default")
    assert (default["mean gain"], default["worst data set"]) == ("+5.0", "emoji -5.0")
    assert (default["data sets, runs"], default["95 %, data sets"]) == ("2, 3", "-122.1 to +132.1")
    assert (long["mean gain"], long["worst data set"], long["data sets, runs"]) == ("+22.5", "clothing refused", "2, 2")
    assert long["next to default"] == "+5.0"
    assert dict(stored["flags"]["rows"])["long"] == "`--epochs=24` `--min_steps=960`"
    assert [row[0] for row in stored["sets"]["rows"]] == ["grocery", "clothing", "emoji", "icons", "glyphs"]
    default, long, _ = (dict(zip(stored["gains"]["columns"], row, strict=True)) for row in stored["gains"]["rows"])
    assert default["grocery"] == "+15.0 (-48.5 to +78.5)"
    assert (default["emoji"], long["emoji"]) == ("-5.0", "")
    assert (default["clothing"], long["clothing"]) == ("", "refused")


def test_a_recipe_is_chosen_for_a_data_set_by_the_others_alone():
    rows = [a_default_run(name, "default", 0, 0.5, 0.6) for name in ("grocery", "emoji", "icons")]
    reached = {"grocery": 0.9, "emoji": 0.55, "icons": 0.55}
    rows += [a_default_run(name, "long", 0, 0.5, after) for name, after in reached.items()]
    # One with half of the data sets, by a seed of which the default is worse.
    rows += [a_default_run(name, "default", 1, 0.5, 0.5) for name in ("grocery", "emoji")]
    rows += [a_default_run(name, "wide", 1, 0.5, 0.58) for name in ("grocery", "emoji")]
    # Not a candidate, one with a single data set, and a kind of network of which one data set alone is there.
    rows += [a_default_run("emoji", name, 0, 0.5, 0.99) for name in ("before", "jrs")]
    rows += [a_default_run("glyphs", "default", 0, 0.1, 0.2)]
    found = defaults.left_out(rows)
    # Differences from the default: 30, -5 and -5 of long, 8 and 8 of wide.
    assert {name: chosen for name, (chosen, _) in found.items()} == {
        "grocery": "wide",
        "emoji": "long",
        "icons": "long",
    }
    # The default gains 5 there over its two seeds.
    assert found["emoji"][1] == pytest.approx({"default": 5, "long": 0, "wide": 13})
    assert found["icons"][1] == pytest.approx({"default": 10, "long": 5})


def test_what_each_selection_keeps_is_read_from_the_same_runs():
    def epoch(held_out, unseen):
        parts = {"validation": held_out, "test": unseen}
        return {part: {"recall@1": recall, "map@r": 1 - recall} for part, recall in parts.items()}

    held_out = a_default_run("emoji", "selection", 0, 0.5, 0.6)
    held_out["epochs"] = [epoch(0.7, 0.55), epoch(0.9, 0.6), epoch(0.9, 0.52), epoch(0.8, 0.7)]
    folds = {**a_default_run("emoji", "folds", 0, 0.5, 0.6), "together": {"recall@1": 0.8, "map@r": 0.2}}
    rows = [a_default_run("emoji", "default", 0, 0.5, 0.65), a_default_run("emoji", "ema", 0, 0.5, 0.66)]
    gained = {name: by_set["emoji"] for name, by_set in defaults.selections([*rows, held_out, folds]).items()}
    assert gained == {
        "all classes, last": {0: pytest.approx(15)},
        "all classes, average": {0: pytest.approx(16)},
        "held out, last": {0: pytest.approx(20)},
        "held out, best Recall@1": {0: pytest.approx(2)},  # the last of two
        "held out, best MAP@R": {0: pytest.approx(5)},
        "4 folds, mean": {0: pytest.approx(10)},
        "4 folds, together": {0: pytest.approx(30)},
    }


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


@pytest.mark.slow
def test_runs_of_the_defaults_are_measured_once_and_again_with_other_flags(tmp_path, monkeypatch, capfd):
    write_photos(tmp_path / "sets" / "grocery", classes="abcdefgh", images=6)
    network = ("--backbone=conv4(width=8)", "--batch_norm=train", "--image_size=28", "--resize=32")
    short = ("--classes_per_batch=2", "--images_per_class=2", "--epochs=1", "--steps_per_epoch=2")
    monkeypatch.setattr(defaults, "SETS", {"grocery": ("--dataset=folder", *network, *short)})
    recipes = {
        "default": (),
        "selection": ("--holdout_classes=0.5", "--selection=validation"),
        # More classes than there are.
        "long": ("--classes_per_batch=5",),
    }
    monkeypatch.setattr(defaults, "RECIPES", recipes)
    path = tmp_path / "results.json"
    words = ["defaults", f"--results={path}", f"--sets={tmp_path / 'sets'}", "--weights=unused", "--seeds=1"]
    monkeypatch.setattr("sys.argv", [*words, f"--runs={tmp_path / 'runs'}"])
    defaults.main()
    rows = json.loads(path.read_text())["runs"]
    assert [row["recipe"] for row in rows] == ["default", "selection", "long"]
    assert rows[2]["refused"].startswith("--classes_per_batch=5")
    for row in rows[:2]:
        assert row["steps"] == 2
        assert row["sizes"]["test"] == {"classes": 4, "images": 24}
        assert row["before"] != row["selected"]
        assert row["last"] == row["selected"]  # of one epoch
    assert rows[1]["sizes"]["train"]["classes"] < rows[0]["sizes"]["train"]["classes"]
    capfd.readouterr()
    train = defaults.train
    monkeypatch.setattr(defaults, "train", lambda *_: pytest.fail("trained again"))
    defaults.main()
    assert "| default |" in capfd.readouterr().out
    recipes["default"] = ("--flip=false",)
    monkeypatch.setattr(defaults, "train", train)
    defaults.main()
    again = {row["recipe"]: row for row in json.loads(path.read_text())["runs"]}
    assert "--flip=false" in again["default"]["flags"]
    assert again["default"]["selected"] != rows[0]["selected"]  # of a run of its own
    assert len(again) == 3


def names_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_photographs_become_folders_of_classes(tmp_path):
    write_photos(tmp_path / "shop" / "dataset" / "train" / "Fruit", classes=["Lime"], images=2)
    write_photos(tmp_path / "shop" / "dataset" / "test" / "Fruit" / "Apple", classes=["Gala"], images=1)
    write_photos(tmp_path / "shop" / "dataset" / "iconic", classes=["Lime"], images=1)
    defaults_data.write_grocery(tmp_path / "shop", tmp_path / "grocery")
    assert names_below(tmp_path / "grocery") == ["Gala/test_0.jpg", "Lime/train_0.jpg", "Lime/train_1.jpg"]
    write_photos(tmp_path / "clothes", classes=["images"], images=8)
    labels = ["Hat", "Hat", "Hat", "Pants", "Not sure", "Not sure", "Hat", "Hat"]
    rows = [f"{number},7,{label},{number > 5}" for number, label in enumerate(labels)]
    (tmp_path / "clothes" / "images.csv").write_text("\n".join(["image,sender_id,label,kids", *rows, "9,7,Hat,False"]))
    defaults_data.write_clothing(tmp_path / "clothes", tmp_path / "clothing", at_least=2, at_most=2)
    wanted = ["Hat of children/6.jpg", "Hat of children/7.jpg", "Hat/0.jpg", "Hat/1.jpg"]
    assert names_below(tmp_path / "clothing") == wanted


def test_drawings_of_one_name_become_a_class(tmp_path, monkeypatch):
    drawn = []

    def svg_to_bytes(svg_string):
        drawn.append(svg_string)
        return list(encoded(Image.new("RGBA", (4, 4)), "PNG"))

    monkeypatch.setitem(sys.modules, "resvg_py", types.SimpleNamespace(svg_to_bytes=svg_to_bytes))
    names = {"one": ["ant", "bee", "cat", "dog"], "two": ["ant", "bee", "cat"], "three": ["ant", "cat", "dog"]}
    for package, own in names.items():
        icons = {name: {"body": f"<{name}/>"} for name in own}
        icons["ant"]["width"] = 24
        text = json.dumps({"icons": icons, "height": 32}).encode()
        with tarfile.open(tmp_path / f"iconify-json-{package}-1.0.tgz", "w:gz") as archive:
            about = tarfile.TarInfo("package/icons.json")
            about.size = len(text)
            archive.addfile(about, io.BytesIO(text))
    defaults_data.write_drawings(tmp_path, tmp_path / "out", dict.fromkeys(names, "1.0"), at_least=2, every=2)
    # Of ant, bee, cat and dog, every second.
    wanted = [f"{name}/{package}.png" for name in ("ant", "cat") for package in sorted(names)]
    assert names_below(tmp_path / "out") == wanted
    assert 'viewBox="0 0 24 32"' in drawn[0]
    assert "<ant/>" in drawn[0]
    assert Image.open(tmp_path / "out" / "ant" / "one.png").getpixel((0, 0)) == (255, 255, 255)
