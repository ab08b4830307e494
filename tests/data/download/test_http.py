"""Downloading from a server that does all that servers do, and unpacking archives that want out of their folder."""

import contextlib
import fcntl
import hashlib
import http.server
import io
import os
import re
import tarfile
import threading
import time
import zipfile

import pytest

from tfdml.data.download import publishers
from tfdml.data.download.archives import unpack
from tfdml.data.download.http import RemoteFile, fetch
from tfdml.errors import UserError

CONTENT = bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves one file; a list of faults says what goes wrong with each answer in turn."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.tag, self.ranges = CONTENT, '"one"', True
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
        server.asked.append((wanted, self.headers.get("If-Range")))
        fault = server.faults.pop(0) if server.faults else None
        if isinstance(fault, int):
            self.send_response(fault)
            self.send_header("Content-Length", "0")
            self.send_header("Retry-After", "0")
            self.end_headers()
            return
        same = self.headers.get("If-Range") in (None, server.tag)
        start = int(re.match(r"bytes=(\d+)-", wanted)[1]) if wanted and same and server.ranges else 0
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
        if server.tag:
            self.send_header("ETag", server.tag)
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


def get(server, path, **options):
    remote = RemoteFile(server.url, options.pop("size", len(CONTENT)), options.pop("sha256", SHA256))
    return fetch(remote, path, backoff=0.01, **options)


def only(path):
    """Whether there is that file and nothing beside it."""
    return os.listdir(path.parent) == [path.name]


def test_a_file_is_fetched_once(server, tmp_path):
    path, seen = tmp_path / "new" / "file.zip", []
    assert get(server, path, progress=lambda *at: seen.append(at))
    assert path.read_bytes() == CONTENT
    assert only(path)
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert not get(server, path)
    assert len(server.asked) == 1


@pytest.mark.parametrize("sha256", [SHA256, None])
def test_a_dropped_connection_is_gone_on_with(server, tmp_path, sha256):
    server.faults = ["drop", "drop", "drop"]
    assert get(server, tmp_path / "file.zip", sha256=sha256)
    assert (tmp_path / "file.zip").read_bytes() == CONTENT
    assert server.asked[0] == (None, None)
    assert [tag for _, tag in server.asked[1:]] == ['"one"'] * 3
    starts = [int(part[6:-1]) for part, _ in server.asked[1:]]
    assert starts == sorted(starts)
    assert starts[0] > 0
    assert only(tmp_path / "file.zip")


def test_a_later_run_goes_on(server, tmp_path):
    server.faults = ["drop"]
    with pytest.raises(UserError, match=r"what has arrived \(0\.\d MB\) is kept: run the same command again"):
        get(server, tmp_path / "file.zip", attempts=1)
    assert not (tmp_path / "file.zip").exists()
    kept = (tmp_path / "file.zip.part").stat().st_size
    assert get(server, tmp_path / "file.zip")
    assert server.asked[-1] == (f"bytes={kept}-", '"one"')
    assert (tmp_path / "file.zip").read_bytes() == CONTENT


def test_a_file_that_changed_meanwhile_is_fetched_anew(server, tmp_path):
    server.content, server.faults = CONTENT[::-1], ["drop"]
    with pytest.raises(UserError):
        get(server, tmp_path / "file.zip", attempts=1)
    server.content, server.tag = CONTENT, '"two"'
    assert get(server, tmp_path / "file.zip", sha256=None)
    assert server.asked[-1][1] == '"one"'
    assert (tmp_path / "file.zip").read_bytes() == CONTENT


def test_without_tags_the_checksum_finds_the_mixture(server, tmp_path):
    server.tag, server.content, server.faults = None, CONTENT[::-1], ["drop"]
    with pytest.raises(UserError):
        get(server, tmp_path / "file.zip", attempts=1)
    server.content = CONTENT
    assert get(server, tmp_path / "file.zip")
    assert [part is not None for part, _ in server.asked] == [False, True, False]
    assert (tmp_path / "file.zip").read_bytes() == CONTENT


def test_without_tag_or_checksum_it_starts_anew(server, tmp_path):
    server.tag, server.faults = None, ["drop"]
    assert get(server, tmp_path / "file.zip", sha256=None)
    assert server.asked == [(None, None)] * 2


def test_a_server_without_ranges(server, tmp_path):
    server.ranges, server.faults = False, ["drop"]
    assert get(server, tmp_path / "file.zip")
    assert (tmp_path / "file.zip").read_bytes() == CONTENT


@pytest.mark.parametrize("faults", [["drop", "another part"], [503, 429], ["stall"], ["no length"]])
def test_passing_faults(server, tmp_path, faults):
    server.faults = faults
    assert get(server, tmp_path / "file.zip", timeout=0.4)
    assert (tmp_path / "file.zip").read_bytes() == CONTENT
    assert only(tmp_path / "file.zip")


def test_a_part_that_is_whole_already(server, tmp_path):
    (tmp_path / "file.zip.part").write_bytes(CONTENT)
    assert get(server, tmp_path / "file.zip")
    assert server.asked == []
    (tmp_path / "other.zip.part").write_bytes(CONTENT)
    assert get(server, tmp_path / "other.zip", size=None)
    assert (tmp_path / "other.zip").read_bytes() == CONTENT


def test_more_than_the_server_has(server, tmp_path):
    (tmp_path / "file.zip.part").write_bytes(CONTENT + b"more")
    assert get(server, tmp_path / "file.zip")
    assert (tmp_path / "file.zip").read_bytes() == CONTENT


