import sys
import warnings

import pytest

from tfdml.errors import UserError
from tfdml.retrieval import SCHEMES, connect, is_gallery
from tfdml.retrieval.address import parse, shown

SECRET = "s3cr/et@#?x"
QUOTED = "s3cr%2Fet%40%23%3Fx"


def test_what_an_address_says():
    address = parse(f"pgvector://me:{QUOTED}@[::1]:5433/shop?table=cars&distance=cosine&index=hnsw&links=8")
    assert (address.host, address.port, address.path) == ("::1", 5433, "/shop")
    assert (address.user, address.password) == ("me", SECRET)
    assert (address.table, address.distance, address.index, address.options) == ("cars", "cosine", "hnsw", {"links": 8})
    assert str(address) == "pgvector://[::1]:5433/shop?table=cars"
    plain = parse("lancedb:///data/my%20cars")
    assert (plain.path, plain.table, plain.distance, plain.index) == ("/data/my cars", "gallery", None, "")
    assert parse("qdrant://:key@host").password == "key"


def test_no_text_made_of_an_address_holds_what_is_secret():
    for uri in (
        f"pgvector://me:{QUOTED}@host/shop",
        f"pgvector://me:{SECRET}@host/shop",
        f"pgvector://me:{QUOTED}@host:port/shop?index=x{SECRET}",
        f"pgvector://me:{QUOTED}@host/shop?key={SECRET}",
        f"pgvector://me:{QUOTED}@host/shop?index=ivf&lists={SECRET}",
        f"redis://me:{SECRET}@host/0",
        f"lancedb://me:{SECRET}@host",
    ):
        try:
            told = f"{parse(uri)!r} {parse(uri)}"
        except UserError as error:
            told = f"{error} {error.__cause__}"
        for part in ("s3cr", "et@", "et%40"):
            assert part not in told
    assert "me" not in shown(f"pgvector://me:{SECRET}@host/x")


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("redis://host/0", "unknown database; write one of lancedb:///folder, pgvector://user"),
        ("/data/cars", "`uri=the address`: unknown database"),
        ("lancedb://data/cars", "write lancedb:///folder"),
        ("lancedb:///", "write lancedb:///folder"),
        ("pgvector://host:99999/db", "cannot be read"),
        ("pgvector://host:x/db", "cannot be read"),
        ("lancedb:///a#b", "cannot be read: write lancedb:///folder, with %2F"),
        ("lancedb:///a?table=Cars", "a table's name is of a .. z"),
        ("lancedb:///a?table=a;drop", "a table's name is of a .. z"),
        ("lancedb:///a?distance=manhattan", "unknown distance 'manhattan'; one of euclidean"),
        ("lancedb:///a?index=scann", "unknown index 'scann'; lancedb has ivf, ivf_pq, hnsw; leave it out for exact"),
        ("pgvector://h/d?index=ivf_pq", "pgvector has ivf, hnsw"),
        ("lancedb:///a?lists=3", "unknown option 'lists'; here it may be table, distance, index"),
        ("lancedb:///a?index=ivf&lists=0", "lists must be a positive integer, not 0"),
        ("lancedb:///a?index=ivf&lists=2.5", "lists must be a positive integer, not '2.5'"),
        ("lancedb:///a?table=a&table=b", "the option table is there twice"),
        ("lancedb:///a?table", "cannot be read"),
        ("qdrant://h?tls=maybe", "tls must be true or false"),
        ("qdrant:///tmp/x?index=hnsw", "the local mode searches exactly"),
    ],
)
def test_wrong_addresses_are_one_clear_line(uri, says):
    with pytest.raises(UserError, match=says.replace("?", r"\?").replace("(", r"\(")) as caught:
        connect(uri)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "package", "module"),
    [
        ("lancedb:///a", "lancedb", "lancedb_gallery"),
        ("pgvector://h/d", "psycopg", "pgvector_gallery"),
        ("qdrant://h", "qdrant_client", "qdrant_gallery"),
    ],
)
def test_a_missing_client_is_told_with_its_extra(uri, package, module, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"tfdml.retrieval.{module}", raising=False)
    with pytest.raises(
        UserError, match=rf"needs the package {package}: pip install 'tfdml\[{uri.partition(':')[0]}\]'"
    ):
        connect(uri)


@pytest.mark.parametrize("scheme", ["pgvector", "qdrant"])
def test_a_server_that_is_not_there_is_one_line_without_the_password(scheme, caplog, capfd):
    with warnings.catch_warnings(record=True) as warned, pytest.raises(UserError) as caught:
        connect(f"{scheme}://me:{QUOTED}@127.0.0.1:1/shop")
    told = str(caught.value) + caplog.text + "".join(capfd.readouterr()) + "".join(str(one.message) for one in warned)
    assert "127.0.0.1:1/shop` cannot be opened: " in told
    assert "refused" in told
    assert "s3cr" not in told
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_files_of_something_else_are_refused(tmp_path):
    import lancedb
    import pyarrow

    lancedb.connect(tmp_path / "lance").create_table("gallery", pyarrow.table({"id": ["a"]}))
    with pytest.raises(UserError, match="is a table of something else: name another"):
        connect(f"lancedb://{tmp_path / 'lance'}")
    (tmp_path / "file").write_text("")
    for kind in ("lancedb", "qdrant"):
        with pytest.raises(UserError, match="cannot be written"), connect(f"{kind}://{tmp_path / 'file'}") as gallery:
            gallery.upsert(["a"], [[1.0]])


def test_what_is_a_gallery():
    assert all(is_gallery(f"{scheme}://x") for scheme in SCHEMES)
    assert not any(map(is_gallery, ("lancedb", "runs/lancedb", "grpc://x", "")))
