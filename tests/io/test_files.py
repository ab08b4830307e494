"""Files are written whole or not at all, wherever their path leads; what killed processes leave;
JSON from anyone."""

import errno
import glob
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import types

import psutil
import pytest

from tfdml.errors import UserError
from tfdml.io import files


def ended_process():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_link_is_followed_and_who_reads_the_old_file_has_it_whole(tmp_path):
    (tmp_path / "there").mkdir()
    for name in ("old.json", "new.json"):
        (tmp_path / name).symlink_to(tmp_path / "there" / name)
    (tmp_path / "there" / "old.json").write_text("before")
    with open(tmp_path / "old.json", "rb") as reader:
        for name in ("old.json", "new.json"):
            files.write_whole(tmp_path / name, b"after")
            assert (tmp_path / name).is_symlink()
            assert (tmp_path / "there" / name).read_bytes() == b"after"
        assert reader.read() == b"before"
    assert sorted(os.listdir(tmp_path / "there")) == ["new.json", "old.json"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), KeyError()]
)
def test_what_fails_leaves_the_old_file_and_nothing_else(error, tmp_path):
    path = tmp_path / "metrics.json"
    path.write_bytes(b"old")
    expected = UserError if isinstance(error, OSError) else type(error)

    def fail():
        with files.atomic_write(path) as temporary:
            temporary.write_bytes(b"half")
            raise error

    with pytest.raises(expected):
        fail()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["metrics.json"]


def test_places_that_no_file_can_be_written_to_are_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "new")
    for path in (
        tmp_path / "folder",
        tmp_path / "no" / "such",
        pathlib.Path(os.devnull),
        "memory://nowhere/file",
    ):
        with pytest.raises(UserError, match="json"):
            files.require_writable(path, "json")
    for path in (tmp_path / "folder", tmp_path / "no" / "such", os.devnull):
        with pytest.raises(UserError, match=str(path)):
            files.write_whole(path, b"{}")
    for path in (tmp_path / "new", tmp_path / "link"):
        files.require_writable(path, "json")
    assert sorted(os.listdir(tmp_path)) == ["folder", "link"]
    assert not os.listdir(tmp_path / "folder")
    with pytest.raises(UserError, match="run_dir"):
        files.require_local(pathlib.Path("gs://bucket/run"), "run_dir")


def test_a_remote_file_is_prepared_where_no_other_user_can_put_a_link(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with files.atomic_write("memory://bucket/private.json") as temporary:
        folder = pathlib.Path(temporary).parent
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o077 == 0
        pathlib.Path(temporary).write_bytes(b"{}")
    assert files.read_bytes("memory://bucket/private.json") == b"{}"
    assert not os.listdir(tmp_path)
    files.write_json("memory://bucket/private.json", {"loss": float("nan"), "k": [1, float("inf")]})
    assert files.read_json("memory://bucket/private.json") == {"loss": None, "k": [1, None]}
    files.remove("memory://bucket/private.json")
    assert not files.is_file("memory://bucket/private.json")


def test_what_ended_processes_left_is_swept_and_nothing_else(tmp_path):
    dead = ended_process()
    (tmp_path / f".partial-{dead}-folder" / "below").mkdir(parents=True)
    (tmp_path / f".partial-{dead}-file").touch()
    (tmp_path / f".partial-{dead}-link").symlink_to(tmp_path / "kept")
    names = {
        "kept",
        ".partial-x",
        f".partial-{os.getpid()}-file",
        f"partial-{dead}-file",
        f".partial-{'9' * 200}-x",
    }
    for name in names:
        (tmp_path / name).touch()
    files.sweep(tmp_path)
    assert set(os.listdir(tmp_path)) == names
    files.sweep(tmp_path / "nowhere")


def test_a_lock_is_refused_or_waited_for_and_free_after_a_kill(tmp_path):
    entered, leave, order = threading.Event(), threading.Event(), []

    def first():
        with files.locked(tmp_path, "out"):
            entered.set()
            leave.wait(10)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait(10)
    assert all(map(files.is_debris, os.listdir(tmp_path)))
    with (
        pytest.raises(UserError, match=r"^out=.*: another process is writing"),
        files.locked(tmp_path, "out"),
    ):
        pass
    threading.Timer(0.1, leave.set).start()
    with files.locked(tmp_path, "out", wait=True):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]
    assert not os.listdir(tmp_path)
    pid = os.fork()
    if pid == 0:
        with files.locked(tmp_path, "out"):
            os._exit(9)
    os.waitpid(pid, 0)
    assert os.listdir(tmp_path) == [".lock"]
    with files.locked(tmp_path, "out"):
        pass
    assert not os.listdir(tmp_path)


