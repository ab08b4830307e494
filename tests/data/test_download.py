"""Downloads from a server with the faults that servers have, and archives with names that lead outside their folder."""

import contextlib
import hashlib
import http.server
import io
import os
import re
import signal
import tarfile
import threading
import time
import zipfile

import pytest

from tfdml.data import download as downloads
from tfdml.data.download import Download, download, fetch, unpack
from tfdml.errors import UserError
from tfdml.io.files import locked

CONTENT = bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves one file; a list of faults says what goes wrong with each answer in turn."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.ranges = CONTENT, True
        self.faults, self.asked = [], []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/some/file.zip?download=1"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        server = self.server
        wanted = self.headers.get("Range")
        server.asked.append(wanted)
        fault = server.faults.pop(0) if server.faults else None
        if isinstance(fault, int):
            self.send_response(fault)
            self.send_header("Content-Length", "0")
            self.send_header("Retry-After", "0")
            self.end_headers()
            return
        start = int(re.match(r"bytes=(\d+)-", wanted)[1]) if wanted and server.ranges else 0
        size = len(server.content)
        if start >= size:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{size}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            shift = 7 if fault == "another part" else 0
            self.send_header("Content-Range", f"bytes {start + shift}-{size - 1}/{size}")
        if fault != "no length":
            self.send_header("Content-Length", str(size - start))
        if fault == "no length":
            self.send_header("Connection", "close")
        self.end_headers()
        data = server.content[start:]
        with contextlib.suppress(OSError):
            if fault == "drop":
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(2)
            elif fault == "stall":
                self.wfile.write(data[:1000])
                self.wfile.flush()
                time.sleep(1.5)
                self.close_connection = True
            else:
                self.wfile.write(data)
        if fault == "no length":
            self.close_connection = True


@pytest.fixture
def server():
    serving = Server()
    thread = threading.Thread(target=serving.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield serving
    serving.shutdown()
    serving.server_close()


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch):
    monkeypatch.setattr(downloads, "_PAUSE", 0)
    monkeypatch.setattr(downloads, "_TIMEOUT", 0.4)


def get(server, path, size=None, sha256=SHA256, **options):
    return fetch(Download(server.url, size or len(CONTENT), sha256), path, **options)


def only(path):
    """Whether there is that file and nothing else."""
    return os.listdir(path.parent) == [path.name]


def interrupt(server, path, monkeypatch):
    """One attempt, which is cut off."""
    server.faults = ["drop"]
    with monkeypatch.context() as patch:
        patch.setattr(downloads, "_ATTEMPTS", 1)
        with pytest.raises(UserError, match=r"what has arrived \(0\.\d MB\) is kept: run the same command again"):
            get(server, path)
    assert not path.exists()
    return (path.parent / f"{path.name}.part").stat().st_size


def test_a_file_is_fetched_once(server, tmp_path):
    path, seen = tmp_path / "new" / "file.zip", []
    assert get(server, path, progress=lambda *at: seen.append(at))
    assert path.read_bytes() == CONTENT
    assert only(path)
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert not get(server, path)
    assert len(server.asked) == 1


def test_a_dropped_connection_is_resumed(server, tmp_path):
    server.faults = ["drop", "drop", "drop"]
    assert get(server, tmp_path / "file.zip")
    assert (tmp_path / "file.zip").read_bytes() == CONTENT
    assert server.asked[0] is None
    starts = [int(part[6:-1]) for part in server.asked[1:]]
    assert len(starts) == 3
    assert starts == sorted(starts)
    assert starts[0] > 0
    assert only(tmp_path / "file.zip")


def test_a_later_run_resumes(server, tmp_path, monkeypatch):
    kept = interrupt(server, tmp_path / "file.zip", monkeypatch)
    assert get(server, tmp_path / "file.zip")
    assert server.asked[-1] == f"bytes={kept}-"
    assert (tmp_path / "file.zip").read_bytes() == CONTENT


def test_the_checksum_finds_the_mixture_of_two_files(server, tmp_path, monkeypatch):
    server.content = CONTENT[::-1]
    interrupt(server, tmp_path / "file.zip", monkeypatch)
    server.content = CONTENT
    assert get(server, tmp_path / "file.zip")
    assert [part is not None for part in server.asked] == [False, True, False]
    assert (tmp_path / "file.zip").read_bytes() == CONTENT


def test_a_server_without_ranges(server, tmp_path):
    server.ranges, server.faults = False, ["drop"]
    assert get(server, tmp_path / "file.zip")
    assert (tmp_path / "file.zip").read_bytes() == CONTENT


