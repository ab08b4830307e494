"""Checkpoints made to fill the memory, or of no network: refused at once, in one line."""

import os
import pickle
import tracemalloc
import zipfile

import h5py
import numpy as np
import pytest

from tests.backbones.checkpoint_files import write_torch
from tfdml.backbones.conversion.convert import convert
from tfdml.backbones.conversion.readers import read_checkpoint
from tfdml.errors import UserError


def refused(path, says, read=read_checkpoint):
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=says) as error:
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value)


class View:
    """Pickles as a tensor of another shape and strides than that of its array."""

    def __init__(self, tensor, shape, strides):
        self.tensor, self.shape, self.strides = tensor, shape, strides

    def __reduce__(self):
        rebuild, (storage, offset, _, _, *rest) = self.tensor.__reduce__()
        return rebuild, (storage, offset, self.shape, self.strides, *rest)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(("shape", "strides"), [((3, 2**30), (0, 0)), ((2**31, 4), (0, 1)), ((5,), (0,))])
def test_numbers_are_not_repeated(legacy, shape, strides, tmp_path, monkeypatch):
    def repeated(state):
        return {name: View(tensor, shape, strides) for name, tensor in state.items()}

    write_torch(tmp_path / "x.pth", {"a.weight": np.ones(4, "f")}, monkeypatch, legacy, repeated)
    assert (tmp_path / "x.pth").stat().st_size < 2000
    refused(tmp_path / "x.pth", "is larger than its storage of 4 numbers")


def test_many_views_of_one_storage_are_not_copied_without_end(tmp_path, monkeypatch):
    def shared(count):
        return lambda state: {f"{i}.weight": View(state["a.weight"], (2**12,), (1,)) for i in range(count)}

    array = np.random.default_rng(0).normal(size=2**12).astype("f")
    write_torch(tmp_path / "x.pth", {"a.weight": array}, monkeypatch, wrap=shared(3))
    assert all(np.array_equal(array, other) for other in read_checkpoint(tmp_path / "x.pth").values())
    write_torch(tmp_path / "x.pth", {"a.weight": array}, monkeypatch, wrap=shared(100))
    refused(tmp_path / "x.pth", "more than 16 times the bytes of the file")


def test_parts_that_unpack_to_more_than_the_file_are_refused(tmp_path, monkeypatch):
    write_torch(tmp_path / "x.pth", {"a.weight": np.zeros(2**22, "f")}, monkeypatch)
    with (
        zipfile.ZipFile(tmp_path / "x.pth") as archive,
        zipfile.ZipFile(tmp_path / "y.pth", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
    refused(tmp_path / "y.pth", "would take 16,777,216 bytes, more than the file has")


def test_a_memo_larger_than_the_pickle_is_refused(tmp_path):
    content = pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + pickle.LONG_BINPUT + b"\xff\xff\xff\x3f" + pickle.STOP
    with zipfile.ZipFile(tmp_path / "x.pth", "w") as archive:
        archive.writestr("archive/data.pkl", content)
    refused(tmp_path / "x.pth", "a memo of 1,073,741,823 objects")


def test_arrays_of_no_network_are_not_taken_for_caffes(tmp_path, monkeypatch):
    write_torch(tmp_path / "x.pth", {"lonely": np.ones(3, "f")}, monkeypatch)
    for architecture in ("bn_inception", "googlenet_bn", "resnet50_v1_5"):
        refused(
            tmp_path / "x.pth",
            r"is no checkpoint of a network: its arrays \(lonely\)",
            lambda path, architecture=architecture: convert(path, architecture),
        )


def test_a_fifo_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "x.pth")
    refused(tmp_path / "x.pth", "cannot be read: a FIFO, not a regular file")


def test_numbers_in_other_files_are_not_read(tmp_path):
    (tmp_path / "secret").write_bytes(bytes(16))
    with h5py.File(tmp_path / "external.h5", "w") as file:
        file.create_dataset("a", (4,), "f4", external=[(str(tmp_path / "secret"), 0, 16)])
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        layout = h5py.VirtualLayout((4,), "f4")
        layout[:] = h5py.VirtualSource(tmp_path / "external.h5", "a", (4,))
        file.create_virtual_dataset("a", layout)
    for name in ("external.h5", "virtual.h5"):
        refused(tmp_path / name, "the numbers of a lie in other files")
