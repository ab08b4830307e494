"""Files are written atomically, wherever their path leads; full disks; what killed processes leave."""

import errno
import glob
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import types

import pytest

from tfdml.errors import UserError
from tfdml.io import files
from tfdml.io.files import find, require_local, require_space, require_writable


def ended_process():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_link_is_followed_and_stays(tmp_path):
    (tmp_path / "there").mkdir()
    for name in ("old.json", "new.json"):
        (tmp_path / name).symlink_to(tmp_path / "there" / name)
    (tmp_path / "there" / "old.json").write_text("before")
    for name in ("old.json", "new.json"):
        files.write_whole(tmp_path / name, b"after")
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "there" / name).read_bytes() == b"after"
    assert sorted(os.listdir(tmp_path / "there")) == ["new.json", "old.json"]


def test_who_reads_a_file_that_is_replaced_has_the_old_one_whole(tmp_path):
    (tmp_path / "metrics.json").write_bytes(b"before")
    with open(tmp_path / "metrics.json", "rb") as reader:
        files.write_whole(tmp_path / "metrics.json", b"after")
        assert reader.read() == b"before"
    assert (tmp_path / "metrics.json").read_bytes() == b"after"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
def test_what_is_no_regular_file_is_refused_and_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", pathlib.Path(os.devnull)):
        with pytest.raises(UserError, match="no regular file"):
            files.write_whole(path, b"{}")
    assert os.listdir(tmp_path) == ["pipe.json"]


def test_a_remote_file_is_prepared_where_no_other_user_can_put_a_link(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    victim = tmp_path / "victim"
    victim.write_bytes(b"of another user")
    with files.atomic_write("memory://bucket/metrics.json") as temporary:
        place = pathlib.Path(temporary)
        assert place.parent != tmp_path
        assert place.parent.stat().st_mode & 0o077 == 0
        place.write_bytes(b"{}")
    assert files.read_bytes("memory://bucket/metrics.json") == b"{}"
    assert victim.read_bytes() == b"of another user"
    assert os.listdir(tmp_path) == ["victim"]


@pytest.mark.parametrize(
    "name", [".partial-\u00b2-x", ".partial-\u0663-x", f".partial-{'9' * 200}-x", ".partial-x", "tfdml-\u00b2-x"]
)
def test_a_name_that_holds_no_number_of_a_process_stays(name, tmp_path):
    (tmp_path / name).mkdir()
    files.sweep(tmp_path)
    assert os.listdir(tmp_path) == [name]


def test_a_full_disk_is_told_with_what_is_needed_and_free_and_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.json"
    path.write_bytes(b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def usage(path):
        return types.SimpleNamespace(free=700 if os.listdir(tmp_path) == ["metrics.json"] else 0)

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr("shutil.disk_usage", usage)
    with pytest.raises(UserError, match=r"needs about 3\.0 MB \(700 bytes are free\)"):
        files.write_whole(path, bytes(3 * 2**20))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["metrics.json"]


def test_a_folder_in_the_place_of_a_file_is_told_in_one_line(tmp_path):
    (tmp_path / "metrics.json").mkdir()
    with pytest.raises(UserError, match=r"metrics\.json is a folder"):
        files.write_whole(tmp_path / "metrics.json", b"{}")
    assert os.listdir(tmp_path) == ["metrics.json"]


def test_too_little_space_is_told_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 2**20}))
    require_space(tmp_path / "not" / "yet", 2**20, "out", "the records")
    with pytest.raises(UserError, match=r"`out=.*yet`: the records need about 2\.0 MB, and 1\.0 MB are free; free"):
        require_space(tmp_path / "not" / "yet", 2**21, "out", "the records")


@pytest.mark.parametrize("path", ["gs://bucket/run", "s3://bucket/run", pathlib.Path("gs://bucket/run")])
def test_a_remote_path_is_refused_where_only_local_ones_are_written(path):
    with pytest.raises(UserError, match=r"^`run_dir=(gs|s3):"):
        require_local(path, "run_dir")


def test_what_ended_processes_left_is_swept_and_nothing_else(tmp_path):
    dead = ended_process()
    (tmp_path / f".partial-{dead}-folder" / "below").mkdir(parents=True)
    (tmp_path / f".partial-{dead}-file").touch()
    (tmp_path / f".partial-{dead}-link").symlink_to(tmp_path / "kept")
    kept = {"kept", ".partial-x", f".partial-{os.getpid()}-file", f"partial-{dead}-file"}
    for name in kept:
        (tmp_path / name).touch()
    files.sweep(tmp_path)
    assert set(os.listdir(tmp_path)) == kept
    files.sweep(tmp_path / "nowhere")


