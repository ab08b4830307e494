"""Tests for local copies of what is in a store."""

import os
import pathlib

import pytest

from tfdml.errors import UserError
from tfdml.io import files
from tfdml.io.files import as_named, in_store, local_copy, write_json

RUN = "s3://photos/runs/cars"


def test_which_paths_are_copied():
    addresses = ("s3://b/k", "gs://b/k", "memory://k", "http://h/v1", "lancedb:///data", "pgvector://h", "runs/cars")
    assert [in_store(address) for address in addresses] == [True, True, True, False, False, False, False]
    assert local_copy("runs/cars") == "runs/cars"


def test_a_copy_is_downloaded_once(s3):
    s3.put("runs/cars/flags.txt", b"--seed=1")
    s3.put("runs/cars/checkpoints/1.npz", b"1" * 1000)
    s3.put("runs/cars2/flags.txt", b"of another run")
    copy = pathlib.Path(local_copy(f"{RUN}/"))
    assert copy.name == "cars"
    assert (copy / "checkpoints" / "1.npz").read_bytes() == b"1" * 1000
    assert pathlib.Path(local_copy(f"{RUN}/flags.txt")).read_bytes() == b"--seed=1"
    s3.requests.clear()
    local_copy(RUN)
    assert not s3.requests
    assert not os.path.exists(local_copy("s3://photos/none"))


def test_a_key_that_leads_out_of_the_folder_is_refused(monkeypatch):
    class Store:
        def find(self, there, detail):
            return {f"{there}/../../evil": {"size": 1}}

    monkeypatch.setattr(files, "filesystem_of", lambda url: (Store(), "photos/runs"))
    with pytest.raises(UserError, match="leads out of it"):
        local_copy("s3://photos/evil")


def test_a_store_that_recovers(s3):
    s3.put("recovers.npz", b"b" * 10**6)
    with s3.fault("half", "GET", "recovers.npz", times=2), s3.fault(1.0, "HEAD", times=1):
        assert pathlib.Path(local_copy("s3://photos/recovers.npz")).read_bytes() == b"b" * 10**6


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
