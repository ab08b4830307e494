"""Embeddings as Parquet: written, read back, read by others, and read from elsewhere."""

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.embeddings.test_writer import EMBEDDINGS, table, write
from tfdml.data import ImageDataset
from tfdml.embeddings import parquet
from tfdml.embeddings.reader import ImageTable, read_embeddings
from tfdml.embeddings.writer import EmbeddingWriter
from tfdml.errors import UserError
from tfdml.evaluation import evaluate_dataset
from tfdml.retrieval.exact import is_memory_mapped


def test_other_tools_see_plain_columns(tmp_path):
    write(tmp_path / "x")
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
    codes, scale = parquet.quantized(np.zeros((2, 3), np.float32))
    assert not codes.any()
    assert not scale.any()
    tiny = np.float32([[1e-45, -1e-45]])
    assert np.isfinite(parquet.quantized(tiny)[0]).all()


def test_measures_as_the_arrays_do(tmp_path):
    roles = ["query", "gallery"] * 5
    write(tmp_path / "x", images=table(roles=roles))
    np.savez(tmp_path / "x.npz", embeddings=EMBEDDINGS, labels=np.arange(10) // 2, roles=roles)
    read = [read_embeddings(tmp_path / name) for name in ("x", "x.npz")]
    options = {"ks": [1, 2], "metrics": ["recall", "map@r", "r_precision"]}
    found = [evaluate_dataset(one.embeddings, one, **options) for one in read]
    assert found[0] == found[1]


def test_groups_are_kept_and_ignored(tmp_path):
    """Of the split that has them; as integers or text; an image without one shares none."""
    labels, cameras = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 2]), np.array([5, 5, 7, 5, 7, 7, 9, -1, -1, 5])
    data = ImageDataset(images=np.zeros((10, 4, 4, 3), np.uint8), labels=labels, groups=cameras)
    train = ImageDataset("images", "train", np.zeros((2, 4, 4, 3), np.uint8), [8, 8])
    options = {"ks": [1, 2], "metrics": ["recall", "map@r", "map"]}
    expected = evaluate_dataset(EMBEDDINGS, data, **options)
    assert expected != evaluate_dataset(EMBEDDINGS, dataclasses.replace(data, groups=None), **options)
    with EmbeddingWriter(tmp_path / "x", {}, ImageTable.of([train, data]), rows_per_file=4) as writer:
        for rows in (EMBEDDINGS[:2], EMBEDDINGS[:3], EMBEDDINGS[3:]):
            writer.append(rows)
        writer.finish()
    whole = pq.read_table(sorted((tmp_path / "x").glob("*.parquet")))
    assert whole["group"].to_pylist() == [None, None, *cameras.tolist()]
    stored = read_embeddings(tmp_path / "x")
    assert stored.split("train").groups is None
    test = stored.split("test")
    assert evaluate_dataset(test.embeddings, test, **options) == expected
    text = {"embedding": list(EMBEDDINGS), "label": labels, "group": [f"camera {i}" for i in cameras]}
    plain = pa.array(text["group"])
    for column in (plain, plain.dictionary_encode(), plain.cast(pa.large_string())):
        pq.write_table(pa.table({**text, "group": column}), tmp_path / "text.parquet")
        named = read_embeddings(tmp_path / "text.parquet")
        assert evaluate_dataset(named.embeddings, named, **options) == expected
    pq.write_table(pa.table({**text, "group": [None, 1, 1, 1, 1, 2, 2, 2, 2, None]}), tmp_path / "some.parquet")
    assert read_embeddings(tmp_path / "some.parquet").groups.tolist() == [-1, 0, 0, 0, 0, 1, 1, 1, 1, -10]
    assert ImageTable.of([data]).checksum() != ImageTable.of([dataclasses.replace(data, groups=labels)]).checksum()
    with pytest.raises(UserError, match="2 images and 1 groups"):
        ImageTable(("a", "b"), [0, 0], ["test"] * 2, groups=[1])


def test_beyond_the_memory_they_are_mapped(tmp_path, monkeypatch):
    write(tmp_path / "x")
    monkeypatch.setattr(parquet, "free_memory", lambda: 100.0)
    stored = read_embeddings(tmp_path / "x")
    assert is_memory_mapped(stored.embeddings)
    np.testing.assert_array_equal(stored.embeddings, EMBEDDINGS)


def test_from_elsewhere_in_order_of_the_files(tmp_path):
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
    np.testing.assert_array_equal(stored.embeddings, EMBEDDINGS[order])
    assert stored.labels.tolist() == [i // 2 for i in order]
    assert stored.roles is None


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
        ({"embedding": [[1.0], [2.0]], "group": [0.5, 1.0]}, "group must be integers or text, not double"),
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


def test_classes_of_a_folder_go_by_name(tmp_path, caplog):
    """Two files that number their classes each from 0; and one that has names alone."""
    for number, names in enumerate((["bus", "coupe", "bus"], ["pizza", "bus", "pizza"])):
        columns = {"id": range(3), "path": [f"{number}/{row}" for row in range(3)], "label": [0, 1, 0], "class": names}
        parquet.write_file(tmp_path / f"{number}.parquet", parquet.table_of(columns, np.eye(3, dtype=np.float32)))
    stored = read_embeddings(tmp_path)
    assert stored.classes.tolist() == ["bus", "coupe", "bus", "pizza", "bus", "pizza"]
    assert stored.labels.tolist() == [0, 1, 0, 2, 0, 2]
    assert "the columns label and class disagree; classes go by name, and are 3" in caplog.text
    one = read_embeddings(tmp_path / "1.parquet")
    assert (one.labels.tolist(), one.class_names) == ([0, 1, 0], {0: "pizza", 1: "bus"})
    pq.write_table(pa.table({"embedding": [[1.0], [2.0]], "class": ["x", "a"]}), tmp_path / "names.parquet")
    assert read_embeddings(tmp_path / "names.parquet").classes.tolist() == ["x", "a"]
