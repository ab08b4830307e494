"""Modules are imported where the user names them, and nowhere else."""

import sys

import pytest

from tests.cli import commands
from tests.support.processes import ROOT, run_python
from tfdml.data.policies import Policy
from tfdml.errors import UserError
from tfdml.registry import VARIABLE, allow_modules, import_modules
from tfdml.training import Experiment
from tfdml.training.watching import check_logger, logger_of

_EVIL = """
import pathlib
import keras

pathlib.Path("ran").touch()

class Darker(keras.layers.Layer):
    def call(self, image, training=None):
        return image / 2

def start():
    return keras.callbacks.Callback()
"""
_NEW = ["--run_dir=new", "--dataset=glyphs", "--image_size=28", "--resize=32", "--backbone=conv4"]
# By command line, the lines of the file that it reads, each of which names a module.
WISHES = [
    (["train", "--run_dir=run", "--resume"], "--import=run.evil"),
    (["train", "--run_dir=run", "--resume", "--import=json"], "--import=run.evil"),
    pytest.param(["train", "--start_from=run", *_NEW], "--import=run.evil", marks=pytest.mark.slow),
    (["train", "--final_of=run", "--run_dir=new"], "--import=run.evil"),
    (["train", "--flagfile=run/flags.txt", *_NEW], "--import=run.evil"),
    (["train", "--flagfile", "run/flags.txt", *_NEW], "--log_to=run.evil.start"),
    (["train", "--flagfile=run/flags.txt", *_NEW], "--policy=run.evil.Darker"),
    (["evaluate", "--model=run"], "--import=run.evil"),
    (["evaluate", "--model=run/embedder.keras", "--dataset=glyphs"], "--import=run.evil"),
    (["embed", "--model=run", "--out=vectors"], "--import=run.evil"),
    (["export", "--run_dir=run", "--out=models"], "--import=run.evil"),
    (["audit", "--model=run", "--out=audit"], "--import=run.evil"),
    (["prepare", "--flagfile=run/flags.txt"], "--import=run.evil"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a run in it, next to which lies a module that leaves a mark."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "evil.py").write_text(_EVIL)
    (tmp_path / "run" / "embedder.keras").touch()
    (tmp_path / "run" / "result.json").write_text('{"metrics": {}, "epoch": 1}')
    (tmp_path / "run" / "metrics.jsonl").write_text('{"epoch": 1, "step": 1}\n')
    yield tmp_path
    for name in ("run", "run.evil"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("words", "line"), WISHES, ids=lambda value: "".join(value)[:40])
def test_a_file_that_names_a_module_is_refused(words, line, folder):
    (folder / "run" / "flags.txt").write_text(f"{line}\n")
    status, _, errors = commands.run(*words)
    last = errors.splitlines()[-1]
    assert (status, "Traceback" in errors) == (2, False)
    assert line in last
    assert f"add --import=run.evil to the command, or set {VARIABLE}=run.evil" in last
    assert not (folder / "ran").exists()
    assert str(folder) not in sys.path


@pytest.mark.parametrize(
    "typed",
    [
        ["--import=run.evil"],
        ["--import", "run.evil"],
        ["--import=run"],
        ["--policy=grayscale + 0.5 * run.evil.Darker"],
        ["--log_to=run.evil.start"],
    ],
)
def test_what_the_command_line_names_is_imported(typed, folder):
    (folder / "run" / "flags.txt").write_text("--import=run.evil\n--seed=3\n")
    commands.load("train").parse([*_NEW, "--flagfile=run/flags.txt", *typed])
    assert Experiment.of_run("run").seed == 3
    assert (folder / "ran").exists()


def test_so_is_what_the_variable_names(folder, monkeypatch):
    monkeypatch.setenv(VARIABLE, "run.evil")
    experiment = Experiment.from_flags("--import=run.evil\n--log_to=run.evil.start\n--run_dir=x")
    assert (folder / "ran").exists()
    assert len(logger_of(experiment.log_to)) == 1
    assert str(Policy.of("run.evil.Darker")) == "run.evil.Darker"
    commands.load("train").parse(_NEW)


def test_a_file_takes_part_in_nothing_that_runs_but_what_the_user_has_named(folder):
    allow_modules(["run.evil2"])
    with pytest.raises(UserError, match="add --import=os "):
        check_logger("os.abort")  # loaded, but not to be called
    with pytest.raises(UserError, match=r"add --import=keras\.layers "):
        Policy.of("keras.layers.TFSMLayer(filepath='run')")
    with pytest.raises(UserError, match=r"add --import=tfdml\.models "):
        Policy.of("tfdml.models.Embedder(backbone=conv4)")
    with pytest.raises(UserError, match=r"run\.evil"):
        import_modules("run.evil")
    import_modules("keras, tfdml.losses")  # loaded


@pytest.mark.slow
def test_the_files_of_the_working_folder_stand_in_for_no_package(folder):
    """Not even where Python is told to put that folder first."""
    for name in ("keras", "keras_cv", "tensorflow"):
        (folder / f"{name}.py").write_text("open('ran', 'w')\n")
    (folder / "run" / "flags.txt").write_text("--import=run.evil\n")
    variables = {"PYTHONPATH": str(ROOT)}.items()
    words = ["train", "--run_dir=run", "--resume"]
    done = run_python("-m", "tfdml", *words, cwd=folder, environment=variables, status=2)
    assert done.stderr.startswith("train: error: --import=run.evil: run/flags.txt: a module"), (
        done.stderr
    )
    run_python("-m", "tfdml", "doctor", cwd=folder, environment=variables)
    assert not (folder / "ran").exists()
