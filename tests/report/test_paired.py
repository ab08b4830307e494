"""Runs beside the first one, query by query: in words, and on the page."""

import dataclasses

import numpy as np
import pytest

from tests.report.pages import embedded, made, rows_of
from tests.report.test_comparison import compared, run_folder
from tfdml.errors import UserError
from tfdml.evaluation import Interval, QueryValues
from tfdml.report.paired import Paired, paired_with_first
from tfdml.report.runs import Run, read_runs

LABELS = np.repeat(np.arange(12), 5)


def answered(share, seed=0):
    hits = (np.random.default_rng(seed).random(60) < share).astype(float)
    return QueryValues.of(made(LABELS), {"recall@1": hits, "map@r": 0.5 * hits})


def stored(path, share=0.5, seed=0, **result):
    folder = run_folder(path, **result)
    answered(share, seed).write(folder / "queries.npz")
    return folder


def of_seeds(path, share, seeds):
    for seed in seeds:
        stored(path / f"seed_{seed}", share, seed)
    (path / "result.json").write_text(
        '{"metrics": {}, "seeds": [' + ", ".join(f'{{"seed": {s}}}' for s in seeds) + "]}"
    )
    return path


def test_differences_on_the_page(tmp_path):
    runs = [stored(tmp_path / "am", 0.2), stored(tmp_path / "jrd", 0.9), run_folder(tmp_path / "old")]
    text, page = compared(tmp_path, *runs)
    section = page.section("paired")
    assert "jrd is better than am by " in section
    assert "points of Recall@1 (95 % interval over classes " in section
    assert "old and am are not compared query by query: old has no queries.npz" in section
    (recall, _) = rows_of(text, "Differences on the same queries")
    found = paired_with_first(read_runs(runs[:2]))[0].classes["recall@1"]
    assert recall[0] == "Recall@1"
    assert recall[1].startswith(f"+{100 * found.mean:.1f}{100 * found.low:.1f} to ")


def test_embeddings_stand_in_for_what_was_not_stored(tmp_path):
    embeddings, labels = embedded(3, classes=8, per_class=5)
    worse = embeddings + np.random.default_rng(1).normal(size=embeddings.shape)
    runs = [run_folder(tmp_path / name) for name in ("a", "b")]
    page = compared(tmp_path, *runs, dataset=made(labels), embeddings=[embeddings, worse])[1]
    assert "b is worse than a by " in page.section("paired")


def test_other_queries_are_refused(tmp_path):
    first, second = stored(tmp_path / "a"), run_folder(tmp_path / "b")
    other = QueryValues.of(made(LABELS[:50]), {"recall@1": np.ones(50)})
    other.write(second / "queries.npz")
    pair = paired_with_first(read_runs([first, second]))[0]
    assert pair.refused == "their queries are not the same: 50 queries and 60"
    dataclasses.replace(answered(0.5), values={"nmi": np.ones(60)}).write(second / "queries.npz")
    assert paired_with_first(read_runs([first, second]))[0].refused == "they have no metric in common"
    (second / "queries.npz").write_bytes(b"")
    with pytest.raises(UserError, match=r"queries\.npz cannot be read"):
        paired_with_first(read_runs([first, second]))


def test_several_seeds_on_both_sides(tmp_path):
    first = of_seeds(tmp_path / "first", 0.2, [0, 1, 2])
    second = of_seeds(tmp_path / "second", 0.9, [4, 7])
    runs = read_runs([first, second])
    assert [one.name for one in runs[1].seeds] == ["seed 4", "seed 7"]
    assert runs[0].measured == [{"epoch": 0, "recall@1": 0.25}, {"epoch": 1, "recall@1": 0.5}]
    pair = paired_with_first(runs)[0]
    assert pair.counts == (2, 3)
    recalls = [[np.mean(answered(share, s).values["recall@1"]) for s in seeds] for share, seeds in
               ((0.9, (4, 7)), (0.2, (0, 1, 2)))]  # fmt: skip
    expected = np.mean(recalls[0]) - np.mean(recalls[1])
    assert pair.classes["recall@1"].mean == pytest.approx(expected, rel=1e-12)
    assert pair.seeds["recall@1"].mean == pytest.approx(expected, rel=1e-12)
    assert ", over 2 and 3 seeds " in pair.sentence("recall@1")
    mixed = paired_with_first(read_runs([stored(tmp_path / "single"), first]))[0]
    assert not mixed.seeds
    assert mixed.sentence("recall@1").endswith("; one of them has one seed)")


def test_what_is_said_of_a_difference():
    def said(mean, low, high, seeds=None):
        over_seeds = {} if seeds is None else {"map@r": Interval(mean, *seeds, 0.1)}
        counts = (1, 1) if seeds is None else (3, 3)
        return Paired("b", "a", "", {"map@r": Interval(mean, low, high, 0.01)}, over_seeds, counts).sentence("map@r")

    assert said(0.024, 0.011, 0.036) == (
        "b is better than a by 2.4 points of MAP@R (95 % interval over classes 1.1 to 3.6; one seed each)"
    )
    assert said(-0.024, -0.036, -0.011).startswith(
        "b is worse than a by 2.4 points of MAP@R (95 % interval over classes"
    )
    assert "classes 1.1 to 3.6;" in said(-0.024, -0.036, -0.011)
    unsure = "b and a are not told apart by MAP@R: the difference is +2.4 points (95 % interval over classes "
    assert said(0.024, -0.01, 0.05) == f"{unsure}−1.0 to 5.0; one seed each)"
    # Sure of these networks, not of others with other seeds.
    assert said(0.024, 0.011, 0.036, (-0.01, 0.05)) == f"{unsure}1.1 to 3.6, over 3 and 3 seeds −1.0 to 5.0)"


def test_a_run_without_a_folder_has_nothing_stored():
    (pair,) = paired_with_first([Run("a", {"metrics": {}}), Run("b", {"metrics": {}})])
    assert "has no queries.npz" in pair.refused
