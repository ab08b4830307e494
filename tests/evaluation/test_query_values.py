"""What is kept of each query: written and read, and when two runs' queries are the same."""

import dataclasses

import numpy as np
import pytest

from tests.report.pages import made
from tfdml.errors import UserError
from tfdml.evaluation import QueryValues

LABELS = np.repeat([4, 9, 2], 4)


def values(count=12, **columns):
    return {"recall@1": np.arange(count) % 2.0, "map@r": np.linspace(0, 1, count), **columns}


def test_what_is_written_is_read(tmp_path):
    answers = values()
    answers["recall@1"][3] = answers["map@r"][3] = np.nan
    one = QueryValues.of(made(LABELS), answers)
    one.write(tmp_path / "queries.npz")
    read = QueryValues.read(tmp_path / "queries.npz")
    assert read.difference_to(one) == one.difference_to(read) == ""
    assert (read.images, list(read.values)) == (one.images, ["recall@1", "map@r"])
    np.testing.assert_array_equal(read.values["recall@1"], answers["recall@1"])
    np.testing.assert_allclose(read.values["map@r"], answers["map@r"], atol=1e-7)
    assert not list(tmp_path.glob(".*"))


def test_with_roles_the_queries_alone_count():
    asked = np.arange(12) % 3 == 0
    one = QueryValues.of(made(LABELS, is_query=asked), values(4))
    assert one.labels.tolist() == LABELS[asked].tolist()
    other = QueryValues.of(made(LABELS), values())
    assert set(one.ids) < set(other.ids)


def test_why_queries_are_not_the_same():
    one = QueryValues.of(made(LABELS), values())
    relabelled = QueryValues.of(made(np.where(LABELS == 4, 5, LABELS)), values())
    fewer = QueryValues.of(made(LABELS[:8]), values(8))
    ids = one.ids.copy()
    ids[0] = 1
    for other, reason in (
        (fewer, "12 queries and 8"),
        (dataclasses.replace(one, ids=one.ids[::-1]), "the same queries in another order"),
        (dataclasses.replace(one, ids=ids), "of 12 queries 11 are the same images"),
        (relabelled, "the same queries with other classes"),
        (dataclasses.replace(one, images="sha256:0"), "the same queries, searched among other images"),
    ):
        assert one.difference_to(other) == reason


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "queries.npz"
    one = QueryValues.of(made(LABELS), values())
    arrays = {"ids": one.ids, "labels": LABELS, "images": np.array("x"), "metrics": np.array(["m"])}
    for content in (
        {"ids": one.ids},
        {**arrays, "values": np.ones((1, 11))},
        {**arrays, "values": np.ones((2, 12))},
        {**arrays, "values": np.ones(12)},
        {**arrays, "values": np.array(["x"])},
        {**arrays, "values": np.array([None])},
    ):
        np.savez(path, **content)
        with pytest.raises(UserError):
            QueryValues.read(path)
    path.write_bytes(b"PK")
    with pytest.raises(UserError, match=r"queries\.npz cannot be read"):
        QueryValues.read(path)
