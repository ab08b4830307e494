"""Approximate indexes of the databases: they are used, miss as much as they are told to, and make nothing up."""

import numpy as np
import psycopg
import pytest
from qdrant_client import QdrantClient

from tfdml.errors import UserError
from tfdml.retrieval import connect, nearest_neighbours, qdrant_gallery

ROWS, NEAREST = 1500, 10


@pytest.fixture(scope="module")
def points():
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(150, 16))
    vectors = (np.repeat(centres, 10, axis=0) + 0.4 * rng.normal(size=(ROWS, 16))).astype(np.float32)
    queries = vectors[::30] + 0.2 * rng.normal(size=(50, 16)).astype(np.float32)
    rows, distances = nearest_neighbours(queries, vectors, k=NEAREST)
    return vectors, queries, rows.astype(str), distances


def recall(found, wanted):
    return np.mean([len(set(a) & set(b)) / NEAREST for a, b in zip(found.ids.tolist(), wanted.tolist(), strict=True)])


@pytest.mark.one_quick_case
@pytest.mark.parametrize(
    ("kind", "index", "few", "many"),
    [
        ("lancedb", "ivf&lists=24", "effort=1", "effort=24"),
        ("pgvector", "ivf&lists=24", "effort=1", "effort=24"),
        ("lancedb", "ivf_pq&lists=8&bytes=4", "effort=1&refine=1", "effort=8&refine=20"),
        ("pgvector", "hnsw&links=4", "effort=1", "effort=200"),
        ("lancedb", "hnsw&lists=1&links=8", "effort=15", "effort=200"),
    ],
)
def test_an_index_is_used_and_effort_finds_more(kind, index, few, many, databases, points):
    vectors, queries, wanted, distances = points
    uri = databases.address(kind)
    ids = list(map(str, range(ROWS)))
    with connect(uri) as gallery:
        gallery.upsert(ids, vectors, {"label": np.arange(ROWS) // 10})
        assert recall(gallery.search(queries, NEAREST), wanted) == 1
    found = {}
    for effort in (few, many):
        with connect(f"{uri}{'&' if '?' in uri else '?'}index={index}&{effort}") as gallery:
            assert gallery.approximate
            if effort == few:
                gallery.optimize()
            found[effort] = gallery.search(queries, NEAREST)
            filtered = gallery.search(queries, NEAREST, {"label": 3}).ids
            assert {name for name in filtered.ravel() if name is not None} <= set(map(str, range(30, 40)))
            gallery.upsert(["new"], queries[:1], {"label": [0]})
            assert gallery.search(queries[:1], 1).ids.tolist() == [["new"]]
            assert gallery.delete(["new"]) == 1
    least = 1 if "ivf&" in index else 0.95
    assert recall(found[many], wanted) >= least
    assert recall(found[few], wanted) <= recall(found[many], wanted)
    # A graph of so few rows may miss none.
    assert recall(found[few], wanted) < 1 or "hnsw" in index
    # What is found has its own distance, also where the index has rounded it.
    for one in found.values():
        there = one.ids != None  # noqa: E711  (element by element)
        query, _ = np.nonzero(there)
        true = np.linalg.norm(vectors[one.ids[there].astype(int)] - queries[query], axis=1)
        np.testing.assert_allclose(one.distances[there], true, rtol=1e-5)
    # Without an index in the address the search is exact, whatever has been built.
    with connect(uri) as gallery:
        exact = gallery.search(queries, NEAREST)
        np.testing.assert_array_equal(exact.ids, wanted)
        np.testing.assert_allclose(exact.distances, distances, rtol=1e-5)


def test_too_few_rows_for_the_codes_are_told(databases):
    with databases.gallery("lancedb", index="ivf_pq") as gallery:
        gallery.upsert(["a"], np.ones((1, 4)))
        with pytest.raises(UserError, match="ivf_pq needs 256 rows at least, and there are 1"):
            gallery.optimize()


@pytest.fixture(scope="module")
def few():
    return np.random.default_rng(3).normal(size=(300, 6)).astype(np.float32)


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


def plans_of_postgres(monkeypatch, setting):
    """The plans of the searches from now on, and the value of a setting at each."""
    plans, run = [], psycopg.Cursor.execute

    def execute(cursor, query, parameters=None, **options):
        text = query if isinstance(query, str) else query.as_string(cursor)
        if " ORDER BY vector " in text:
            other = cursor.connection.cursor()
            steps = run(other, "EXPLAIN " + text, parameters).fetchall()
            value = run(other, f"SHOW {setting}").fetchone()[0]
            plans.append(("\n".join(step for (step,) in steps), value))
        return run(cursor, query, parameters, **options)

    monkeypatch.setattr(psycopg.Cursor, "execute", execute)
    return plans


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
@pytest.mark.parametrize(
    ("index", "method", "options", "setting"),
    [
        ("ivf&lists=7&effort=2", "ivfflat", ["lists=7"], ("ivfflat.probes", "2")),
        ("hnsw&links=5&effort=61", "hnsw", ["m=5"], ("hnsw.ef_search", "61")),
    ],
)
def test_postgres_searches_by_the_index_of_the_address(
    index, method, options, setting, distance, databases, few, monkeypatch
):
    uri = databases.address("pgvector", distance=distance, index=index)
    with connect(uri) as gallery:
        gallery.upsert(list(map(str, range(300))), few)
        gallery.optimize()
        plans = plans_of_postgres(monkeypatch, setting[0])
        gallery.search(few[:1], k=3)
        table = gallery.address.table
    with psycopg.connect(host=databases.socket, user="postgres") as connection:
        built = connection.execute(
            "SELECT am.amname, i.reloptions FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid "
            "JOIN pg_am am ON am.oid = i.relam WHERE x.indrelid = %s::regclass AND NOT x.indisprimary",
            (table,),
        ).fetchall()
    assert built == [(method, options)]
    plan, value = plans.pop()
    assert f"Index Scan using {table}_tfdml on {table}" in plan
    assert value == setting[1]
    with connect(uri.partition("&index")[0]) as exact:
        exact.search(few[:1], k=3)
    assert f"Seq Scan on {table}" in plans[0][0]
    assert "Index Scan" not in plans[0][0]


@pytest.mark.filterwarnings("ignore:Local mode performs exact")
def test_a_qdrant_server_gets_the_graph_and_the_effort_of_the_address(monkeypatch, few):
    """Of a client that answers from memory, as its server would."""
    asked = {}

    class Recorded(QdrantClient):
        def __init__(self, host, **_):
            super().__init__(":memory:")

        def create_collection(self, name, hnsw_config, **options):
            asked["built"] = hnsw_config.m
            return super().create_collection(name, hnsw_config=hnsw_config, **options)

        def update_collection(self, name, hnsw_config, **options):
            asked["rebuilt"] = hnsw_config.m
            return super().update_collection(name, hnsw_config=hnsw_config, **options)

        def get_collection(self, name, **options):
            answer = super().get_collection(name, **options)
            answer.config.hnsw_config.m = asked.get("rebuilt", asked["built"])
            return answer

        def query_batch_points(self, name, requests, **options):
            asked["search"] = {(request.params.exact, request.params.hnsw_ef) for request in requests}
            return super().query_batch_points(name, requests, **options)

    monkeypatch.setattr(qdrant_gallery, "QdrantClient", Recorded)
    with connect("qdrant://host?index=hnsw&links=7&effort=33") as gallery:
        gallery.upsert(list(map(str, range(300))), few)
        gallery.search(few[:2], k=3)
        assert asked == {"built": 7, "search": {(False, 33)}}
        gallery.address.options["links"] = 9
        gallery.optimize()
        gallery.search(few[:2], k=3)
        assert asked["rebuilt"] == 9


@pytest.mark.parametrize("kind", ["lancedb", "pgvector"])
def test_an_index_that_the_table_does_not_have_is_refused(kind, databases, few):
    uri = databases.address(kind, distance="euclidean")
    with connect(f"{uri}&index=hnsw&links=6") as gallery:
        gallery.upsert(list(map(str, range(300))), few)
        with pytest.raises(UserError, match=r"has no index hnsw&links=6 \(it has none\): build it with bin/index"):
            gallery.search(few[:1])
        gallery.optimize()
        gallery.search(few[:1])
    for other, says in [("ivf", "no index ivf"), ("hnsw&links=8", r"no index hnsw&links=8 \(it has hnsw&links=6\)")]:
        with connect(f"{uri}&index={other}") as gallery, pytest.raises(UserError, match=says):
            gallery.search(few[:1])
