"""Indexes of PostgreSQL: built as the address says, and used."""

import psycopg
import pytest

from tfdml.retrieval import connect


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
