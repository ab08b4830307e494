"""Preparing: every bad image is named, copies are found, an interruption costs nothing, nothing is half written."""

import errno
import itertools
import json
import os
import pathlib
import subprocess
import tarfile
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.preparations import contents, images_of_kinds, made, picture
from tests.fork_server import fork_server
from tfdml.data import load
from tfdml.data.decoding import decode_image
from tfdml.data.faults import describe_duplicates, find_duplicates
from tfdml.data.images import EncodedImages, FileImages
from tfdml.data.pipeline import shuffled
from tfdml.data.records import RecordSettings, check, plan, prepare
from tfdml.data.records.reader import verify
from tfdml.data.records.writer import bad_images_in_words, cut_into_shards
from tfdml.data.transforms import TrainTransform
from tfdml.errors import UserError
from tfdml.io.files import LOCK, listing, remove, write_json

SMALL = RecordSettings(shard_mb=0.01)


def files(folder, contents, split="train", per_class=4, **columns):
    """A data set of files with these contents; None for a file that is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for index, data in enumerate(contents):
        paths.append(str(folder / f"image {index}é.jpg"))
        if data is not None:
            pathlib.Path(paths[-1]).write_bytes(data)
    return made(FileImages(tuple(paths)), np.arange(len(paths)) // per_class, split=split, **columns)


def encoded(*data):
    return made(EncodedImages(tuple(data), tuple(f"image{i}" for i in range(len(data)))), np.arange(len(data)) // 2)


def leftovers(folder):
    return [name for name in os.listdir(folder) if name.startswith((".", "progress"))]


def whole(folder):
    """The bytes of everything that records are made of."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in (".tar", ".parquet")}


def broken(count):
    """Good images, and bad ones of many kinds with the reason that each must get."""
    good = images_of_kinds(count)
    middle = bytearray(picture(1, kind="PNG"))
    middle[len(middle) // 2 : len(middle) // 2 + 50] = bytes(50)
    bad = {
        b"": "empty file",
        None: "missing",
        b"<html>": "not a JPEG, PNG or WebP image: it begins with b'<html>'",
        b"plain text": "not a JPEG, PNG or WebP image: it begins with b'plain text'",
        good[0][:-20]: "truncated JPEG",
        good[1][:-20]: "truncated PNG",
        good[2][:-20]: "truncated WebP",
        bytes(middle): "damaged",
        picture(0, kind="TIFF"): "unsupported type: TIFF",
        bomb(): "too large: 30,000 x 30,000 pixels",
        picture(0, kind="GIF"): "unsupported type: GIF",
    }
    return good, bad


def bomb():
    """A small PNG whose header promises 900 million pixels, with the checksum right."""
    import struct
    import zlib

    data = picture(0, kind="PNG")
    header = b"IHDR" + struct.pack(">II", 30_000, 30_000) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


def test_every_bad_image_is_named_with_its_reason(tmp_path):
    good, bad = broken(12)
    dataset = files(tmp_path / "images", [*good, *bad])
    report = check({"train": dataset})
    faults = report.splits["train"].faults
    assert [fault.index for fault in faults] == list(range(12, 12 + len(bad)))
    for fault, reason in zip(faults, bad.values(), strict=True):
        assert fault.name == dataset.images.paths[fault.index]
        assert fault.reason.startswith(reason)
    text = bad_images_in_words(report)
    assert f"{len(bad)} of {len(dataset)} images are bad (" in text
    assert "2 not a JPEG, PNG or WebP image" in text
    assert "1 damaged" in text
    assert "\n" not in text


def test_bad_images_end_it_or_are_left_out(tmp_path):
    good, bad = broken(12)
    dataset = files(tmp_path / "images", [*good[:5], *bad, *good[5:]])
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"11 of 23 images are bad .*bad_images.txt.*`bad_images='skip'`"):
        prepare({"train": dataset}, out, SMALL)
    assert not (out / "manifest.json").exists()
    lines = (out / "bad_images.txt").read_text(encoding="utf-8").splitlines()
    assert [line.split("\t")[0] for line in lines] == list(dataset.images.paths[5:16])
    with pytest.raises(UserError, match="no finished record files"):
        load("records", out)

    report = prepare({"train": dataset}, out, RecordSettings(shard_mb=0.01, bad_images="skip"))
    assert report.splits["train"].resumed > 0
    records = load("records", out)
    kept = [*range(5), *range(16, 23)]
    assert records.labels.tolist() == dataset.labels[kept].tolist()
    assert contents(records.images, np.arange(12)) == good
    assert [records.images.name(i) for i in range(12)] == [dataset.images.paths[i] for i in kept]
    assert set(records.class_names) == set(records.labels.tolist())
    assert len(verify(str(out))["splits"]["train"]["bad_images"]) == 11
    assert leftovers(out) == []


