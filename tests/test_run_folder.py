"""Whose a run folder is, how far its run has come, and what is said of damage."""

import ast
import json
import os
import pathlib

import pytest

from tests.training.runs import experiment
from tfdml import run_folder
from tfdml.errors import UserError
from tfdml.run_folder import EpochLength
from tfdml.training import Experiment, RunFolder

ENVIRONMENT = {"backend": "tensorflow", "cpus": 2, "devices": ["CPU:0"], "packages": {}}
DATA = {"train": {"images": 3, "content": "sha256:a"}, "test": {"images": 2, "content": "sha256:b"}}


def test_of_two_that_begin_at_once_one_is_refused(tmp_path):
    folder, flags = RunFolder(tmp_path / "run"), experiment(tmp_path / "run").as_flags()
    busy = pytest.raises(UserError, match="another process is writing into it")
    with (
        folder.new_run(flags),
        busy,
        RunFolder(tmp_path / "run").new_run(flags),
    ):
        pass
    with (
        pytest.raises(UserError, match="exists already"),
        RunFolder(tmp_path / "run").new_run(flags),
    ):
        pass


def test_an_epoch_is_as_long_as_the_first_that_was_logged(tmp_path):
    folder = RunFolder(tmp_path)
    records = [{"epoch": epoch, "step": 7 * epoch} for epoch in range(3)]
    folder.metrics.write_text("\n".join(map(json.dumps, records)))
    images = {"train": 90, "validation": 10, "test": 100}
    splits = {name: {"images": count, "classes": count // 10} for name, count in images.items()}
    folder.data.write_text(json.dumps(splits))
    assert folder.epoch_length() == EpochLength(90, 9, 7, 200)


def test_what_a_killed_run_left_half_written_is_removed(tmp_path):
    folder = RunFolder(tmp_path / "run")
    left = [
        folder.path / ".partial-999999-flags.txt",
        folder.checkpoints / f".partial-{os.getpid()}-step-1.npz",
    ]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (folder.path / "mine.txt").touch()
    # What other commands write below the run: an export that was killed, an evaluation that is at
    # work.
    others = [
        folder.path / "models" / ".partial-999999-x0f3a",
        folder.path / f".partial-{os.getppid()}-test.json",
    ]
    others[0].mkdir(parents=True)
    others[1].touch()
    with folder.locked():
        assert not any(path.exists() for path in left)
    assert all(path.exists() for path in others)
    assert {path.name for path in folder.path.iterdir()} == {
        "checkpoints",
        "mine.txt",
        "models",
        others[1].name,
    }


def test_other_data_is_refused_and_another_machine_is_told_of(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(
        run_folder.logging, "warning", lambda text, *values: said.append(text % values)
    )
    folder = RunFolder(tmp_path)
    folder.record(DATA, ENVIRONMENT)
    folder.record(DATA, ENVIRONMENT)
    assert not said
    with pytest.raises(UserError, match="test: images was 2 and is now 1"):
        folder.record({**DATA, "test": {"images": 1, "content": "sha256:b"}}, ENVIRONMENT)
    began = json.loads(folder.environment.read_text())
    folder.environment.write_text(json.dumps({**began, "cpus": 4096, "python": "3.9"}))
    folder.record(DATA, ENVIRONMENT)
    assert "cpus was 4096" in said[0]
    assert json.loads(folder.environment.read_text())["cpus"] == 4096


def test_weights_with_a_changed_byte_are_refused_on_resume(tmp_path):
    weights, folder = tmp_path / "backbone.weights.h5", RunFolder(tmp_path / "run")
    folder.path.mkdir()
    weights.write_bytes(b"weights")
    folder.record(DATA, ENVIRONMENT, str(weights))
    folder.record(DATA, ENVIRONMENT, str(weights))
    weights.write_bytes(b"wejghts")
    with pytest.raises(UserError, match=f"weights={weights}: the file is not that of the start"):
        folder.record(DATA, ENVIRONMENT, str(weights))


@pytest.mark.parametrize("content", [b"\xff\xfe\0\1", b"--flip=maybe"])
def test_damaged_flags_are_named(content, tmp_path):
    folder = RunFolder(tmp_path)
    folder.flags.write_bytes(content)
    with pytest.raises(UserError, match=str(folder.flags)):
        Experiment.of_run(folder.path)


def test_no_other_module_knows_what_the_files_of_a_run_are_called():
    names = {value for name, value in vars(run_folder).items() if name.endswith("_FILE")}
    assert "embedder.keras" in names
    home = pathlib.Path(run_folder.__file__)
    for path in home.parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and path != home:
                assert node.value not in names, f"{path}:{node.lineno}"


def test_checkpoints_are_listed_by_their_step(tmp_path):
    for step in (10, 9, 100_000_000):
        run_folder.checkpoint_path(tmp_path, step).touch()
    for name in ("step-x.npz", "step-.npz", "other-3.npz", "step-7.txt"):
        (tmp_path / name).touch()
    steps = [run_folder.step_of(path) for path in run_folder.list_checkpoints(tmp_path)]
    assert steps == [9, 10, 100_000_000]
