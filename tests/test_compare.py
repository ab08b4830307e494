"""The values of queries in files, and models compared query by query."""

import dataclasses

import numpy as np
import pytest

from tests.report import pages
from tfdml.errors import UserError
from tfdml.evaluation import paired_differences, seed_difference
from tfdml.results import QueryValues, compare_queries

LABELS = np.repeat([4, 9, 2], 4)


def values(count=12, **columns):
    return {"recall@1": np.arange(count) % 2.0, "map@r": np.linspace(0, 1, count), **columns}


def test_what_is_written_is_read(tmp_path):
    answers = values()
    answers["recall@1"][3] = answers["map@r"][3] = np.nan
    one = QueryValues.of(pages.made(LABELS), answers)
    one.write(tmp_path / "queries.npz")
    read = QueryValues.read(tmp_path / "queries.npz")
    assert read.difference_to(one) == one.difference_to(read) == ""
    assert (read.images, list(read.values)) == (one.images, ["recall@1", "map@r"])
    np.testing.assert_array_equal(read.values["recall@1"], answers["recall@1"])
    np.testing.assert_allclose(read.values["map@r"], answers["map@r"], atol=1e-7)
    (tmp_path / "queries.npz").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"queries\.npz cannot be read"):
        QueryValues.read(tmp_path / "queries.npz")


def test_other_queries_classes_or_images_are_not_compared():
    one = QueryValues.of(pages.made(LABELS), values())
    white = pages.made(LABELS, pixels=np.full((12, 20, 30, 3), 255, np.uint8))
    for other in (
        QueryValues.of(pages.made(LABELS[:8]), values(8)),
        dataclasses.replace(one, ids=one.ids[::-1]),
        QueryValues.of(pages.made(np.where(LABELS == 4, 5, LABELS)), values()),
        QueryValues.of(white, values()),
    ):
        with pytest.raises(UserError, match="not the same"):
            compare_queries([one], [other])


def test_models_are_compared_over_classes_and_seeds():
    rng = np.random.default_rng(0)
    sides = [
        [QueryValues.of(pages.made(LABELS), values(**{"map@r": rng.random(12)})) for _ in range(3)]
        for _ in "ab"
    ]
    found = compare_queries(*sides)
    columns = [[run.values for run in side] for side in sides]
    assert found.classes == paired_differences(*columns, LABELS)
    means = [[run["map@r"].mean() for run in side] for side in columns]
    assert found.seeds["map@r"] == pytest.approx(seed_difference(*means))
    assert not compare_queries(*sides, seeds=False).seeds
    assert not compare_queries(sides[0], sides[1][:1]).seeds