def test_mended_images_are_taken_and_the_rest_is_kept(tmp_path):
    good = images_of_kinds(12)
    dataset = files(tmp_path / "images", [*good[:7], good[7][:50], *good[8:]])
    out = tmp_path / "out"
    with pytest.raises(UserError, match="1 of 12 images are bad"):
        prepare({"train": dataset}, out, SMALL)
    pathlib.Path(dataset.images.paths[7]).write_bytes(good[7])
    report = prepare({"train": dataset}, out, SMALL)
    found = report.splits["train"]
    assert 0 < found.resumed < len(found.shards)
    assert contents(load("records", out).images, np.arange(12)) == good
    assert not (out / "bad_images.txt").exists()


def test_nothing_is_left_if_all_are_bad(tmp_path):
    with pytest.raises(UserError, match="no image of the train split is left"):
        prepare({"train": encoded(b"", b"")}, tmp_path / "out", RecordSettings(bad_images="skip"))
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_an_image_in_the_way_of_its_reading(tmp_path):
    dataset = files(tmp_path, [picture(0), picture(1)])
    os.unlink(dataset.images.paths[1])
    os.mkdir(dataset.images.paths[1])
    (fault,) = check({"train": dataset}).splits["train"].faults
    assert fault.reason == "a folder, not a file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_image_without_permission(tmp_path):
    dataset = files(tmp_path, [picture(0), picture(1)])
    os.chmod(dataset.images.paths[1], 0)
    (fault,) = check({"train": dataset}).splits["train"].faults
    assert fault.reason == "unreadable (no permission)"


def test_copies_are_found_and_told(tmp_path):
    one, two, three, four = (picture(i) for i in range(4))
    train = files(tmp_path / "train", [one, two, two, three, one, four], per_class=2)
    test = files(tmp_path / "test", [four, picture(9)], split="test")
    report = check({"train": train, "test": test})
    assert [
        ([(image["split"], image["name"]) for image in group["images"]], group["labels_differ"], group["across_splits"])
        for group in report.duplicates
    ] == [
        ([("train", train.images.paths[0]), ("train", train.images.paths[4])], True, False),
        ([("train", train.images.paths[1]), ("train", train.images.paths[2])], True, False),
        ([("train", train.images.paths[5]), ("test", test.images.paths[0])], True, True),
    ]
    text = "\n".join(describe_duplicates(report.duplicates))
    assert "3 images repeat another, in 3 groups" in text
    assert "1 groups ACROSS THE TRAIN/TEST SPLIT" in text
    assert f"{train.images.paths[5]} (train, class 2) = {test.images.paths[0]} (test, class 0)" in text