@pytest.mark.parametrize("faults", [["drop", "another part"], [503, 429], ["stall"], ["no length"]])
def test_transient_faults(server, tmp_path, faults):
    server.faults = faults
    assert get(server, tmp_path / "file.zip")
    assert (tmp_path / "file.zip").read_bytes() == CONTENT
    assert only(tmp_path / "file.zip")


@pytest.mark.parametrize(("more", "asked"), [(b"", 0), (b"more", 1)])
def test_a_part_that_is_whole_already(server, tmp_path, more, asked):
    (tmp_path / "file.zip.part").write_bytes(CONTENT + more)
    assert get(server, tmp_path / "file.zip")
    assert len(server.asked) == asked
    assert (tmp_path / "file.zip").read_bytes() == CONTENT


def test_a_wrong_checksum_is_refused_and_not_kept(server, tmp_path):
    with pytest.raises(UserError, match=r"sent another file than the published one .*put it at .*file\.zip"):
        get(server, tmp_path / "file.zip", sha256="0" * 64)
    assert len(server.asked) == 1
    assert not [name for name in os.listdir(tmp_path) if not name.endswith(".lock")]


def test_a_server_that_sends_without_end_is_cut_off(server, tmp_path):
    server.content, server.faults = CONTENT * 3, ["no length"]
    with pytest.raises(UserError, match=f"sends more than its {len(CONTENT):,} bytes; fetch it by hand"):
        get(server, tmp_path / "file.zip")
    assert not [name for name in os.listdir(tmp_path) if not name.endswith(".lock")]


def test_another_size_is_refused_before_it_is_fetched(server, tmp_path):
    with pytest.raises(UserError, match=r"is a file of 1,024,000 bytes instead of 99"):
        get(server, tmp_path / "file.zip", size=99)
    assert not (tmp_path / "file.zip.part").exists()


@pytest.mark.parametrize("status", [403, 404, 410])
def test_a_refusal_is_final(server, tmp_path, status):
    server.faults = [status]
    with pytest.raises(UserError, match=rf"HTTP {status}.*fetch it by hand and put it at .*file\.zip"):
        get(server, tmp_path / "file.zip")
    assert len(server.asked) == 1


def test_a_server_that_never_recovers(server, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "_ATTEMPTS", 3)
    server.faults = [500] * 9
    with pytest.raises(UserError, match=r"500 .*, 3 attempts"):
        get(server, tmp_path / "file.zip")
    assert len(server.asked) == 3


def test_no_server(tmp_path):
    with pytest.raises(UserError, match=r"cannot be fetched \(.*refused.*10 attempts"):
        fetch(Download("http://127.0.0.1:9/x.zip", 9, SHA256), tmp_path / "x.zip")


def test_a_file_of_the_users_own_is_left_alone(server, tmp_path):
    (tmp_path / "file.zip").write_text("mine")
    with pytest.raises(UserError, match=r"is another file .*move it away"):
        get(server, tmp_path / "file.zip")
    assert (tmp_path / "file.zip").read_text() == "mine"


def test_killed_after_the_last_byte_nothing_is_fetched_again(server, tmp_path, monkeypatch):
    path = tmp_path / "file.zip"
    pid = os.fork()
    if pid == 0:
        replace = os.replace

        def killing(source, target):
            if source.endswith(".part"):
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)

        monkeypatch.setattr("os.replace", killing)
        get(server, path)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    asked = len(server.asked)
    get(server, path)
    assert path.read_bytes() == CONTENT
    assert len(server.asked) == asked == 1
    assert only(path)


def test_a_killed_process_leaves_no_lock_beside_a_whole_file(server, tmp_path):
    path = tmp_path / "file.zip"
    path.write_bytes(CONTENT)
    (tmp_path / ".file.zip.lock").touch()
    assert not get(server, path)
    assert only(path)


def test_a_whole_part_with_a_wrong_checksum_is_fetched_again(server, tmp_path):
    (tmp_path / "file.zip.part").write_bytes(CONTENT[::-1])
    assert get(server, tmp_path / "file.zip")
    assert server.asked == [None]
    assert only(tmp_path / "file.zip")


def test_two_at_once(server, tmp_path):
    with (
        locked(tmp_path, "data_dir", ".file.zip.lock"),
        pytest.raises(UserError, match="another process is writing into it"),
    ):
        get(server, tmp_path / "file.zip")
    assert get(server, tmp_path / "file.zip")


