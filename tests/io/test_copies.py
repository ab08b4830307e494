"""Tests for local copies of folders in a store."""

import os
import pathlib

import pytest

from tfdml.errors import UserError
from tfdml.io.copies import in_store, local_copy, save, upload, uploading
from tfdml.io.files import as_named, write_json

RUN = "s3://photos/runs/cars"


def _uploads(s3):
    """The keys that were written, in their order."""
    written = (request.partition(" /photos/")[2] for request in s3.requests if request.startswith("PUT"))
    return [key for key in dict.fromkeys(written) if not key.endswith("/")]


def test_which_paths_are_copied():
    addresses = ("s3://b/k", "gs://b/k", "memory://k", "http://h/v1", "lancedb:///data", "pgvector://h", "runs/cars")
    assert [in_store(address) for address in addresses] == [True, True, True, False, False, False, False]
    assert local_copy("runs/cars") == "runs/cars"


def test_a_copy_follows_the_store(s3):
    s3.put("runs/cars/flags.txt", b"--seed=1")
    s3.put("runs/cars/checkpoints/1.npz", b"1" * 1000)
    s3.put("runs/cars2/flags.txt", b"of another run")
    copy = pathlib.Path(local_copy(f"{RUN}/"))
    assert copy.name == "cars"
    assert (copy / "checkpoints" / "1.npz").read_bytes() == b"1" * 1000
    assert local_copy(f"{RUN}/flags.txt") == str(copy / "flags.txt")
    s3.requests.clear()
    local_copy(RUN)
    assert not [request for request in s3.requests if request.endswith(("flags.txt", ".npz"))]
    s3.reset()
    s3.put("runs/cars/flags.txt", b"--seed=22")
    local_copy(RUN)
    assert [path.read_text() for path in copy.rglob("*") if path.is_file()] == ["--seed=22"]
    assert not os.path.exists(local_copy("s3://photos/none"))


def test_changes_go_back_in_their_order_and_what_completes_them_last(s3):
    s3.put("runs/cars/old.npz", b"old")
    s3.requests.clear()
    with uploading(RUN, "run_dir"):
        copy = pathlib.Path(local_copy(RUN))
        (copy / "old.npz").unlink()
        for number, name in enumerate(("z.npz", "card.json", "a.npz", "metrics.jsonl")):
            (copy / name).write_text(name)
            os.utime(copy / name, ns=(number, number))
        (copy / ".partial-1-b.npz").write_text("half")
        upload(RUN, last=["card.json"])
        assert _uploads(s3) == [
            "runs/cars/.lock",
            *(f"runs/cars/{n}" for n in ("z.npz", "a.npz", "metrics.jsonl", "card.json")),
        ]
        s3.requests.clear()
        (copy / "metrics.jsonl").write_text("longer")
    assert _uploads(s3) == ["runs/cars/metrics.jsonl"]
    assert s3.keys() == [f"runs/cars/{name}" for name in ("a.npz", "card.json", "metrics.jsonl", "z.npz")]


def test_one_process_writes(s3, monkeypatch):
    with uploading(RUN, "run_dir"), pytest.raises(UserError, match=r"run_dir=.*another process.*delete \S+/\.lock"):
        uploading(RUN, "run_dir").__enter__()
    s3.put("runs/cars/.lock", b'{"token": "a", "host": "another host", "pid": 1}')
    with pytest.raises(UserError, match="another process"):
        uploading(RUN, "run_dir").__enter__()
    import socket

    s3.put("runs/cars/.lock", f'{{"token": "a", "host": "{socket.gethostname()}", "pid": {2**22 + 1}}}'.encode())
    with uploading(RUN, "run_dir"):  # of a process that was killed
        assert s3.keys() == ["runs/cars/.lock"]
    assert s3.keys() == []


def test_a_store_that_recovers(s3, caplog):
    with uploading(RUN, "run_dir"):
        copy = pathlib.Path(local_copy(RUN))
        copy.mkdir(parents=True, exist_ok=True)
        (copy / "a.npz").write_bytes(b"a" * 10**6)
        with s3.fault(503, "PUT", times=3), s3.fault("reset after", "PUT", "a.npz", times=2):
            save(RUN)
    assert s3.get("runs/cars/a.npz") == b"a" * 10**6
    with s3.fault("half", "GET", "b.npz", times=2), s3.fault(1.0, "HEAD", times=1):
        s3.put("runs/cars/b.npz", b"b" * 10**6)
        assert pathlib.Path(local_copy(f"{RUN}/b.npz")).read_bytes() == b"b" * 10**6
    assert "trying again" not in caplog.text


@pytest.mark.slow
def test_a_store_that_is_lost_leaves_nothing_half_written(s3, caplog):
    s3.put("runs/cars/a.npz", b"before")
    lost = pytest.raises(UserError, match=r"^s3://photos/runs/cars cannot be written \(.*503.*all its files are in /")
    with lost as raised, s3.fault(503, "PUT", "npz"), uploading(RUN, "run_dir"):
        copy = pathlib.Path(local_copy(RUN))
        (copy / "a.npz").write_bytes(b"a" * 2 * 10**7)
        save(RUN)
        assert "trying again later" in caplog.text
    kept = pathlib.Path(str(raised.value).rpartition(" ")[2])
    assert (kept / "a.npz").stat().st_size == 2 * 10**7
    assert s3.get("runs/cars/a.npz") == b"before"
    assert s3.keys() == ["runs/cars/a.npz"]


@pytest.mark.slow
def test_half_an_answer_is_no_copy(s3):
    s3.put("vectors.npy", b"v" * 10**6)
    with (
        s3.fault("half", "GET", "vectors"),
        pytest.raises(UserError, match=r"^s3://photos/vectors.npy cannot be read: .+"),
    ):
        local_copy("s3://photos/vectors.npy")


def test_files_name_urls_and_not_copies(s3, tmp_path):
    s3.put("model.keras", b"")
    copy = local_copy("s3://photos/model.keras")
    write_json(tmp_path / "card.json", {"model": copy})
    assert '"s3://photos/model.keras"' in (tmp_path / "card.json").read_text()
    assert as_named(f"{copy}: no model") == "s3://photos/model.keras: no model"
