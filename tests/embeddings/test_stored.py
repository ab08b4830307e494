"""Embeddings on disk: what is read back is what was written, however often the writer was stopped."""

import json
import os
import signal
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdml.embeddings.image_table import ImageTable
from tfdml.embeddings.reader import holds_embeddings, read_embeddings, read_names
from tfdml.embeddings.writer import EmbeddingWriter
from tfdml.errors import UserError
from tfdml.evaluation.search.exact import is_memory_mapped

IDENTITY = {"model": "sha256:aa", "data": "sha256:bb", "batch_size": 4}
EMBEDDINGS = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)


def table(count=10, roles=None):
    names = tuple(f'a folder/ä,"{i}".jpg' for i in range(count))
    return ImageTable(names, np.arange(count) // 2, roles or ["test"] * count, {i: f"class {i}" for i in range(5)})


def write(folder, identity=IDENTITY, stop_after=None, form="npy", images=None):
    """Write in batches of four rows; stop as a killed process would, in the middle of a batch."""
    with EmbeddingWriter(folder, identity, images or table()) as writer:
        begun = writer.rows
        for number, first in enumerate(range(writer.rows, 10, 4)):
            if number == stop_after:
                return begun
            writer.append(EMBEDDINGS[first : first + 4])
        if stop_after is None:
            writer.finish({"view": {"resize": 40}}, form)
        return begun


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("form", ["npy", "npz"])
def test_read_back_as_written(form, tmp_path):
    write(tmp_path / "x", form=form)
    stored = read_embeddings(tmp_path / "x")
    np.testing.assert_array_equal(stored.embeddings, EMBEDDINGS)
    np.testing.assert_array_equal(stored.labels, np.arange(10) // 2)
    assert stored.embeddings.dtype == np.float32
    assert is_memory_mapped(stored.embeddings) == (form == "npy")
    assert stored.is_query is None
    assert read_names(tmp_path / "x") == table().names
    manifest = json.loads((tmp_path / "x" / "manifest.json").read_text())
    assert (manifest["complete"], manifest["count"], manifest["dimension"]) == (True, 10, 3)
    assert manifest["identity"] == IDENTITY
    assert manifest["view"] == {"resize": 40}
    assert set(manifest["files"]) == {path.name for path in (tmp_path / "x").iterdir()} - {"manifest.json"}
    for name, about in manifest["files"].items():
        listed = subprocess.run(["sha256sum", tmp_path / "x" / name], capture_output=True, text=True, check=True)
        assert listed.stdout.split()[0] == about["sha256"]


@pytest.mark.parametrize("form", ["npy", "npz"])
@pytest.mark.parametrize("stops", [[0], [1], [2], [3], [1, 1, 0], [2, 0, 1]])
def test_stopped_and_continued_is_bit_equal_to_unbroken(stops, form, tmp_path):
    write(tmp_path / "whole", form=form)
    for stop in stops:
        write(tmp_path / "broken", stop_after=stop, form=form)
        assert not (tmp_path / "broken" / "manifest.json").exists()
    begun = write(tmp_path / "broken", form=form)
    assert begun == min(4 * sum(stops), 10)
    assert content(tmp_path / "broken") == content(tmp_path / "whole")


@pytest.mark.parametrize("moment", range(1, 19))
def test_killed_before_any_write_or_rename(moment, tmp_path):
    """SIGKILL before each fsync and each rename: three batches have nine, the ending nine more."""
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


@pytest.mark.parametrize("rows", [1, 4, 50])
def test_rows_written_but_not_noted_are_cut_off(rows, tmp_path):
    """A process killed between the data and the progress file leaves rows that nobody has counted."""
    write(tmp_path / "whole")
    write(tmp_path / "broken", stop_after=1)
    partial = tmp_path / "broken" / "embeddings.npy.partial"
    noted = partial.stat().st_size
    with open(partial, "ab") as file:
        file.write(np.full(rows * 3, 7, "<f4").tobytes())
    with EmbeddingWriter(tmp_path / "broken", IDENTITY, table()) as writer:
        assert writer.rows == 4
        assert partial.stat().st_size == noted
    assert write(tmp_path / "broken") == 4
    assert content(tmp_path / "broken") == content(tmp_path / "whole")


def test_another_identity_is_refused_and_nothing_changes(tmp_path):
    write(tmp_path / "x", stop_after=2)
    before = content(tmp_path / "x")
    with pytest.raises(UserError, match="model was sha256:aa and is now sha256:cc") as refused:
        write(tmp_path / "x", {**IDENTITY, "model": "sha256:cc"})
    assert "batch_size" not in str(refused.value)
    assert content(tmp_path / "x") == before
    write(tmp_path / "x")
    with pytest.raises(UserError, match="data was"):
        write(tmp_path / "x", {**IDENTITY, "data": "other"})


def test_a_finished_folder_stays_as_it_is(tmp_path):
    write(tmp_path / "x")
    before = content(tmp_path / "x")
    with EmbeddingWriter(tmp_path / "x", IDENTITY, table()) as writer:
        assert writer.rows == 10
        assert writer.manifest["complete"]
    assert content(tmp_path / "x") == before


def test_a_second_writer_is_refused(tmp_path):
    with EmbeddingWriter(tmp_path / "x", IDENTITY, table()) as writer:
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
    with pytest.raises(UserError, match="not of a folder of embeddings"):
        write(tmp_path / "y")


def test_damage_is_found_on_going_on(tmp_path):
    write(tmp_path / "x", stop_after=2)
    path = tmp_path / "x" / "embeddings.npy.partial"
    data = bytearray(path.read_bytes())
    data[150] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="damaged"):
        write(tmp_path / "x")
    path.unlink()
    with pytest.raises(UserError, match="missing"):
        write(tmp_path / "x")
    (tmp_path / "x" / "progress.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        write(tmp_path / "x")


def test_a_full_disk_loses_nothing(tmp_path):
    """The file may grow to 200 bytes in the child: its header and six of the ten rows."""
    write(tmp_path / "whole")
    read, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
        writer = EmbeddingWriter(tmp_path / "x", IDENTITY, table())
        # The progress file is larger than that: it stands for another disk here.
        writer._note = lambda rows: None
        try:
            with writer:
                for first in (0, 4, 8):
                    writer.append(EMBEDDINGS[first : first + 4])
        except UserError as error:
            os.write(told, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    message = os.read(read, 1000).decode()
    assert "the disk is full" in message
    assert "after 4 of 10" in message
    assert "the rest needs about" in message
    write(tmp_path / "x")
    assert content(tmp_path / "x") == content(tmp_path / "whole")


def test_too_little_space_is_told_before_anything_is_written(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"need about \d+ bytes, and 100 bytes are free"):
        write(tmp_path / "x")
    assert content(tmp_path / "x") == {}


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


def test_splits_stay_mapped_where_they_lie_together(tmp_path):
    roles = ["train"] * 3 + ["query", "gallery", "gallery", "query", "gallery", "gallery", "gallery"]
    write(tmp_path / "x", images=table(roles=roles))
    stored = read_embeddings(tmp_path / "x")
    test = stored.split("test")
    np.testing.assert_array_equal(test.embeddings, EMBEDDINGS[3:])
    assert is_memory_mapped(test.embeddings)
    np.testing.assert_array_equal(test.is_query, [True, False, False, True, False, False, False])
    np.testing.assert_array_equal(test.labels, np.arange(3, 10) // 2)
    train = stored.split("train")
    assert len(train) == 3
    assert train.is_query is None
    write(tmp_path / "y")
    with pytest.raises(UserError, match="no train images, only test"):
        read_embeddings(tmp_path / "y").split("train")


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_splits_in_any_order_have_their_rows(data):
    from tfdml.embeddings.reader import StoredEmbeddings

    roles = data.draw(st.lists(st.sampled_from(["train", "query", "gallery"]), min_size=1, max_size=12))
    stored = StoredEmbeddings(
        "x", np.arange(float(len(roles)))[:, None], np.arange(len(roles)), np.array(roles), tuple(map(str, roles))
    )
    for name in ("train", "test"):
        rows = [i for i, role in enumerate(roles) if (role == "train") == (name == "train")]
        if rows:
            part = stored.split(name)
            assert part.embeddings.ravel().tolist() == rows
            assert part.labels.tolist() == rows
            assert part.names == tuple(roles[i] for i in rows)


def test_archives_from_elsewhere(tmp_path):
    np.savez(tmp_path / "x.npz", embeddings=EMBEDDINGS.astype(np.float64), labels=list("aabbccddee"))
    stored = read_embeddings(tmp_path / "x.npz")
    assert stored.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert stored.split("test") is stored
    query = np.arange(10) < 4
    np.savez(tmp_path / "y.npz", embeddings=EMBEDDINGS, labels=np.arange(10), is_query=query)
    np.testing.assert_array_equal(read_embeddings(tmp_path / "y.npz").is_query, query)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"labels": np.arange(3)}, "no array embeddings; it holds labels"),
        ({}, "no array embeddings; it is empty"),
        ({"embeddings": EMBEDDINGS, "labels": np.arange(9)}, r"10 embeddings but labels of shape \(9,\)"),
        ({"embeddings": EMBEDDINGS, "labels": np.ones(10)}, "labels must be integers"),
        ({"embeddings": EMBEDDINGS[0], "labels": np.arange(3)}, r"shape \(3,\)"),
        ({"embeddings": EMBEDDINGS[:0], "labels": np.arange(0)}, "neither of them 0"),
        ({"embeddings": EMBEDDINGS, "labels": np.arange(10), "is_query": np.arange(10)}, "is_query must be bool"),
        ({"embeddings": EMBEDDINGS, "labels": np.arange(10), "roles": ["best"] * 10}, "unknown role 'best'"),
        ({"embeddings": np.array([{}] * 3, object)}, "cannot be read"),
    ],
)
def test_archives_that_are_not_embeddings(arrays, says, tmp_path):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(UserError, match=says):
        read_embeddings(tmp_path / "x.npz")