def test_copies_stay_unless_dropped(tmp_path):
    train = files(tmp_path / "train", [picture(0), picture(1), picture(1), picture(2)])
    test = files(tmp_path / "test", [picture(3), picture(2), picture(4)], split="test")
    splits = {"train": train, "test": test}
    prepare(splits, tmp_path / "all")
    assert len(load("records", tmp_path / "all", "test")) == 3
    assert len(json.loads((tmp_path / "all" / "copies.json").read_text())) == 2

    report = prepare(splits, tmp_path / "dropped", RecordSettings(drop_copies="across"))
    assert report.splits["test"].dropped == [1]
    assert len(load("records", tmp_path / "dropped")) == 4
    assert contents(load("records", tmp_path / "dropped", "test").images, np.arange(2)) == [picture(3), picture(4)]
    left_out = verify(str(tmp_path / "dropped"))["splits"]["test"]["copies_left_out"]
    assert left_out == [test.images.paths[1]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=12))
def test_groups_are_exactly_the_equal_digests(digests):
    dataset = made(EncodedImages((b"",) * len(digests), tuple(map(str, range(len(digests))))), np.arange(len(digests)))
    groups = find_duplicates({"train": (dataset, digests)})
    found = sorted([image["name"] for image in group["images"]] for group in groups)
    names = {digest: [str(i) for i, other in enumerate(digests) if other == digest] for digest in "abc"}
    assert found == sorted(group for group in names.values() if len(group) > 1)


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_shrinking(kind, tmp_path):
    upright = picture(1, (60, 45), "JPEG")
    turned = picture(2, (60, 50), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0")
    small = [picture(3, (32, 80), "PNG"), picture(4, (20, 10), "WEBP")]
    dataset = encoded(upright, turned, *small)
    prepare({"train": dataset}, tmp_path / "out", RecordSettings(shrink=32, shrink_format=kind))
    records = load("records", tmp_path / "out")
    first, second, *rest = contents(records.images, np.arange(4))
    assert rest == small
    for data, original, size in ((first, upright, (32, 43)), (second, turned, (38, 32))):
        expected = TrainTransform("random_crop", resize=32, image_size=32).prepare(decode_image(original))
        assert data[:4] == (b"\x89PNG" if kind == "png" else b"\xff\xd8\xff\xe0")
        assert expected.shape[:2] == size
        found = decode_image(data)
        if kind == "png":
            np.testing.assert_array_equal(found, expected)
        else:
            assert np.abs(found.numpy().astype(int) - expected.numpy()).mean() < 12  # noise, the worst for a JPEG


@pytest.mark.slow
def test_training_at_the_shrunk_size_sees_the_same_pixels(tmp_path):
    dataset = encoded(*(picture(i, (60 + i, 45), kind) for i, kind in enumerate(("JPEG", "PNG", "WEBP", "JPEG"))))
    prepare({"train": dataset}, tmp_path / "out", RecordSettings(shrink=32, shrink_format="png"))
    transform = TrainTransform("random_crop", resize=32, image_size=28)
    for batches in zip(
        shuffled(dataset, 4, transform, num_steps=3),
        shuffled(load("records", tmp_path / "out"), 4, transform, num_steps=3),
        strict=True,
    ):
        np.testing.assert_array_equal(batches[0][0], batches[1][0])


class Stopped(Exception):
    pass


def stop_after(count):
    def progress(done, total, bad):
        if done == count:
            raise Stopped

    return progress


@pytest.mark.parametrize("after", [1, 7, 13, 23])
def test_an_interruption_costs_only_the_shard_under_way(after, tmp_path):
    dataset = files(tmp_path / "images", images_of_kinds(24))
    prepare({"train": dataset, "test": dataset}, tmp_path / "unbroken", SMALL)

    out = tmp_path / "out"
    with pytest.raises(Stopped):
        prepare({"train": dataset, "test": dataset}, out, SMALL, progress=stop_after(after))
    with pytest.raises(UserError, match="no finished record files"):
        load("records", out)
    finished = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    report = prepare({"train": dataset, "test": dataset}, out, SMALL)
    assert report.splits["train"].resumed == len(finished)
    assert all((out / name).stat().st_mtime_ns == time for name, time in finished.items())
    assert whole(out) == whole(tmp_path / "unbroken")
    assert leftovers(out) == []


@pytest.mark.slow
def test_a_killed_process_is_taken_over_from(tmp_path):
    dataset = files(tmp_path / "images", images_of_kinds(24))
    out = tmp_path / "out"
    script = f"""
import os, signal
import numpy as np
from tests.data.preparations import made
from tfdml.data.images import FileImages
from tfdml.data.records import RecordSettings, prepare

def kill(done, total, bad):
    if done == 13:
        os.kill(os.getpid(), signal.SIGKILL)

dataset = made(FileImages({dataset.images.paths!r}), np.arange(24) // 4)
prepare({{"train": dataset}}, {str(out)!r}, RecordSettings(shard_mb=0.01), progress=kill)
"""
    killed = fork_server().run_script(script)
    assert killed.returncode == -9
    report = prepare({"train": dataset}, out, SMALL)
    assert report.splits["train"].resumed > 0
    assert leftovers(out) == []
    assert len(load("records", out)) == 24


def test_a_shard_cut_short_is_made_again(tmp_path):
    dataset = files(tmp_path / "images", images_of_kinds(24))
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        prepare(
            {"train": dataset},
            out,
            SMALL,
            progress=lambda done, *_: (_ for _ in ()).throw(Stopped) if done == 20 else 0,
        )
    first, *_, last = sorted(out.glob("*.tar"))
    first.write_bytes(first.read_bytes()[:-1])
    last.unlink()
    prepare({"train": dataset}, out, SMALL)
    verify(str(out))


def test_finished_is_finished(tmp_path):
    dataset = encoded(*images_of_kinds(6))
    prepare({"train": dataset}, tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert prepare({"train": dataset}, tmp_path / "out").finished_before
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("finished", [True, False])
def test_another_job_is_refused_by_name(finished, tmp_path):
    dataset, out = encoded(*images_of_kinds(6)), tmp_path / "out"
    if finished:
        prepare({"train": dataset}, out)
    else:
        with pytest.raises(UserError, match="bad"):
            prepare({"train": encoded(b"", *images_of_kinds(6)[1:])}, out)
    with pytest.raises(UserError, match="shrink was 0 and is now 20"):
        prepare({"train": dataset}, out, RecordSettings(shrink=20))
    with pytest.raises(UserError, match="images of train was "):
        prepare({"train": dataset.take([0, 1, 2])}, out)
    with pytest.raises(UserError, match="images of test was null"):
        prepare({"train": dataset, "test": dataset}, out)


@pytest.mark.parametrize("name", ["precious.txt", "manifest.json", "progress.json"])
def test_a_folder_of_others_is_refused_untouched(name, tmp_path):
    (tmp_path / name).write_text('{"mine": 1}')
    with pytest.raises(UserError, match="a new or an empty folder"):
        prepare({"train": encoded(picture(0))}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with pytest.raises(UserError, match="is a file"):
        prepare({"train": encoded(picture(0))}, tmp_path / name)


def test_two_at_once_in_one_folder(tmp_path):
    dataset = encoded(*images_of_kinds(6))
    started, go_on = threading.Event(), threading.Event()

    def hold(done, total, bad):
        started.set()
        go_on.wait(60)

    thread = threading.Thread(target=lambda: prepare({"train": dataset}, tmp_path / "out", progress=hold))
    thread.start()
    assert started.wait(60)
    try:
        with pytest.raises(UserError, match=f"`out={tmp_path}/out`: another process is writing into it"):
            prepare({"train": dataset}, tmp_path / "out")
    finally:
        go_on.set()
        thread.join()
    assert len(load("records", tmp_path / "out")) == 6


def test_a_remote_lock(tmp_path):
    dataset = encoded(*images_of_kinds(6))
    out = "memory://preparation/locked"
    write_json(f"{out}/{LOCK}", {"token": "another's"})
    with pytest.raises(UserError, match=f"delete {out}/{LOCK} if it has ended"):
        prepare({"train": dataset}, out)
    remove(f"{out}/{LOCK}")
    prepare({"train": dataset}, out)
    assert LOCK not in listing(out)


def full_disk():
    """How members are added to an archive on a disk that has no room for the second shard."""

    def addfile(archive, member, file):
        addfile.real(archive, member, file)
        if "-00001-" in archive.name:
            raise OSError(errno.ENOSPC, "No space left on device")

    addfile.real = tarfile.TarFile.addfile
    return addfile


def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    dataset = files(tmp_path / "images", images_of_kinds(24))
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(tarfile.TarFile, "addfile", full_disk())
        with pytest.raises(
            UserError, match=r"train-00001-of-.* the disk is full, and .* needs about [\d.,]+ (MB|bytes) \("
        ):
            prepare({"train": dataset}, out, SMALL)
    assert [path.name[:11] for path in sorted(out.glob("*.tar"))] == ["train-00000"]
    assert not [name for name in os.listdir(out) if name.startswith(".")]
    report = prepare({"train": dataset}, out, SMALL)
    assert report.splits["train"].resumed == 1
    verify(str(out))


def test_what_a_killed_preparation_left_is_removed_by_the_next(tmp_path):
    dataset = files(tmp_path / "images", images_of_kinds(4))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".partial-1-train-00000-of-00001.tar").write_bytes(b"half")
    prepare({"train": dataset}, tmp_path / "out", SMALL)
    assert not [name for name in os.listdir(tmp_path / "out") if name.startswith(".")]


def test_a_disk_that_is_really_full(small_disk, tmp_path, monkeypatch):
    tiny_disk = small_disk(2**20)
    dataset = files(tmp_path / "images", [picture(i, (300, 200), "PNG") for i in range(8)])
    with pytest.raises(UserError, match=r"the records need about 1\.\d MB, and 1\.0 MB are free"):
        prepare({"train": dataset}, tiny_disk / "out", RecordSettings(shard_mb=0.3))
    assert os.listdir(tiny_disk / "out") == []

    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 2**40}))
    with pytest.raises(UserError, match=r"tar cannot be written: the disk is full, and this file needs about 0\.\d MB"):
        prepare({"train": dataset}, tiny_disk / "out", RecordSettings(shard_mb=0.3))
    kept = sorted(path.name for path in (tiny_disk / "out").glob("*.tar"))
    assert 0 < len(kept) < 4
    assert not [name for name in os.listdir(tiny_disk / "out") if name.startswith(".")]
    subprocess.run(["mount", "-o", "remount,size=4m", tiny_disk], check=True)
    report = prepare({"train": dataset}, tiny_disk / "out", RecordSettings(shard_mb=0.3))
    assert report.splits["train"].resumed == len(kept)
    verify(str(tiny_disk / "out"))


def test_a_plan_writes_nothing(tmp_path):
    dataset = files(tmp_path / "images", [*images_of_kinds(5), None])
    size = sum(map(len, images_of_kinds(5)))
    assert plan({"train": dataset}, RecordSettings(shard_mb=1e-6)) == {"train": (6, size, 6)}
    assert os.listdir(tmp_path) == ["images"]


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 60))
def test_shards_are_cut_where_they_are_full(sizes, limit):
    starts = cut_into_shards(sizes, limit)
    assert starts[:1] == ([0] if sizes else [])
    for start, stop in itertools.pairwise([*starts, len(sizes)]):
        assert sum(sizes[start : stop - 1]) < limit
        assert sum(sizes[start:stop]) >= limit or stop == len(sizes)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shrink": -1}, {"shard_mb": 0}, {"workers": 0}, {"max_pixels": 0}, {"shrink_format": "webp"},
        {"bad_images": "ignore"}, {"drop_copies": "all"}, {"shard_mb": float("nan")},
    ],
)  # fmt: skip
def test_wrong_settings_are_named(wrong):
    (name,) = wrong
    with pytest.raises(UserError, match=f"`{name}="):
        RecordSettings(**wrong)
