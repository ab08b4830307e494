"""Indexes of LanceDB: built as the address says, and used."""

import numpy as np
import pytest

from tfdml.errors import UserError
from tfdml.retrieval import connect


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("ivf_pq", "ivf_pq needs 256 rows at least, and there are 2"),
        ("ivf&lists=3", "lists=3 needs as many rows at least, and there are 2"),
        ("hnsw&lists=3", "lists=3 needs as many rows at least, and there are 2"),
    ],
)
def test_too_few_rows_for_the_index_are_refused(index, says, databases):
    with databases.gallery("lancedb", index=index) as gallery:
        gallery.upsert(["a", "b"], np.eye(2, 4))
        with pytest.raises(UserError, match=says):
            gallery.optimize()


def plans_of_lancedb(monkeypatch):
    """The plans of the searches from now on, with what each step of them did."""
    from lancedb.query import LanceVectorQueryBuilder

    plans, run = [], LanceVectorQueryBuilder.to_arrow

    def to_arrow(query):
        plans.append((query.analyze_plan(), query.to_query_object()))
        return run(query)

    monkeypatch.setattr(LanceVectorQueryBuilder, "to_arrow", to_arrow)
    return plans


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
@pytest.mark.parametrize(
    ("index", "kind", "details"),
    [
        ("ivf&lists=5&effort=3", "IvfFlat", {}),
        ("ivf_pq&lists=1&bytes=3&effort=1&refine=4", "IvfPq", {"compression": {"num_sub_vectors": 3}}),
        ("hnsw&lists=1&links=6&effort=21", "IvfHnswFlat", {"hnsw": {"max_connections": 6}}),
    ],
)
def test_lancedb_searches_by_the_index_of_the_address(index, kind, details, distance, databases, few, monkeypatch):
    import lancedb

    uri = databases.address("lancedb", distance=distance, index=index)
    with connect(uri) as gallery:
        gallery.upsert(list(map(str, range(300))), few)
        gallery.optimize()
        plans = plans_of_lancedb(monkeypatch)
        gallery.search(few[:1], k=3)
        (built,) = lancedb.connect(gallery.address.path).open_table("gallery").list_indices()
    assert built.index_type == kind
    assert built.index_details["metric_type"] == ("L2" if distance == "euclidean" else "DOT")
    for name, values in details.items():
        assert values.items() <= built.index_details[name].items()
    (plan, asked), options = plans.pop(), dict(part.split("=") for part in index.split("&")[1:])
    assert "ANNSubIndex" in plan
    assert f"partitions_ranked={options['lists']}," in plan
    if kind == "IvfHnswFlat":
        assert asked.ef == 21
    else:
        assert f"minimum_nprobes={options['effort']}, maximum_nprobes=Some({options['effort']})" in plan
    assert asked.refine_factor == (4 if kind == "IvfPq" else None)
    with connect(uri.partition("&index")[0]) as exact:
        exact.search(few[:1], k=3)
    assert "KNNVectorDistance" in plans[0][0]
    assert "ANN" not in plans[0][0]
