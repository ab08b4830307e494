"""tfdml prepare: what it prints, what it writes, how it ends."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.cli.commands import finished
from tests.cli.conftest import ROOT
from tests.data.preparations import images_of_kinds, picture
from tfdml.data import load


@pytest.fixture
def photos(tmp_path):
    """Four classes of six images."""
    for index, data in enumerate(images_of_kinds(24)):
        folder = tmp_path / "photos" / f"class {index // 6} é"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index:02d}.jpg").write_bytes(data)
    return tmp_path / "photos"


def error_of(done):
    """The one line that says what was wrong."""
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error:" in line]
    return line


@pytest.mark.slow
def test_a_folder_of_photos_becomes_records(photos, tmp_path):
    flags = ["--dataset=folder", f"--data_dir={photos}", f"--out={tmp_path / 'out'}", "--shard_mb=0.01"]
    planned = finished("prepare", *flags, "--dry_run")
    assert planned.returncode == 0
    assert "train: 12 images" in planned.stdout
    assert not (tmp_path / "out").exists()

    done = finished("prepare", *flags)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "train: 12 of 12 images" in done.stdout
    assert "none of the 24 images is bad" in done.stdout
    for split in ("train", "test"):
        files, records = load("folder", photos, split), load("records", tmp_path / "out", split)
        np.testing.assert_array_equal(files.labels, records.labels)
        assert files.class_names == records.class_names

    again = finished("prepare", *flags)
    assert (again.returncode, again.stdout) == (0, f"{tmp_path / 'out'} is finished already: nothing to do\n")
    verified = finished("prepare", "--verify", f"--out={tmp_path / 'out'}")
    assert verified.returncode == 0
    assert "test: 12 images of 2 classes" in verified.stdout

    shard = next((tmp_path / "out").glob("test-00000-*.tar"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert shard.name in error_of(finished("prepare", "--verify", f"--out={tmp_path / 'out'}"))
    assert "was 0 and is now 20" in error_of(finished("prepare", *flags, "--shrink=20"))


@pytest.mark.slow
def test_bad_images_are_listed(photos, tmp_path):
    (photos / "class 0 é" / "00.jpg").write_bytes(b"")
    (photos / "class 3 é" / "20.jpg").write_bytes(picture(0)[:-30])
    flags = ["--dataset=folder", f"--data_dir={photos}"]
    done = finished("prepare", *flags, "--check_only")
    assert "2 images are bad" in error_of(done)
    assert f"{photos}/class 0 é/00.jpg: empty file" in done.stdout
    assert f"{photos}/class 3 é/20.jpg: truncated JPEG" in done.stdout
    assert "2 of 24 images are bad (1 empty file, 1 truncated JPEG)" in done.stdout

    out = [f"--out={tmp_path / 'out'}"]
    assert "--bad_images=skip" in error_of(finished("prepare", *flags, *out))
    assert len((tmp_path / "out" / "bad_images.txt").read_text(encoding="utf-8").splitlines()) == 2
    done = finished("prepare", *flags, *out, "--bad_images=skip")
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(load("records", tmp_path / "out")) + len(load("records", tmp_path / "out", "test")) == 22


@pytest.mark.slow
def test_a_kill_and_a_second_one_at_once(command, tmp_path):
    out = tmp_path / "out"
    flags = ["--dataset=glyphs", "--dataset_options=size=64,images_per_class=6", f"--out={out}", "--shard_mb=1"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "bin" / "prepare"), *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 240
    while not list(out.glob("train-00001-*.tar")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGSTOP)
    assert f"process {process.pid} on" in error_of(command("prepare", *flags))
    process.kill()
    process.wait()
    done = command("prepare", *flags)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "kept from an earlier run" in done.stdout
    assert "taking over" in done.stderr
    assert [path.name for path in out.iterdir() if path.name.startswith((".", "job", "progress"))] == []
    assert command("prepare", "--verify", f"--out={out}").returncode == 0


@pytest.mark.slow
def test_training_from_records_ends_as_from_the_source(command, finished_run, tiny_flags, tmp_path):
    out = tmp_path / "records"
    glyphs = [flag for flag in tiny_flags if flag.startswith("--dataset")]
    assert command("prepare", *glyphs, f"--out={out}").returncode == 0
    rest = [flag for flag in tiny_flags if not flag.startswith("--dataset")]
    run = tmp_path / "run"
    done = command("train", "--dataset=records", f"--data_dir={out}", *rest, f"--run_dir={run}", "--checkpoint_steps=2")
    assert done.returncode == 0, done.stderr[-3000:]
    expected, found = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (finished_run, run)
    )
    for one, other in zip(expected, found, strict=True):
        assert one.get("train") == other.get("train")
        assert one["test"] == other["test"]
    one, other = (np.load(max((folder / "checkpoints").glob("step-*.npz"))) for folder in (finished_run, run))
    for name in set(one.files) - {"state"}:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
