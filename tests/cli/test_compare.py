"""bin/evaluate --compare: finished runs side by side on one page."""

import shutil

import pytest

from tfdml.cli.evaluate import joined_runs

DATA = ["--dataset=glyphs", "--dataset_options=images_per_class=4, size=32"]


@pytest.mark.slow
def test_two_runs_on_one_page(finished_run, command, tmp_path):
    first, second = tmp_path / "plain", tmp_path / "regularised"
    for folder in (first, second):
        shutil.copytree(finished_run, folder)
    page = tmp_path / "comparison.html"
    done = command("evaluate", "--compare", first, second, f"--report={page}", *DATA)
    assert done.returncode == 0, done.stderr[-3000:]
    text = page.read_text(encoding="utf-8")
    assert all(name in text for name in ("plain", "regularised", "Recall@1"))
    assert not list(tmp_path.glob(".partial*"))


@pytest.mark.slow
def test_a_folder_without_a_result_is_refused_and_nothing_is_written(finished_run, command, tmp_path):
    (tmp_path / "unfinished").mkdir()
    page = tmp_path / "comparison.html"
    done = command("evaluate", f"--compare={finished_run},{tmp_path / 'unfinished'}", f"--report={page}")
    assert done.returncode == 2
    assert "unfinished" in done.stderr.splitlines()[-1]
    assert not page.exists()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--compare", "a", "b", "--report=c"], ["--compare=a,b", "--report=c"]),
        (["--report=c", "--compare", "a", "b"], ["--report=c", "--compare=a,b"]),
        (["--compare=a,b", "--report", "c"], ["--compare=a,b", "--report", "c"]),
        (["--compare"], ["--compare"]),
        (["--compare", "--report=c"], ["--compare", "--report=c"]),
    ],
)
def test_folders_after_the_flag_are_its_list(given, expected):
    assert joined_runs(["evaluate", *given]) == ["evaluate", *expected]
