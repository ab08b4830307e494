"""Whose a run folder is, how far its run has come, and what is said of damage."""

import json
import os
import stat

import pytest

from tests.training.runs import experiment
from tfdml.errors import UserError
from tfdml.training import RunFolder
from tfdml.training import checkpoints as run_folder

DATA = {"train": {"images": 3, "content": "sha256:a"}, "test": {"images": 2, "content": "sha256:b"}}


def test_a_new_folder_holds_flags_data_and_environment(tmp_path):
    folder, settings = RunFolder(tmp_path / "new" / "run"), experiment(tmp_path / "new" / "run", seed=3)
    folder.check_new()
    with folder.created(settings):
        folder.describe(DATA, ["CPU:0"])
        assert folder.how_far() == f"no step was trained; continue with --run_dir={folder.path} --resume"
    assert folder.load_experiment() == settings
    assert json.loads(folder.environment.read_text())["devices"] == ["CPU:0"]
    assert sorted(path.name for path in folder.path.iterdir()) == ["data.json", "environment.json", "flags.txt"]
    with pytest.raises(UserError, match="exists already: continue it with --resume"):
        folder.check_new()


def test_of_two_that_begin_at_once_one_is_refused(tmp_path):
    folder, settings = RunFolder(tmp_path / "run"), experiment(tmp_path / "run")
    busy = pytest.raises(UserError, match="another process is writing into it")
    with folder.created(settings), busy, RunFolder(tmp_path / "run").created(settings):
        pass
    with pytest.raises(UserError, match="exists already"), RunFolder(tmp_path / "run").created(settings):
        pass


def test_what_a_killed_run_left_half_written_is_removed(tmp_path):
    folder = RunFolder(tmp_path / "run")
    left = [folder.path / ".partial-999999-flags.txt", folder.checkpoints / f".partial-{os.getpid()}-step-1.npz"]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (folder.path / "mine.txt").touch()
    # What other commands write below the run: an export that was killed, an evaluation that is at work.
    others = [folder.path / "models" / ".partial-999999-x0f3a", folder.path / f".partial-{os.getppid()}-test.json"]
    others[0].mkdir(parents=True)
    others[1].touch()
    with folder.locked():
        assert not any(path.exists() for path in left)
    assert all(path.exists() for path in others)
    assert {path.name for path in folder.path.iterdir()} == {"checkpoints", "mine.txt", "models", others[1].name}


def test_another_machine_is_told_of(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(run_folder.logging, "warning", lambda text, *values: said.append(text % values))
    folder = RunFolder(tmp_path)
    folder.describe(DATA, ["CPU:0"])
    folder.describe(DATA, ["CPU:0"])
    assert not said
    began = json.loads(folder.environment.read_text())
    folder.environment.write_text(json.dumps({**began, "cpus": 4096, "python": "3.9"}))
    folder.describe(DATA, ["CPU:0"])
    (line,) = said
    assert line.startswith(f"{tmp_path}: cpus was 4096 and is now {began['cpus']}: the run resumes from the same")
    assert json.loads(folder.environment.read_text())["cpus"] == 4096
    folder.environment.write_text("{")
    folder.describe(DATA, ["CPU:0"])
    assert len(said) == 1


def test_data_is_compared_and_told_apart(tmp_path):
    folder = RunFolder(tmp_path)
    folder.describe(DATA, [])
    folder.describe(DATA, [])
    with pytest.raises(UserError, match=r"test: images was 2 and is now 1\): bring them back") as changed:
        folder.describe({**DATA, "test": {"images": 1, "content": "sha256:b"}}, [])
    assert "train" not in str(changed.value)
    for damage in ("{", "[]", '{"train": 3}'):
        folder.data.write_text(damage)
        with pytest.raises(UserError, match=r"data.json is damaged; delete it"):
            folder.describe(DATA, [])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe\0\1", "it is no text"),
        (b"--epochs=many\n", "--epochs=many is not"),
        (b"--a=1", "--a"),
        (b"--flip=maybe", "--flip=maybe is not"),
    ],
)
def test_damaged_flags_are_named(content, says, tmp_path):
    folder = RunFolder(tmp_path)
    folder.flags.write_bytes(content)
    with pytest.raises(UserError, match=says) as error:
        folder.load_experiment()
    assert str(folder.flags) in str(error.value)


def test_a_folder_without_flags_holds_no_run(tmp_path):
    with pytest.raises(UserError, match="holds no run to resume"):
        RunFolder(tmp_path / "none").load_experiment()
    with pytest.raises(UserError, match="stopped before it began"):
        RunFolder(tmp_path).load_experiment()
    assert RunFolder(tmp_path / "none").how_far() == "nothing was written"


def test_a_run_is_finished_when_all_it_was_to_write_is_there(tmp_path):
    folder, settings = RunFolder(tmp_path), experiment(tmp_path, report=True)
    for path in (folder.embedder, folder.report):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    for content, finished in (("", False), ("{}", False), ("[1]", False), ('{"metrics": {"recall@1": 0.5}}', True)):
        folder.result.write_text(content)
        assert folder.is_finished(settings) == finished
    folder.report.unlink()
    assert not folder.is_finished(settings)
    assert folder.is_finished(experiment(tmp_path, report=False))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    tmp_path.chmod(stat.S_IREAD | stat.S_IEXEC)
    folder = RunFolder(tmp_path / "run").created(experiment(tmp_path / "run"))
    with pytest.raises(UserError, match="cannot be made"), folder:
        pass
