"""tfdml embed and tfdml evaluate leave out what cannot be decoded, wherever in the file the damage lies."""

import pytest

from tests.data.preparations import picture
from tfdml.cli.model_flags import DataChoice
from tfdml.errors import UserError


def with_wrong_checksum(data):
    """A PNG whose image data does not match its CRC."""
    at = data.index(b"IDAT") + 20
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.fixture
def photos(tmp_path):
    for label in "ab":
        (tmp_path / label).mkdir()
        for number in range(3):
            (tmp_path / label / f"{number}.png").write_bytes(picture(number, kind="PNG"))
    return tmp_path


def test_a_png_with_a_wrong_checksum_is_skipped(photos):
    path = photos / "b" / "1.png"
    path.write_bytes(with_wrong_checksum(path.read_bytes()))
    choice = DataChoice("folder", str(photos), "", "skip")
    names = [choice.load("test").images.name(index)[-5:] for index in range(2)]
    assert names == ["0.png", "2.png"]


def test_nothing_is_left_out_unasked(photos):
    choice = DataChoice("folder", str(photos), "")
    (photos / "b" / "1.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"b/1\.png: empty file.*skip"):
        choice.load("test")
