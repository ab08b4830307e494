"""What is called like an image but is a FIFO, a socket or a device keeps nobody waiting."""

import os
import socket

import numpy as np
import pytest

from tests.data.preparations import picture
from tfdml.data.images import FileImages
from tfdml.data.images.faults import diagnose, inspect
from tfdml.data.records import find_faults


@pytest.fixture
def images(tmp_path, monkeypatch):
    (tmp_path / "good.png").write_bytes(picture(0, kind="PNG"))
    os.mkfifo(tmp_path / "fifo.jpg")
    (tmp_path / "link.jpg").symlink_to("fifo.jpg")
    (tmp_path / "device.jpg").symlink_to("/dev/zero")
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.jpg")
    names = ("good.png", "fifo.jpg", "link.jpg", "device.jpg", "socket.jpg")
    return FileImages(tuple(str(tmp_path / name) for name in names))


@pytest.mark.parametrize("find", [inspect, diagnose, find_faults])
@pytest.mark.parametrize("boxed", [False, True])
def test_they_are_named_before_they_are_opened(find, boxed, images):
    if boxed:
        images = FileImages(images.paths, np.tile([0, 0, 9, 9], (5, 1)))
    assert [(fault.index, fault.reason) for fault in find(images)] == [
        (index, f"unreadable ({kind}, not a regular file)")
        for index, kind in enumerate(("a FIFO", "a FIFO", "a device", "a socket"), 1)
    ]


def test_they_have_neither_size_nor_bytes(images):
    assert images.size(0) is not None
    for index in range(1, 5):
        assert images.size(index) is None
        with pytest.raises(OSError, match="not a regular file"):
            images.encoded(index)
