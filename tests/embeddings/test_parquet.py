"""Embeddings as Parquet: written, read back, read by others, and read from elsewhere."""

import json
import os
import signal
import subprocess

import numpy as np
import pytest

from tests.embeddings.test_stored import EMBEDDINGS, IDENTITY, content, table
from tfdml.embeddings import parquet
from tfdml.embeddings.reader import holds_embeddings, read_embeddings, read_names
from tfdml.embeddings.writer import EmbeddingWriter
from tfdml.errors import UserError
from tfdml.evaluation import evaluate_dataset
from tfdml.evaluation.search.exact import is_memory_mapped

pa = pytest.importorskip("pyarrow", reason="pip install 'tfdml[parquet]'")
pq = pytest.importorskip("pyarrow.parquet")


def write(folder, stop_after=None, dtype="float32", roles=None, file_bytes=150):
    with EmbeddingWriter(folder, IDENTITY, table(roles=roles)) as writer:
        for number, first in enumerate(range(writer.rows, 10, 4)):
            if number == stop_after:
                return
            writer.append(EMBEDDINGS[first : first + 4])
        writer.finish({"view": {"resize": 40}}, "parquet", dtype, file_bytes)


def test_read_back_as_written_in_files_of_bounded_size(tmp_path):
    roles = ["train"] * 3 + ["query", "gallery", "gallery", "query", "gallery", "gallery", "gallery"]
    write(tmp_path / "x", roles=roles)
    stored = read_embeddings(tmp_path / "x")
    np.testing.assert_array_equal(stored.embeddings, EMBEDDINGS)
    assert stored.embeddings.dtype == np.float32
    assert stored.labels.tolist() == (np.arange(10) // 2).tolist()
    assert stored.roles.tolist() == roles
    assert stored.split("test").is_query.tolist() == [role == "query" for role in roles[3:]]
    assert read_names(tmp_path / "x") == table().names
    assert holds_embeddings(tmp_path / "x")
    manifest = json.loads((tmp_path / "x" / "manifest.json").read_text())
    assert (manifest["complete"], manifest["count"], manifest["dimension"]) == (True, 10, 3)
    assert manifest["identity"] == IDENTITY
    assert set(manifest["files"]) == {path.name for path in (tmp_path / "x").iterdir()} - {"manifest.json"}
    # 44 bytes a row: three rows in 150.
    assert [about["rows"] for _, about in sorted(manifest["files"].items())] == [3, 3, 3, 1]
    for name, about in manifest["files"].items():
        listed = subprocess.run(["sha256sum", tmp_path / "x" / name], capture_output=True, text=True, check=True)
        assert listed.stdout.split()[0] == about["sha256"]


def test_other_tools_see_plain_columns(tmp_path):
    write(tmp_path / "x", roles=["test"] * 10)
    whole = pq.read_table(sorted((tmp_path / "x").glob("*.parquet")))
    assert whole.schema.field("embedding").type == pa.list_(pa.float32(), 3)
    assert whole.column_names == ["id", "path", "label", "class", "role", "embedding"]
    first = whole.slice(3, 1).to_pylist()[0]
    assert first["embedding"] == EMBEDDINGS[3].tolist()
    assert (first["id"], first["label"], first["class"], first["role"]) == (3, 1, "class 1", "test")
    # What the file itself says, without Arrow's own notes: a list of floats, for tools that know no fixed size.
    names = [pq.ParquetFile(tmp_path / "x" / "part-000000.parquet").schema.column(i).path for i in range(6)]
    assert names[5] == "embedding.list.element"


def test_int8_keeps_each_component_to_half_a_scale(tmp_path):
    write(tmp_path / "x", dtype="int8")
    whole = pq.read_table(sorted((tmp_path / "x").glob("*.parquet")))
    assert whole.schema.field("embedding").type == pa.list_(pa.int8(), 3)
    found = read_embeddings(tmp_path / "x").embeddings
    for row, (vector, scale) in enumerate(zip(EMBEDDINGS, whole["scale"].to_pylist(), strict=True)):
        assert scale == np.float32(max(abs(float(x)) for x in vector) / 127)
        for component in range(3):
            assert abs(float(found[row, component]) - float(vector[component])) <= 0.501 * scale
    codes, scale = parquet.quantised(np.zeros((2, 3), np.float32))
    assert not codes.any()
    assert not scale.any()
    tiny = np.float32([[1e-45, -1e-45]])
    assert np.isfinite(parquet.quantised(tiny)[0]).all()


def test_stopped_and_continued_is_bit_equal_to_unbroken(tmp_path):
    write(tmp_path / "whole")
    for stop in (1, 1):
        write(tmp_path / "broken", stop_after=stop)
        with pytest.raises(UserError, match="run the same bin/embed again"):
            read_embeddings(tmp_path / "broken")
    write(tmp_path / "broken")
    assert content(tmp_path / "broken") == content(tmp_path / "whole")


@pytest.mark.parametrize("moment", [1, 3, 5])
def test_killed_while_it_finishes(moment, tmp_path):
    """SIGKILL before the first file, the third, and the manifest."""
    write(tmp_path / "whole")
    pid = os.fork()
    if pid == 0:
        replace, files = os.replace, []

        def killing(source, target):
            files.append(target)
            finished = [path for path in files if str(path).endswith((".parquet", "manifest.json"))]
            if len(finished) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return replace(source, target)

        os.replace = killing
        write(tmp_path / "broken")
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    # What was written by then is not taken for all.
    with pytest.raises(UserError, match="no finished embeddings"):
        read_embeddings(tmp_path / "broken")
    write(tmp_path / "broken")
    assert content(tmp_path / "broken") == content(tmp_path / "whole")


def test_measures_as_the_arrays_do(tmp_path):
    roles = ["query", "gallery"] * 5
    write(tmp_path / "parquet", roles=roles)
    with EmbeddingWriter(tmp_path / "npy", IDENTITY, table(roles=roles)) as writer:
        writer.append(EMBEDDINGS)
        writer.finish()
    read = [read_embeddings(tmp_path / name) for name in ("parquet", "npy")]
    options = {"ks": [1, 2], "metrics": ["recall", "map@r", "r_precision"]}
    found = [evaluate_dataset(one.embeddings, one, **options) for one in read]
    assert found[0] == found[1]


def test_beyond_the_memory_they_are_mapped(tmp_path, monkeypatch):
    write(tmp_path / "x")
    monkeypatch.setattr(parquet, "free_memory", lambda: 100.0)
    stored = read_embeddings(tmp_path / "x")
    assert is_memory_mapped(stored.embeddings)
    np.testing.assert_array_equal(stored.embeddings, EMBEDDINGS)


def test_from_elsewhere_in_order_of_id(tmp_path):
    order = [3, 0, 9, 1, 2, 7, 8, 4, 6, 5]
    rows = {
        "id": order,
        "embedding": [EMBEDDINGS[i].astype(np.float64).tolist() for i in order],
        "label": [f"class {i // 2}" for i in order],
    }
    (tmp_path / "x").mkdir()
    pq.write_table(pa.table(rows).slice(0, 4), tmp_path / "x" / "a.parquet")
    pq.write_table(pa.table(rows).slice(4), tmp_path / "x" / "b.parquet")
    stored = read_embeddings(tmp_path / "x")
    np.testing.assert_array_equal(stored.embeddings, EMBEDDINGS)
    assert stored.labels.tolist() == [i // 2 for i in range(10)]
    assert stored.roles is None
    # Without numbers as ids the order is that of the file.
    pq.write_table(pa.table({**rows, "id": [str(i) for i in order]}), tmp_path / "y.parquet")
    np.testing.assert_array_equal(read_embeddings(tmp_path / "y.parquet").embeddings, EMBEDDINGS[order])


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"vector": [[1.0]]}, "no column embedding; it has vector"),
        ({"embedding": [1.0, 2.0]}, "must be a list of numbers"),
        ({"embedding": [["a"], ["b"]]}, "must be a list of numbers"),
        ({"embedding": [[1.0, 2.0], [3.0]]}, "as many numbers"),
        ({"embedding": [[1.0], [2.0, 3.0], [4.0, 5.0, 6.0]]}, "as many numbers"),
        ({"embedding": [[1.0, 2.0], None]}, "as many numbers"),
        ({"embedding": [[1.0, None], [1.0, 2.0]]}, "as many numbers"),
        ({"embedding": pa.array([[], []], pa.list_(pa.float32()))}, "of no dimension"),
        ({"embedding": pa.array([], pa.list_(pa.float32(), 2))}, "holds no row"),
        ({"embedding": [[1.0], [2.0]], "label": [1, None]}, "1 of 2 rows have no label"),
        ({"embedding": [[1.0], [2.0]], "label": [1.5, 2.0]}, "labels must be integers"),
        ({"embedding": [[1.0], [2.0]], "role": ["best", "test"]}, "unknown role 'best'"),
        ({"embedding": [[1.0], [2.0]], "id": [4, 4]}, "id 4 occurs twice"),
    ],
)
def test_parquet_that_holds_no_embeddings(columns, says, tmp_path):
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=says):
        read_embeddings(tmp_path / "x.parquet")


def test_files_that_are_damaged(tmp_path):
    for data in (b"", b"text", b"PAR1 cut short"):
        (tmp_path / "x.parquet").write_bytes(data)
        with pytest.raises(UserError, match="cannot be read as Parquet"):
            read_embeddings(tmp_path / "x.parquet")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        read_embeddings(tmp_path / "nowhere.parquet")


def test_what_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(UserError, match="not: rename the file"):
        parquet.require_utf8(["a.jpg", "\udcff.jpg"])
    with EmbeddingWriter(tmp_path / "x", IDENTITY, table()) as writer:
        writer.append(EMBEDDINGS)
        with pytest.raises(UserError, match="int8 with the format parquet"):
            writer.finish(form="npy", dtype="int8")
        with pytest.raises(UserError, match="int8 with the format parquet"):
            writer.finish(form="parquet", dtype="float16")


def test_without_pyarrow_one_line_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'tfdml\[parquet\]'"):
        parquet.arrow()
