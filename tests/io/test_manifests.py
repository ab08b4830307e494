"""Whatever a JSON file of others holds, reading it ends in its values or one line; names stay in their folder."""

import json
import os

import pytest

from tfdml.errors import UserError
from tfdml.io.files import open_file, sha256_of
from tfdml.io.manifests import (
    MAX_BYTES,
    MAX_DEPTH,
    compare_files,
    confined,
    fields,
    objects,
    parse_flags,
    parse_json,
    read_json,
)

MALFORMED = {
    "empty": b"",
    "torn": b'{"images": 3',
    "binary": bytes(range(256)),
    "not UTF-8": b'{"images": "\xff"}',
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "deep list": b"[" * 100_000 + b"]" * 100_000,
    "deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "just too deep": b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
    "a huge integer": b'{"images": ' + b"9" * 5000 + b"}",
    "no key": b'{"image": 3}',
    "null for a number": b'{"images": null}',
    "true for a number": b'{"images": true}',
    "text for a number": b'{"images": "3"}',
    "a fraction": b'{"images": 3.5}',
    "NaN": b'{"images": NaN}',
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_files_are_refused_in_one_line(name, tmp_path):
    path = tmp_path / "manifest.json"
    path.write_bytes(MALFORMED[name])
    with pytest.raises(UserError) as error:
        read_json(path, {"images": int}, "copy it again")
    message = str(error.value)
    assert message.startswith(f"{path} is damaged")
    assert message.endswith("; copy it again")
    assert "\n" not in message
    assert len(message) < len(str(path)) + 300


def test_what_cannot_be_opened_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "loop.json").symlink_to("loop.json")
    with open(tmp_path / "large.json", "wb") as file:
        file.truncate(MAX_BYTES + 1)
    for name, reason in (
        ("fifo", "a FIFO, not a regular file"),
        ("folder", "Is a directory"),
        ("loop", "symbolic link"),
        ("missing", "No such file"),
        ("large", "more than the limit of 134,217,728"),
    ):
        with pytest.raises(UserError, match=reason):
            read_json(tmp_path / f"{name}.json")


def test_sound_files_are_read_whole(tmp_path):
    value = {"images": 3, "share": 1, "names": {str(label): "ü" * 9 for label in range(20_000)}, "deep": [[[[{}]]]]}
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(value))
    assert read_json(str(path), {"images": int, "share": float, "names": dict, "deep": (list, type(None))}) == value
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH, "here")


def test_types_are_named():
    for value, message in (
        ([], "an object is expected, not a list"),
        ({}, "it has no key images"),
        ({"images": "3"}, "its key images must be an integer, not a text"),
        ({"images": True}, "its key images must be an integer, not true or false"),
    ):
        with pytest.raises(UserError, match=f"^there is damaged or of something else: {message}$"):
            fields(value, {"images": int}, "there")
    with pytest.raises(UserError, match="key train must be an object, not null"):
        objects({"train": None}, "there")


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../x", "a/../../x", "..", ".", "", "a//b", "a/", "gs://bucket/x", "a\0b", "..\\x", None, 3, ["a"]],
)
def test_names_that_lead_out_are_refused(name):
    with pytest.raises(UserError, match=r"manifest\.json names a file outside its folder") as error:
        confined("records", name, "records/manifest.json")
    assert "\n" not in str(error.value)


def test_names_within_are_joined():
    assert confined("records", "a.idx", "") == "records/a.idx"
    assert confined("gs://bucket/records", "variables/..a", "") == "gs://bucket/records/variables/..a"


def test_files_are_compared_with_their_checksums(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.bin").write_bytes(b"abc")
    listed = {"sub/a.bin": {"sha256": sha256_of(tmp_path / "sub" / "a.bin"), "bytes": 3}}
    compare_files(tmp_path, listed, "card", "copy it")
    os.mkfifo(tmp_path / "fifo")
    for files, message in (
        ({"sub/a.bin": {"sha256": "0" * 64}}, r"a\.bin is damaged: its SHA-256 is not that in card; copy it"),
        ({"b.bin": listed["sub/a.bin"]}, r"b\.bin, which card lists, cannot be read \(No such file"),
        ({"fifo": listed["sub/a.bin"]}, "a FIFO, not a regular file"),
        ({"../a.bin": listed["sub/a.bin"]}, "outside its folder"),
        ({"sub/a.bin": {}}, "has no key sha256"),
        ({"sub/a.bin": "abc"}, "must be an object"),
        ([], "an object is expected"),
    ):
        with pytest.raises(UserError, match=message):
            compare_files(tmp_path, files, "card", "copy it")


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    for path, reason in ((tmp_path / "fifo", "a FIFO"), (tmp_path / "link", "a FIFO"), ("/dev/zero", "a device")):
        with pytest.raises(OSError, match=f"{reason}, not a regular file"):
            open_file(path)
    with pytest.raises(IsADirectoryError):
        open_file(tmp_path)


def test_flags_are_read_as_they_are_written():
    text = "# a comment\n\n--seed=3\r\n  --objectives=a(b=1) + c  \n--weights=\n--report\nresize=40\n--seed=4\n"
    flags = {"seed": "4", "objectives": "a(b=1) + c", "weights": "", "report": "", "resize": "40"}
    assert parse_flags(text) == flags
