"""Data sets from a server: checked, unpacked inside their folder, and never half there; copies keep
what is known."""

import contextlib
import hashlib
import http.server
import io
import tarfile
import threading
import zipfile

import numpy as np
import pytest
import tensorflow as tf

from tests.data.preparations import contents, images_of_kinds, made, picture
from tfdml.data import EncodedImages, decode_image, load, preparation, prepare
from tfdml.data.decoding import format_of
from tfdml.data.preparation import Download, check_images, download, fetch, unpack
from tfdml.data.transforms import resize_to_side
from tfdml.errors import UserError
from tfdml.evaluation.views import ViewItems


class Server(http.server.ThreadingHTTPServer):
    """Serves files by name; `faults` are the answers before the first good one."""

    daemon_threads = True

    def __init__(self, **served):
        super().__init__(("127.0.0.1", 0), Handler)
        self.served, self.faults, self.asked = served, [], []

    def file(self, name, folder=None, content=None):
        content = self.served[name] if content is None else content
        url = f"http://127.0.0.1:{self.server_address[1]}/{name}?download=1"
        return Download(url, len(content), hashlib.sha256(content).hexdigest(), folder)


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        name = self.path[1:].partition("?")[0]
        self.server.asked.append(name)
        data, fault = (
            self.server.served[name],
            self.server.faults.pop(0) if self.server.faults else 200,
        )
        self.send_response(fault if isinstance(fault, int) else 200)
        if fault != "endless":
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(OSError):  # of a client that hangs up
            while fault == "endless":
                self.wfile.write(bytes(1000))
        self.wfile.write(data[: len(data) // 2] if fault != 200 else data)


@pytest.fixture
def serve(monkeypatch):
    """Start a server of some files."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    servers = []

    def start(**served):
        servers.append(Server(**{name.replace("_", "."): data for name, data in served.items()}))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()


def archive(kind, **members):
    """An archive of files."""
    file = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as target:
            for name, data in members.items():
                target.writestr(name, data)
    else:
        with tarfile.open(fileobj=file, mode="w:gz") as target:
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                target.addfile(info, io.BytesIO(data))
    return file.getvalue()


@pytest.mark.parametrize("kind", ["zip", "tgz"])
def test_a_data_set_is_fetched_unpacked_and_then_there(serve, tmp_path, monkeypatch, kind):
    server = serve(
        **{
            f"birds_{kind}": archive(
                kind, **{"birds/a.txt": b"a", "birds/b/c.txt": b"c", "more.txt": b"m"}
            )
        }
    )
    monkeypatch.setitem(preparation.DOWNLOADS, "cub200", (server.file(f"birds.{kind}", "birds"),))
    reports = []
    new = download("cub200", tmp_path, lambda *report: reports.append(report))
    assert new == [str(tmp_path / "birds")]
    assert (tmp_path / "birds" / "b" / "c.txt").read_bytes() == b"c"
    assert {path.name for path in tmp_path.iterdir()} == {"birds", f"birds.{kind}", "more.txt"}
    assert reports[-1][0] == f"fetching birds.{kind}"
    assert reports[-1][1] == reports[-1][2] > 0
    assert download("cub200", tmp_path / "birds") == []
    assert server.asked == [f"birds.{kind}"]


def test_an_interrupted_transfer_is_tried_again(serve, tmp_path):
    server = serve(x_zip=bytes(10_000))
    server.faults = ["drop", 503]
    path = fetch(server.file("x.zip"), tmp_path)
    assert path == str(tmp_path / "x.zip")
    assert len(server.asked) == 3
    assert [each.name for each in tmp_path.iterdir()] == ["x.zip"]


@pytest.mark.parametrize("fault", ["another file", 404, "gone", "endless", "longer"])
def test_what_cannot_be_fetched_leaves_nothing(serve, tmp_path, fault):
    server = serve(x_zip=b"content")
    file = server.file("x.zip", content={"another file": b"another", "longer": b"short"}.get(fault))
    server.faults = [fault] * 3 if fault in (404, "endless") else []
    if fault == "gone":
        server.shutdown()
        server.server_close()
    with pytest.raises(UserError, match=r"x\.zip\?download=1 cannot be fetched"):
        fetch(file, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_archives_are_unpacked_inside_their_folder_or_not_at_all(tmp_path):
    outside = tmp_path / "outside.tgz"
    outside.write_bytes(archive("tgz", **{"../evil.txt": b"x", "birds/a.txt": b"a"}))
    damaged = tmp_path / "damaged.zip"
    damaged.write_bytes(archive("zip", **{"birds/a.txt": bytes(1000)})[:-40])
    for path in (outside, damaged):
        with pytest.raises(UserError, match=rf"{path.name} cannot be unpacked into"):
            unpack(path, tmp_path / "target", "birds")
    assert list((tmp_path / "target").iterdir()) == []
    assert not (tmp_path / "evil.txt").exists()


def _held(data):
    return EncodedImages(tuple(data), tuple(f"{i}.jpg" for i in range(len(data))))


@pytest.fixture
def splits():
    images, names = _held(images_of_kinds(12)), {0: "a/b", 1: "a:b", 2: "Café", 3: "x"}
    labels = np.arange(12) // 3
    columns = {
        "super_labels": labels // 2,
        "groups": np.arange(12) % 5,
        "texts": [f"text, {i}" for i in range(12)],
    }
    train = made(images, labels, names, **columns).take(np.arange(6))
    return {
        "train": train,
        "test": made(images, labels, names, is_query=np.arange(12) % 3 == 0, **columns).take(
            range(6, 12)
        ),
    }


def test_a_copy_keeps_what_is_known_of_the_images(splits, tmp_path):
    assert prepare(splits, tmp_path / "out") == {"train": [], "test": []}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    for split, dataset in splits.items():
        copy = load("list", tmp_path / "out" / "images.csv", split)
        assert contents(copy.images, range(6)) == contents(dataset.images, range(6))
        for data, path in zip(contents(copy.images, range(6)), copy.names, strict=True):
            assert path.endswith(format_of(data).extensions)
        names = [dataset.class_names[label] for label in dataset.labels.tolist()]
        assert [copy.class_names[label] for label in copy.labels.tolist()] == names
        for field in ("super_labels", "groups", "is_query", "texts"):
            np.testing.assert_array_equal(getattr(copy, field), getattr(dataset, field))


def test_classes_that_a_list_would_merge_are_not_copied(tmp_path):
    dataset = made(_held(images_of_kinds(4)), [0, 0, 1, 1], {0: "crane", 1: "crane"})
    with pytest.raises(UserError, match="classes of a copy go by name, and some have the same"):
        prepare({"train": dataset}, tmp_path / "out")


def test_images_are_shrunk_as_training_resizes_them(tmp_path):
    turned = picture(
        2, (60, 50), exif=b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0"
    )
    small = [picture(3, (32, 80), "PNG"), picture(4, (20, 10), "WEBP"), picture(5, (180, 2))]
    data = [picture(1, (60, 45)), turned, *small]
    dataset = made(_held(data), [0, 0, 1, 1, 1])
    prepare({"train": dataset, "test": dataset.take([2])}, tmp_path / "out", shrink=32)
    copies = contents(load("list", tmp_path / "out" / "images.csv").images, range(5))
    assert copies[2:] == small
    for copy, original, size in zip(copies, data, ((32, 43), (38, 32)), strict=False):
        expected = resize_to_side(decode_image(tf.constant(original)), 32, "shorter")
        assert expected.shape[:2] == size
        assert copy == tf.io.encode_jpeg(expected, "rgb", quality=95)


def test_bad_images_end_it_or_are_left_out(tmp_path):
    good = images_of_kinds(6)
    bad = [b"", b"text", good[0][:-20], picture(0, kind="GIF")]
    dataset = made(_held([*good[:3], *bad, *good[3:]]), [0] * 5 + [1] * 5)
    faults = check_images({"train": dataset})["train"]
    assert [fault.index for fault in faults] == [3, 4, 5, 6]
    with pytest.raises(UserError, match="4 of 10 images are bad"):
        prepare({"train": dataset}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    splits = {"train": dataset, "test": dataset.take([0])}
    assert prepare(splits, tmp_path / "out", bad_images="skip") == {"train": faults, "test": []}
    assert contents(load("list", tmp_path / "out" / "images.csv").images, range(6)) == good
    with pytest.raises(UserError, match="holds files already"):
        prepare({"train": dataset}, tmp_path / "out", bad_images="skip")
    with pytest.raises(UserError, match="4 of 4 images are bad"):
        prepare({"train": dataset.take(range(3, 7))}, tmp_path / "none", bad_images="skip")


@pytest.mark.parametrize("labeled", [True, False])
def test_an_image_with_several_texts_is_copied_once_with_all_of_them(labeled, tmp_path):
    files = [picture(number) for number in range(4)]
    rows = ["path,text,split" + ",label" * labeled]
    for number in (0, 1, 0, 2, 3, 0, 2):
        split = "train" if number < 2 else "test"
        rows.append(f"{number}.jpg,text {len(rows)},{split}" + ",bus" * labeled)
        (tmp_path / f"{number}.jpg").write_bytes(files[number])
    (tmp_path / "list.csv").write_text("\n".join(rows))
    splits = {}
    copies = {}
    for split in ("train", "test"):
        splits[split] = load("list", tmp_path / "list.csv", split)
    counts = []
    prepare(splits, tmp_path / "out", progress=lambda *count: counts.append(count))
    assert counts[-1] == (4, 4, 0)
    for split in splits:
        copies[split] = load("list", tmp_path / "out" / "images.csv", split)
        original, copy = ViewItems.of(splits[split]), ViewItems.of(copies[split])
        assert copies[split].texts.tolist() == splits[split].texts.tolist()
        assert len(copy.rows) == len(original.rows) == 2
        for labels, expected in zip(copy.connected(), original.connected(), strict=True):
            np.testing.assert_array_equal(labels, expected)
    assert sum(path.is_file() for path in (tmp_path / "out").rglob("*.jpg")) == 4
    assert contents(copies["train"].images, [0, 1, 2]) == [files[0], files[1], files[0]]


def test_bad_images_with_several_texts_count_once(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"text")
    (tmp_path / "b.jpg").write_bytes(picture(1))
    rows = ["path,text,label,split"]
    rows += [f"{name}.jpg,{number},x,train" for number, name in enumerate("babaa")]
    (tmp_path / "list.csv").write_text("\n".join(rows))
    dataset = load("list", tmp_path / "list.csv")
    (fault,) = check_images({"train": dataset})["train"]
    assert fault.index == 1
    with pytest.raises(UserError, match="1 of 2 images is bad"):
        prepare({"train": dataset}, tmp_path / "out")


def test_a_class_that_no_folder_can_be_named_by_is_refused_before_images_are_read(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(preparation, "converted_images", None)
    for name in ("x" * 256, "\u00e9" * 128):
        dataset = made(_held(images_of_kinds(2)), [0, 1], {0: "bus", 1: name})
        with pytest.raises(UserError, match=r"class .*\.\.\. would have a name of 256 bytes"):
            prepare({"train": dataset}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