def test_a_place_that_no_file_can_be_written_to_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    for path, says in (
        ("folder", "folder` is a folder: name a file to write"),
        ("no/such/file", "its folder does not exist"),
        ("memory://no bucket/file", "there is no memory://no bucket"),
    ):
        with pytest.raises(UserError, match=f"^`json=.*{says}"):
            require_writable(path if "://" in path else tmp_path / path, "json")
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "new")
    for path in (tmp_path / "new", tmp_path / "link"):
        require_writable(path, "json")
    with pytest.raises(UserError, match="no regular file"):
        require_writable(os.devnull, "json")
    assert sorted(os.listdir(tmp_path)) == ["folder", "link"]
    assert not os.listdir(tmp_path / "folder")

    def refused(**_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(UserError, match=r"new cannot be written \(Permission denied\)"):
        require_writable(tmp_path / "new", "json")


def test_a_lock_is_refused_with_the_process_that_holds_it_and_leaves_nothing(tmp_path):
    with files.locked(tmp_path, "out"):
        assert all(files.is_debris(name) for name in os.listdir(tmp_path))
        with (
            pytest.raises(UserError, match=f"^`out=.*`: another process is writing into it .process {os.getpid()} on"),
            files.locked(tmp_path, "out"),
        ):
            pass
    assert not os.listdir(tmp_path)
    with files.locked(tmp_path, "out"):
        pass


def test_a_lock_is_waited_for(tmp_path):
    entered, leave, order = threading.Event(), threading.Event(), []

    def first():
        with files.locked(tmp_path, "out"):
            entered.set()
            leave.wait(10)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait(10)
    threading.Timer(0.2, leave.set).start()
    with files.locked(tmp_path, "out", wait=True):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]


def test_the_lock_of_a_killed_process_is_taken_over_with_a_warning(tmp_path, monkeypatch):
    warned = []
    monkeypatch.setattr(files.logging, "warning", lambda text, *values: warned.append(text % values))
    pid = os.fork()
    if pid == 0:
        with files.locked(tmp_path, "out"):
            os._exit(9)
    os.waitpid(pid, 0)
    assert sorted(os.listdir(tmp_path)) == [".lock", ".lock.holder"]
    with files.locked(tmp_path, "out"):
        assert len(warned) == 1
        assert f"taking over from process {pid} on" in warned[0]
    assert not os.listdir(tmp_path)


def test_the_lock_of_no_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no such folder"), files.locked(tmp_path / "none", "out"):
        pass


NAMES = ["a.jpg", "b.JPG", "note.txt", "x/c.jpg", "x/y/d.png", "x/y/e.jpg", "z (1)/f%20#.jpg", "xx/g.jpg"]


@pytest.fixture
def tree(tmp_path):
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    "pattern", ["*.jpg", "**/*.jpg", "x/**/*", "*/*.jpg", "**/y/*", "**/*(1)/*", "*/y/?.png", "none/*x"]
)
def test_a_pattern_names_what_the_shell_would(pattern, tree):
    expected = [path for path in glob.glob(f"{tree}/{pattern}", recursive=True) if os.path.isfile(path)]
    if pattern.startswith("none"):
        with pytest.raises(UserError, match="there is no folder"):
            list(files.find(f"{tree}/{pattern}"))
    else:
        assert sorted(files.find(f"{tree}/{pattern}")) == sorted(expected)
        assert list(files.find(f"{tree}/{pattern}")) == list(files.find(f"{tree}/{pattern}"))


def test_relative_patterns_folders_and_single_files(tree, monkeypatch):
    monkeypatch.chdir(tree)
    assert list(files.find("x/*.jpg")) == [f"{tree}/x/c.jpg"]
    assert list(files.find("*.jpg")) == [f"{tree}/a.jpg"]
    assert sorted(files.find("x/..")) == sorted(f"{tree}/{name}" for name in NAMES)
    assert list(files.find("note.txt")) == [f"{tree}/note.txt"]
    with pytest.raises(UserError, match=f"no file or folder {tree}/nowhere"):
        list(files.find("nowhere"))


def test_an_existing_file_comes_before_a_pattern(tmp_path):
    for name in ("star*.png", "starry.png", "car[1].png", "a,b.png"):
        (tmp_path / name).write_bytes(b"x")
    for name in ("star*.png", "car[1].png", "a,b.png"):
        assert find(f"{tmp_path}/{name}") == [f"{tmp_path}/{name}"]
    assert [path.rpartition("/")[2] for path in find(f"{tmp_path}/st*")] == ["star*.png", "starry.png"]
