"""Neighbors as data: they are those of the metrics, and what is written is read back."""

import numpy as np
from pyarrow.parquet import read_table

from tfdml.data import ArrayImages, ImageDataset
from tfdml.evaluation import Relevance, retrieval_per_query
from tfdml.results import RetrievalResults
from tfdml.retrieval import Neighbors


def made():
    """Tied distances, classes of one image, images that are ignored, and names that need quotes."""
    rng = np.random.default_rng(0)
    points, labels, groups = (
        rng.integers(0, 4, size=(50, 2)),
        rng.integers(0, 16, 50),
        rng.integers(0, 3, 50),
    )
    names = [f"photos {row}/100%.jpg" for row in range(50)]
    dataset = ImageDataset(
        "made", "test", ArrayImages(np.zeros((50, 4, 4, 3), np.uint8), tuple(names)), labels
    )
    return points, labels, Relevance.classes(labels, not_same=groups), dataset


def test_neighbors_are_marked_as_the_metrics_count_them():
    points, labels, relevance, dataset = made()
    results = RetrievalResults.search(
        points, labels, k=12, relevance=relevance, query_ids=dataset.names
    )
    expected = retrieval_per_query(points, relevance=relevance, metrics=["precision@12"])[
        "precision@12"
    ]
    frame = results.table.to_pandas().groupby("query", sort=False)
    answerable = ~np.isnan(expected)
    np.testing.assert_array_equal(frame["num_relevant"].first() > 0, answerable)
    np.testing.assert_allclose(
        frame["relevant"].sum()[answerable] / 12, expected[answerable], rtol=1e-12
    )


def test_a_data_set_is_searched_by_its_protocol(tmp_path):
    points, labels, _, dataset = made()
    roles = np.arange(50) % 4 == 0
    divided = ImageDataset("made", "test", dataset.images, labels, is_query=roles)
    results = RetrievalResults.of_dataset(points, divided, k=3)
    assert set(results.column("query")) == {dataset.names[row] for row in np.flatnonzero(roles)}
    assert not set(results.column("id")) & set(results.column("query"))
    rows = [dataset.names.index(name) for name in results.column("id")]
    assert results.column("class").tolist() == labels[rows].astype(str).tolist()
    assert (
        results.column("relevant").tolist()
        == (results.column("class") == results.column("query_class")).tolist()
    )
    frame = results.table.to_pandas()
    assert frame.groupby("query", sort=False).head(1)["rank"].eq(1).all()
    for suffix in ("parquet", "csv"):
        results.write(tmp_path / f"neighbors.{suffix}")
    assert read_table(tmp_path / "neighbors.parquet").equals(results.table)
    assert (
        (tmp_path / "neighbors.csv")
        .read_text()
        .startswith('"query","rank","id","distance","relevant","num_relev')
    )


def test_queries_without_neighbors_have_a_row(tmp_path):
    ids = np.array([["a", None], [None, None], ["b", "a"]], object)
    distances = np.array([[1, np.inf], [np.inf, np.inf], [0, 2]], np.float32)
    neighbors = Neighbors(ids, distances, {"class": ids})
    results = RetrievalResults.of_neighbors(["x", "y", "z"], neighbors, {"camera": [3, 4, 5]})
    results.write(tmp_path / "x.parquet")
    read = read_table(tmp_path / "x.parquet").to_pylist()
    assert [(row["query"], row["rank"], row["id"]) for row in read] == [
        ("x", 1, "a"), ("y", 1, None), ("z", 1, "b"), ("z", 2, "a"),
    ]  # fmt: skip
    assert [row["camera"] for row in read] == [3, 4, 5, 5]


def test_names_of_classes_are_compared_and_shown():
    """A gallery that numbers its classes in another way than the queries."""
    points = np.array([[0.0], [1.0], [2.0]])
    results = RetrievalResults.search(
        points, ["bus", "van", "cab"], points, ["bus", "cab", "van"], k=1
    )
    assert results.column("class").tolist() == ["bus", "cab", "van"]
    assert results.column("query_class").tolist() == ["bus", "van", "cab"]
    assert results.column("relevant").tolist() == [True, False, False]
    assert results.column("num_relevant").tolist() == [1, 1, 1]


def test_a_refused_neighbor_leaves_nothing(tmp_path):
    """Neither its id nor its class or distance; a query with none keeps one row."""
    ids = np.array([["a", "b"], ["c", "d"], ["e", None]], object)
    distances = np.array([[0.1, 0.9], [0.8, 0.9], [0.3, np.inf]], np.float32)
    classes = np.array([["bus", "van"], ["bus", "cab"], ["van", None]], object)
    numbers = np.array([[1, 2], [3, 4], [5, 0]])
    neighbors = Neighbors(ids, distances, {"class": classes})
    results = RetrievalResults.of_neighbors(
        ["x", "y", "z"],
        neighbors,
        {"number": numbers, "camera": ["l", "r", "l"]},
        classes=["bus", "bus", "cab"],
        class_counts={"bus": 2, "van": 2},
    ).within(0.5)
    results.write(tmp_path / "x.parquet")
    empty = {"id": None, "distance": None, "class": None, "number": None, "relevant": False}
    assert read_table(tmp_path / "x.parquet").to_pylist() == [
        {
            "query": "x",
            "rank": 1,
            "id": "a",
            "distance": np.float32(0.1),
            "class": "bus",
            "number": 1,
            "camera": "l",
            "relevant": True,
            "num_relevant": 2,
            "query_class": "bus",
        },
        {
            "query": "y",
            "rank": 1,
            **empty,
            "camera": "r",
            "num_relevant": 2,
            "query_class": "bus",
        },
        {
            "query": "z",
            "rank": 1,
            "id": "e",
            "distance": np.float32(0.3),
            "class": "van",
            "number": 5,
            "camera": "l",
            "relevant": False,
            "num_relevant": 0,
            "query_class": "cab",
        },
    ]
    results.write(tmp_path / "x.csv")
    lines = (tmp_path / "x.csv").read_text().splitlines()
    assert lines[2] == '"y",1,,,,,"r",false,2,"bus"'