def zip_of(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def tar_of(path, members, kind=tarfile.REGTYPE):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kind, len(data) if kind == tarfile.REGTYPE else 0, "/etc/passwd"
            archive.addfile(info, io.BytesIO(data))
    return path


TREE = {"./top/a b/é.txt": b"one", "top/two.txt": b"two" * 99, "readme": b"three"}


@pytest.mark.parametrize("make", [zip_of, tar_of])
def test_an_archive_is_unpacked(make, tmp_path):
    archive = make(tmp_path / "archive", TREE)
    assert unpack(archive, tmp_path / "here", last="readme") == ["top", "readme"]
    files = [path for path in (tmp_path / "here").rglob("*") if path.is_file()]
    found = {path.relative_to(tmp_path / "here").as_posix(): path.read_bytes() for path in files}
    assert found == {name.removeprefix("./"): data for name, data in TREE.items()}


@pytest.mark.parametrize("make", [zip_of, tar_of])
@pytest.mark.parametrize("name", ["../out.txt", "/tmp/out.txt", "top/../../out.txt"])
def test_names_that_lead_outside(make, name, tmp_path):
    archive = make(tmp_path / "archive", {**TREE, name: b"bad"})
    with contextlib.suppress(UserError):  # a tar archive is refused, a zip archive unpacked under a harmless name
        unpack(archive, tmp_path / "in" / "here")
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and tmp_path / "in" / "here" not in path.parents]
    assert outside == [archive]
    assert not os.path.exists("/tmp/out.txt")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices(kind, tmp_path):
    archive = tar_of(tmp_path / "archive", {"top": b""}, kind)
    with pytest.raises(UserError, match="is not unpacked for safety"):
        unpack(archive, tmp_path / "here")
    assert os.listdir(tmp_path / "here") == []


def test_links_in_a_zip(tmp_path):
    """They become files that hold the name of their target."""
    info = zipfile.ZipInfo("top")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr(info, "/etc/passwd")
    unpack(tmp_path / "archive", tmp_path / "here")
    assert not (tmp_path / "here" / "top").is_symlink()


@pytest.mark.parametrize("make", [zip_of, tar_of])
@pytest.mark.parametrize("change", [lambda data: data[: len(data) // 2], lambda data: b"text", lambda data: b""])
def test_damaged_archives(make, change, tmp_path):
    archive = make(tmp_path / "archive", {"top/data": os.urandom(50_000)})
    archive.write_bytes(change(archive.read_bytes()))
    with pytest.raises(UserError, match="delete it and download it again"):
        unpack(archive, tmp_path / "here")
    assert os.listdir(tmp_path / "here") == []


def test_what_is_there_already_stays(tmp_path):
    archive = zip_of(tmp_path / "archive", TREE)
    (tmp_path / "here" / "top").mkdir(parents=True)
    with pytest.raises(UserError, match="top is there already; move it away"):
        unpack(archive, tmp_path / "here")
    assert os.listdir(tmp_path / "here") == ["top"]


def test_a_data_set_is_downloaded_and_unpacked(server, tmp_path, monkeypatch):
    server.content = zip_of(tmp_path / "archive", {"Made/images/a.jpg": b"a", "notes.txt": b"n"}).read_bytes()
    file = Download(server.url, len(server.content), hashlib.sha256(server.content).hexdigest(), "Made")
    monkeypatch.setitem(downloads.DOWNLOADS, "sop", (file,))
    seen = []
    made = download("sop", tmp_path / "data", lambda *at: seen.append(at[0]))
    assert made == [str(tmp_path / "data" / "Made")]
    assert (tmp_path / "data" / "Made" / "images" / "a.jpg").read_bytes() == b"a"
    assert sorted(set(seen)) == ["fetching file.zip", "unpacking file.zip"]
    assert download("sop", tmp_path / "data") == []
    assert download("sop", tmp_path / "data" / "Made") == []
    assert len(server.asked) == 1


def test_where_to_get_what_cannot_be_downloaded(tmp_path):
    for name, says in (
        ("cars196", "devkit"),
        ("inshop", "agreement"),
        ("folder", "only cub200, omniglot, sop"),
    ):
        with pytest.raises(UserError, match=says):
            download(name, tmp_path)
    with pytest.raises(UserError, match="local disk"):
        download("cub200", "gs://bucket/data")
    assert os.listdir(tmp_path) == []
    for files in downloads.DOWNLOADS.values():
        for file in files:
            assert re.fullmatch("[0-9a-f]{64}", file.sha256)
            assert file.name.endswith((".zip", ".tgz"))