NAMES = [
    "a.jpg",
    "b.JPG",
    "note.txt",
    "x/c.jpg",
    "x/y/d.png",
    "x/y/e.jpg",
    "z (1)/f%20#.jpg",
    "xx/g.jpg",
    "[1]/h.jpg",
]


@pytest.mark.parametrize(
    "pattern",
    ["*.jpg", "**/*.jpg", "x/**/*", "*/*.jpg", "**/y/*", "**/*(1)/*", "*/y/?.png", "none/*x"],
)
def test_a_pattern_names_what_the_shell_would(pattern, tmp_path):
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    expected = [
        path for path in glob.glob(f"{tmp_path}/{pattern}", recursive=True) if os.path.isfile(path)
    ]
    if pattern.startswith("none"):
        with pytest.raises(UserError, match="there is no folder"):
            files.find(f"{tmp_path}/{pattern}")
    else:
        assert sorted(files.find(f"{tmp_path}/{pattern}")) == sorted(expected)
    assert files.find(f"{tmp_path}/[1]/*") == [f"{tmp_path}/[1]/h.jpg"]
    with pytest.raises(UserError, match="there is no file or folder"):
        files.find(f"{tmp_path}/nowhere")


@pytest.mark.parametrize("pattern", ["shop/*/*.jpg", "shop/**/*.jpg", "shop/a/?.jpg"])
def test_a_pattern_follows_links_and_reads_no_folder_twice(pattern, tmp_path):
    for name in ("disk/a/1.jpg", "disk/b/2.jpg", "disk/b/note.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name, target in {"a": "disk/a", "b": "disk/b"}.items():
        (tmp_path / "shop").mkdir(exist_ok=True)
        (tmp_path / "shop" / name).symlink_to(tmp_path / target)
    # Two circles have names without end.
    for name in ("again", "and again"):
        (tmp_path / "disk" / "b" / name).symlink_to(tmp_path / "shop")
    (tmp_path / "disk" / "a" / "3.jpg").symlink_to(tmp_path / "disk" / "b" / "2.jpg")
    found = [path.removeprefix(f"{tmp_path}/shop/") for path in files.find(f"{tmp_path}/{pattern}")]
    assert found == ["a/1.jpg", "a/3.jpg"] + ["b/2.jpg"] * ("*" in pattern)


MALFORMED = {
    "torn": b'{"images": 3',
    "not UTF-8": b'{"images": "\xff"}',
    "deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "no key": b'{"image": 3}',
    "a fraction": b'{"images": 3.5}',
}


def test_malformed_files_are_refused_in_one_line_and_sound_ones_read(tmp_path):
    path = tmp_path / "manifest.json"
    for name, text in MALFORMED.items():
        path.write_bytes(text)
        with pytest.raises(UserError, match="is damaged") as error:
            files.read_json(path, {"images": int})
        assert "\n" not in str(error.value), name
    value = {
        "images": 3,
        "share": 1,
        "names": {str(label): "ü" * 9 for label in range(2000)},
        "deep": [[[[{}]]]],
    }
    path.write_text(json.dumps(value))
    assert (
        files.read_json(path, {"images": int, "share": float, "names": dict, "deep": (list, str)})
        == value
    )


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "a/../../x", "a//b", "gs://b/x", "a\0b", "..\\x", None]
)
def test_names_that_lead_out_are_refused(name):
    with pytest.raises(UserError, match=r"manifest\.json names a file outside its folder") as error:
        files.confined("records", name, "records/manifest.json")
    assert "\n" not in str(error.value)
    assert (
        files.confined("gs://bucket/records", "variables/..a", "")
        == "gs://bucket/records/variables/..a"
    )


def test_the_memory_of_the_machine_and_of_the_container_both_count(monkeypatch):
    contents = {}
    monkeypatch.setattr(files, "_content", lambda path: contents.get(path.rpartition("/")[2], ""))
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: types.SimpleNamespace(available=4 * 2**20)
    )
    assert files.free_memory() == 4 * 2**20
    contents |= {"memory.max": "3000000\n", "memory.current": "2000000\n"}
    assert files.free_memory() == 1_000_000
    # What is cached of files is free for the asking.
    contents["memory.stat"] = "anon 1\nactive_file 300000\ninactive_file 200000\nfile_mapped 7\n"
    assert files.free_memory() == 1_500_000
    contents["memory.max"] = "max\n"
    assert files.free_memory() == 4 * 2**20
