"""The flag files of the papers, on a small tree in the official layout."""

import pathlib

import pytest

from tests.data.trees import write_tree


@pytest.mark.slow
def test_a_dry_run_prints_the_resolved_experiment(command, tmp_path):
    products = write_tree("sop", tmp_path / "Stanford_Online_Products", 60, 60)
    done = command(
        "train",
        "--flagfile=configs/sop_rankmi.flags",
        f"--data_dir={products}",
        "--dataset_options=check_counts=false",
        "--weights=none",
        "--ks=1,10,100",
        f"--run_dir={tmp_path / 'run'}",
        "--dry_run",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    words = " ".join(done.stdout.split())
    for said in (
        "train 120 images of 60 classes",
        "test 120 images of 60 classes",
        "1 * rank_mi",
        "resnet50, weights none",
        "120 images (60 classes x 2)",
        "projection 262,272 0.001",
        "1 steps an epoch, 100 epochs: 100 steps, 12,000 images, 100.0 times the training images",
        "WARNING: --weights=none with --batch_norm=frozen: resnet50 begins with random weights",
        "--objectives=rank_mi(margin=0.2, statistics_steps=1)",
    ):
        assert said in words
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_page_of_the_quickstart_shows_what_is_printed(command, tmp_path):
    done = command("train", "--flagfile=configs/quickstart.flags", f"--run_dir={tmp_path / 'run'}", "--dry_run")
    assert done.returncode == 0, done.stderr[-3000:]
    page = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "quickstart.md").read_text(encoding="utf-8")
    shown = page[page.index("```text\ndata ") :].partition("as a flag file:")[0].strip().split("\n")[1:]
    assert len(shown) > 15
    # What is free, and on what it runs, is the machine's.
    assert [line for line in shown if not line.startswith(("memory", "devices")) and line not in done.stdout] == []