def test_a_wrong_checksum_is_refused_and_not_kept(server, tmp_path):
    with pytest.raises(UserError, match=r"sent a file that has the SHA-256 .* instead of 0000.*put it at .*file\.zip"):
        get(server, tmp_path / "file.zip", sha256="0" * 64)
    assert (tmp_path / "file.zip.part").stat().st_size == 0
    assert not (tmp_path / "file.zip").exists()


def test_another_size_is_refused_before_it_is_fetched(server, tmp_path):
    with pytest.raises(UserError, match=r"is a file of 1,024,000 bytes instead of 99"):
        get(server, tmp_path / "file.zip", size=99)
    assert (tmp_path / "file.zip.part").stat().st_size == 0


@pytest.mark.parametrize("status", [403, 404, 410])
def test_a_refusal_is_final(server, tmp_path, status):
    server.faults = [status]
    with pytest.raises(UserError, match=rf"HTTP {status}.*fetch it by hand and put it at .*file\.zip"):
        get(server, tmp_path / "file.zip")
    assert len(server.asked) == 1


def test_a_server_that_never_recovers(server, tmp_path):
    server.faults = [500] * 9
    with pytest.raises(UserError, match=r"HTTP 500 .*, 3 times in a row"):
        get(server, tmp_path / "file.zip", attempts=3)
    assert len(server.asked) == 3


def test_no_server(tmp_path):
    with pytest.raises(UserError, match=r"refused, 2 times in a row"):
        fetch(RemoteFile("http://127.0.0.1:9/x.zip"), tmp_path / "x.zip", attempts=2, backoff=0.01)
    with pytest.raises(UserError, match="only http and https"):
        fetch(RemoteFile("file:///etc/passwd"), tmp_path / "x.zip")


def test_a_file_of_the_users_own_is_left_alone(server, tmp_path):
    (tmp_path / "file.zip").write_text("mine")
    with pytest.raises(UserError, match=r"is there already but has 4 bytes .*move it away"):
        get(server, tmp_path / "file.zip")
    assert (tmp_path / "file.zip").read_text() == "mine"


def test_a_small_disk_is_told_before_fetching(server, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100_000}))
    with pytest.raises(UserError, match=r"needs 1 MB more, and 0 MB are free"):
        get(server, tmp_path / "file.zip")


def test_two_at_once(server, tmp_path):
    with open(tmp_path / "file.zip.part", "wb") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is fetching"):
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
@pytest.mark.parametrize("name", ["../out.txt", "/tmp/out.txt", "top/../../out.txt", "C:/out.txt", "top\\..\\out.txt"])
def test_names_that_lead_outside(make, name, tmp_path):
    archive = make(tmp_path / "archive", {**TREE, name: b"bad"})
    with pytest.raises(UserError, match="leads outside its folder"):
        unpack(archive, tmp_path / "in" / "here")
    assert sorted(os.path.relpath(path, tmp_path) for path in tmp_path.rglob("*")) == ["archive", "in", "in/here"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices(kind, tmp_path):
    archive = tar_of(tmp_path / "archive", {"top": b""}, kind)
    with pytest.raises(UserError, match="holds the link or device 'top'"):
        unpack(archive, tmp_path / "here")
    assert os.listdir(tmp_path / "here") == []


def test_links_in_a_zip(tmp_path):
    info = zipfile.ZipInfo("top")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(UserError, match="holds the link 'top'"):
        unpack(tmp_path / "archive", tmp_path / "here")


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


def test_an_archive_too_large_for_the_disk(tmp_path, monkeypatch):
    archive = zip_of(tmp_path / "archive", TREE)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 99}))
    with pytest.raises(UserError, match="free some space"):
        unpack(archive, tmp_path / "here")


def test_a_data_set_is_obtained(server, tmp_path, monkeypatch):
    server.content = zip_of(tmp_path / "archive", {"Made/images/a.jpg": b"a", "notes.txt": b"n"}).read_bytes()
    file = RemoteFile(server.url, len(server.content), hashlib.sha256(server.content).hexdigest())
    monkeypatch.setitem(publishers.OFFERS, "sop", (publishers.Offer(file, makes="Made"),))
    seen = []
    made = publishers.obtain("sop", tmp_path / "data", lambda *at: seen.append(at[0]))
    assert made == [str(tmp_path / "data" / "Made")]
    assert (tmp_path / "data" / "Made" / "images" / "a.jpg").read_bytes() == b"a"
    assert sorted(set(seen)) == ["fetching file.zip", "unpacking file.zip"]
    assert publishers.obtain("sop", tmp_path / "data") == []
    assert publishers.obtain("sop", tmp_path / "data" / "Made") == []
    assert len(server.asked) == 1


def test_where_to_get_what_cannot_be_downloaded(tmp_path):
    for name, says in (
        ("cars196", "devkit"),
        ("inshop", "agreement"),
        ("tfds", "download=true"),
        ("folder", "only cub200, omniglot, sop"),
    ):
        with pytest.raises(UserError, match=says):
            publishers.obtain(name, tmp_path)
    with pytest.raises(UserError, match="local disk"):
        publishers.obtain("cub", "gs://bucket/data")
    assert os.listdir(tmp_path) == []
    for offers in publishers.OFFERS.values():
        for offer in offers:
            assert re.fullmatch("[0-9a-f]{64}", offer.file.sha256)
            assert offer.name.endswith((".zip", ".tgz"))