def test_files_that_are_no_archives(tmp_path):
    for data in (b"", b"text", b"PK\x03\x04 cut short"):
        (tmp_path / "x.npz").write_bytes(data)
        with pytest.raises(UserError, match=r"cannot be read as \.npz"):
            read_embeddings(tmp_path / "x.npz")
    with pytest.raises(UserError, match="no file"):
        read_embeddings(tmp_path / "nowhere.npz")
    np.save(tmp_path / "x.npy", EMBEDDINGS)
    with pytest.raises(UserError, match="no labels"):
        read_embeddings(tmp_path / "x.npy")


def test_folders_that_are_not_what_their_manifest_says(tmp_path):
    write(tmp_path / "x")
    np.save(tmp_path / "x" / "labels.npy", np.arange(3))
    with pytest.raises(UserError, match="labels of shape"):
        read_embeddings(tmp_path / "x")
    (tmp_path / "x" / "labels.npy").unlink()
    with pytest.raises(UserError, match=r"labels.npy cannot be read: No such file"):
        read_embeddings(tmp_path / "x")
    write(tmp_path / "y", stop_after=1)
    with pytest.raises(UserError, match="unfinished: run the same bin/embed again"):
        read_embeddings(tmp_path / "y")


def test_what_holds_embeddings(tmp_path):
    write(tmp_path / "x")
    write(tmp_path / "y", stop_after=1)
    assert holds_embeddings(tmp_path / "x")
    assert holds_embeddings(tmp_path / "y")
    assert not holds_embeddings(tmp_path)
    stored = read_embeddings(tmp_path / "x" / "embeddings.npy")
    np.testing.assert_array_equal(stored.embeddings, EMBEDDINGS)


def test_names_are_relative_to_the_data(tmp_path):
    from tfdml.data import FileImages, ImageDataset

    paths = (str(tmp_path / "a" / "1.jpg"), str(tmp_path / "b" / "2.jpg"), "/elsewhere/3.jpg")
    query = ImageDataset("x", "test", FileImages(paths), [0, 1, 1], {0: "a", 1: "b"}, is_query=[True, False, True])
    train = ImageDataset("x", "train", FileImages(paths[:1]), [7], {7: "seven"})
    for directory in (tmp_path, str(tmp_path) + "/", tmp_path / "list.csv"):
        table = ImageTable.of([train, query], directory)
        assert table.names == ("a/1.jpg", "a/1.jpg", "b/2.jpg", "/elsewhere/3.jpg")
    assert table.roles.tolist() == ["train", "query", "gallery", "query"]
    assert table.labels.tolist() == [7, 0, 1, 1]
    assert table.class_names == {7: "seven", 0: "a", 1: "b"}
    assert ImageTable.of([train, query]).names[0] == paths[0]
