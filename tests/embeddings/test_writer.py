"""Embeddings on disk: what is read back is what was written, however often the writer was stopped."""

import json
import os
import pathlib
import signal
import subprocess

import numpy as np
import pytest

from tfdml.embeddings import parquet
from tfdml.embeddings.reader import ImageTable, read_embeddings, read_names
from tfdml.embeddings.writer import EmbeddingWriter
from tfdml.errors import UserError

IDENTITY = {"model": "sha256:aa", "data": "sha256:bb", "batch_size": 4}
EMBEDDINGS = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)


def table(count=10, roles=None):
    names = tuple(f'a folder/ä,"{i}".jpg' for i in range(count))
    return ImageTable(names, np.arange(count) // 2, roles or ["test"] * count, {i: f"class {i}" for i in range(5)})


def write(folder, identity=IDENTITY, stop_after=None, images=None, dtype="float32", rows_per_file=4):
    """Write in batches of four rows; stop as a killed process would, in the middle of a batch."""
    with EmbeddingWriter(folder, identity, images or table(), dtype, rows_per_file) as writer:
        begun = writer.rows
        for number, first in enumerate(range(writer.rows, 10, 4)):
            if number == stop_after:
                return begun
            writer.append(EMBEDDINGS[first : first + 4])
        if stop_after is None:
            writer.finish({"view": {"resize": 40}})
        return begun


def content(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("rows_per_file", "rows"), [(1, [4, 4, 2]), (4, [4, 4, 2]), (5, [8, 2]), (4096, [10])])
def test_read_back_as_written_in_files_of_whole_batches(rows_per_file, rows, tmp_path):
    roles = ["train"] * 3 + ["query", "gallery", "gallery", "query", "gallery", "gallery", "gallery"]
    write(tmp_path / "x", images=table(roles=roles), rows_per_file=rows_per_file)
    stored = read_embeddings(tmp_path / "x")
    np.testing.assert_array_equal(stored.embeddings, EMBEDDINGS)
    np.testing.assert_array_equal(stored.labels, np.arange(10) // 2)
    assert stored.embeddings.dtype == np.float32
    assert stored.roles.tolist() == roles
    assert read_names(tmp_path / "x") == table().names
    manifest = json.loads((tmp_path / "x" / "manifest.json").read_text())
    assert (manifest["complete"], manifest["count"], manifest["dimension"]) == (True, 10, 3)
    assert manifest["identity"] == {**IDENTITY, "dtype": "float32", "rows_per_file": rows_per_file}
    assert manifest["view"] == {"resize": 40}
    assert set(manifest["files"]) == {path.name for path in (tmp_path / "x").iterdir()} - {"manifest.json"}
    assert [about["rows"] for _, about in sorted(manifest["files"].items())] == rows
    for name, about in manifest["files"].items():
        listed = subprocess.run(["sha256sum", tmp_path / "x" / name], capture_output=True, text=True, check=True)
        assert listed.stdout.split()[0] == about["sha256"]


@pytest.mark.parametrize("rows_per_file", [4, 5])
@pytest.mark.parametrize("stops", [[0], [1], [2], [3], [1, 1, 0], [2, 0, 1]])
def test_stopped_and_resumed_is_bit_equal_to_uninterrupted(stops, rows_per_file, tmp_path):
    write(tmp_path / "whole", rows_per_file=rows_per_file)
    written = 0
    for stop in stops:
        assert write(tmp_path / "broken", stop_after=stop, rows_per_file=rows_per_file) == written
        assert not (tmp_path / "broken" / "manifest.json").exists()
        # The rows of a file that was not full are lost.
        full = 4 if rows_per_file == 4 else 8
        written += full * (min(4 * stop, 10 - written) // full)
        with EmbeddingWriter(tmp_path / "broken", IDENTITY, table(), rows_per_file=rows_per_file) as writer:
            assert writer.rows == written
        if stop:
            with pytest.raises(UserError, match="unfinished: run the same tfdml embed again"):
                read_embeddings(tmp_path / "broken")
    assert write(tmp_path / "broken", rows_per_file=rows_per_file) == written
    assert content(tmp_path / "broken") == content(tmp_path / "whole")


@pytest.mark.parametrize("moment", range(1, 17))
def test_killed_before_any_write_or_rename(moment, tmp_path):
    """SIGKILL before each fsync and each rename: two of the plan, four a file, two of the manifest."""
    write(tmp_path / "whole")
    pid = os.fork()
    if pid == 0:  # it dies without cleaning up
        calls = [0]

        def killing(function):
            def called(*arguments):
                calls[0] += 1
                if calls[0] == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments)

            return called

        os.fsync, os.replace = killing(os.fsync), killing(os.replace)
        write(tmp_path / "broken")
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    with pytest.raises(UserError, match="no finished embeddings"):
        read_embeddings(tmp_path / "broken")
    write(tmp_path / "broken")
    assert content(tmp_path / "broken") == content(tmp_path / "whole")


@pytest.mark.parametrize("data", [b"", b"cut short"])
def test_a_file_that_is_not_recorded_is_written_again(data, tmp_path):
    """A process killed between a file and its record leaves a file that nobody has counted."""
    write(tmp_path / "whole")
    write(tmp_path / "broken", stop_after=1)
    (tmp_path / "broken" / "part-000001.parquet").write_bytes(data)
    assert write(tmp_path / "broken") == 4
    assert content(tmp_path / "broken") == content(tmp_path / "whole")


def test_another_identity_is_refused_and_nothing_changes(tmp_path):
    write(tmp_path / "x", stop_after=2)
    before = content(tmp_path / "x")
    with pytest.raises(UserError, match="model was sha256:aa and is now sha256:cc") as refused:
        write(tmp_path / "x", {**IDENTITY, "model": "sha256:cc"})
    assert "batch_size" not in str(refused.value)
    for other, message in (({"rows_per_file": 8}, "rows_per_file was 4"), ({"dtype": "int8"}, "dtype was float32")):
        with pytest.raises(UserError, match=message):
            write(tmp_path / "x", **other)
    assert content(tmp_path / "x") == before
    write(tmp_path / "x")
    with pytest.raises(UserError, match="data was"):
        write(tmp_path / "x", {**IDENTITY, "data": "other"})


def test_a_finished_folder_stays_as_it_is(tmp_path):
    write(tmp_path / "x", stop_after=3)
    progress = (tmp_path / "x" / "progress.json").read_bytes()
    write(tmp_path / "x")
    before = content(tmp_path / "x")
    # As a process leaves it that is killed after the manifest.
    (tmp_path / "x" / "progress.json").write_bytes(progress)
    with EmbeddingWriter(tmp_path / "x", IDENTITY, table(), rows_per_file=4) as writer:
        assert writer.rows == 10
        assert writer.finish() == writer.manifest
        assert writer.manifest["complete"]
    assert content(tmp_path / "x") == before
    assert len(read_embeddings(tmp_path / "x")) == 10


def test_a_second_writer_is_refused(tmp_path):
    with EmbeddingWriter(tmp_path / "x", IDENTITY, table(), rows_per_file=4) as writer:
        writer.append(EMBEDDINGS[:4])
        with pytest.raises(UserError, match="another process is writing"):
            write(tmp_path / "x")
        writer.append(EMBEDDINGS[4:8])
    assert write(tmp_path / "x") == 8


def test_foreign_folders_are_refused(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        write(tmp_path / "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        write(tmp_path / "file")
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds a manifest\.json of something else"):
        write(tmp_path / "y")


def test_damage_is_found_on_resuming(tmp_path):
    write(tmp_path / "x", stop_after=2)
    path = tmp_path / "x" / "part-000000.parquet"
    data = bytearray(path.read_bytes())
    data[150] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"part-000000\.parquet is damaged.*delete .*x to start again"):
        write(tmp_path / "x")
    path.unlink()
    with pytest.raises(UserError, match=r"part-000000\.parquet, which .*/part-000000\.json lists, cannot be read"):
        write(tmp_path / "x")
    (tmp_path / "x" / "progress.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        write(tmp_path / "x")


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    write(tmp_path / "whole")
    write_file = parquet.write_file

    def filling(path, written):
        if "part-000001" in str(path):
            pathlib.Path(path).write_bytes(b"cut short")
            raise OSError(28, "No space left on device")
        write_file(path, written)

    with monkeypatch.context() as patch:
        patch.setattr(parquet, "write_file", filling)
        with pytest.raises(UserError, match=r"the disk is full.*free some space and run the same command again"):
            write(tmp_path / "x")
    assert set(content(tmp_path / "x")) == {"part-000000.parquet", "part-000000.json", "progress.json"}
    assert write(tmp_path / "x") == 4
    assert content(tmp_path / "x") == content(tmp_path / "whole")


def test_values_that_are_no_embeddings_are_refused(tmp_path):
    with EmbeddingWriter(tmp_path / "x", IDENTITY, table()) as writer:
        writer.append(EMBEDDINGS[:4])
        for wrong in (EMBEDDINGS[:4, :2], EMBEDDINGS[0], EMBEDDINGS[:0]):
            with pytest.raises(UserError, match=r"must be \(images, 3\)"):
                writer.append(wrong)
        broken = EMBEDDINGS[4:8].copy()
        broken[1, 2] = np.nan
        with pytest.raises(UserError, match=r'"5".jpg holds NaN'):
            writer.append(broken)
        with pytest.raises(UserError, match="4 embeddings of 10"):
            writer.finish()
        with pytest.raises(UserError, match="more embeddings than the 10"):
            writer.append(EMBEDDINGS)
        assert writer.rows == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"images": ImageTable(("a\udcff.jpg",), [0], ["test"])}, "not: rename the file"),
        ({"images": ImageTable(("a.jpg",), [0], ["test"], {0: "\udcff"})}, "not: rename the file"),
        (
            {"images": table(), "dtype": "float16"},
            "unknown `dtype` 'float16'; did you mean 'float32'?",
        ),
        ({"images": table(), "rows_per_file": 0}, "`rows_per_file` must be at least 1, not 0"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_first_batch(arguments, message, tmp_path):
    with pytest.raises(UserError, match=message):
        EmbeddingWriter(tmp_path / "x", IDENTITY, **arguments)


@pytest.mark.parametrize(
    "values",
    [
        {"identity": None},
        {"dimension": 0},
        {"dimension": "3"},
        {"rows": "1"},
        {"rows": -1},
        {"rows": 2**70},
        {"files": {}},
        {"files": {"part-000000.parquet": {"bytes": 4}}},
        {"files": {"part-000001.parquet": {"sha256": "", "bytes": 4}}},
        {"files": {"part-000000.parquet": []}},
    ],
)
def test_a_malformed_progress_file_is_refused(values, tmp_path):
    write(tmp_path / "x", stop_after=1)
    name = "progress/part-000000.json" if {"rows", "dimension", "files"} & set(values) else "progress.json"
    path = tmp_path / "x" / name
    found = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in found.items() if value != "gone"}))
    with pytest.raises(UserError, match=r"progress.*(delete|damaged|cannot be read)") as refused:
        write(tmp_path / "x")
    assert "\n" not in str(refused.value)
