"""tfdml embed: what it writes, and resuming after a kill."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.cli.commands import ROOT
from tfdml.embeddings.files import read_embeddings
from tfdml.errors import UserError

SIZES = ["--split=all", "--batch_size=16", "--rows_per_file=64"]


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_what_is_written_and_after_a_kill_the_same_bytes(finished_run, commands, tmp_path):
    embedded = tmp_path / "whole"
    commands.printed("embed", f"--model={finished_run}", f"--out={embedded}", *SIZES)
    stored = read_embeddings(embedded)
    assert stored.embeddings.shape == (1280, 16)
    np.testing.assert_allclose(np.linalg.norm(stored.embeddings, axis=1), 1.0, atol=1e-5)
    assert (stored.roles == "train").sum() == 213 * 4
    assert (stored.roles == "test").sum() == 107 * 4
    # Classes of the two splits share no id, and each is in one piece of rows.
    assert not set(stored.split("train").labels) & set(stored.split("test").labels)
    assert len(set(stored.names)) == 1280
    assert stored.manifest["view"] == {"resize": 32, "image_size": 28, "resize_mode": "shorter"}
    assert stored.manifest["model"]["source"] == str(finished_run)
    assert stored.manifest["dataset"] == {
        "name": "glyphs",
        "options": "images_per_class=4, size=32",
        "split": "all",
    }

    flags = [f"--model={finished_run}", f"--out={tmp_path / 'x'}", *SIZES]
    started = subprocess.Popen(
        [sys.executable, str(ROOT / "bin" / "embed"), *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    while not (tmp_path / "x" / "part-000002.parquet").exists() and started.poll() is None:
        time.sleep(0.01)
    os.kill(started.pid, signal.SIGSTOP)
    assert started.poll() is None, started.stdout.read()
    rows = sum(pq.read_metadata(path).num_rows for path in (tmp_path / "x").glob("part-*.parquet"))
    assert 0 < rows < 1280
    # Stopped, it still has the folder.
    status, _, errors = commands.run("embed", *flags)
    assert (status, "another process" in errors) == (2, True), errors
    os.kill(started.pid, signal.SIGKILL)
    started.communicate()
    with pytest.raises(UserError, match="unfinished"):
        read_embeddings(tmp_path / "x")
    assert f"resuming after {rows:,} of 1,280 images" in commands.printed("embed", *flags)
    assert content(tmp_path / "x") == content(embedded)
    # Finished; other images are refused.
    commands.printed("embed", *flags)
    assert commands.run("embed", *flags, "--split=test")[0] == 2
    assert content(tmp_path / "x") == content(embedded)


def test_images_that_an_audit_drops_are_left_out(commands, tmp_path):
    commands.write_noise(tmp_path / "photos", "abcd", 3)
    commands.write_embedder(tmp_path / "model.keras")
    drops = tmp_path / "audit.csv"
    drops.write_text("image,action\na/1.png,drop\nd/0.png,drop\nd/2.png,keep\n")
    flags = [f"--model={tmp_path}/model.keras", "--dataset=folder", f"--data_dir={tmp_path}/photos"]
    every = [*flags, "--split=all", f"--drop={drops}"]
    status, _, errors = commands.run("embed", *every, f"--out={tmp_path}/out")
    assert status == 0, errors
    names = {f"{label}/{row}.png" for label in "abcd" for row in range(3)}
    stored = read_embeddings(tmp_path / "out")
    assert set(stored.names) == names - {"a/1.png", "d/0.png"}
    assert set(stored.roles) == {"train", "test"}
    status, _, errors = commands.run("embed", *flags, f"--drop={drops}", f"--out={tmp_path}/part")
    assert status == 2
    assert "split=all" in errors
    drops.write_text("image,action\na/9.png,drop\n")
    status, _, errors = commands.run("embed", *every, f"--out={tmp_path}/other")
    assert status == 2
    assert "a/9.png" in errors
