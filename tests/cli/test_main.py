"""The command `tfdml` before a subcommand works, and the subcommands `configs` and `doctor`."""

import subprocess
import sys

import pytest

from tests.cli.commands import ROOT, load
from tfdml import cli


def fresh(program):
    """A program in a process of its own."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)


def status_of(*words):
    """The exit status of `tfdml` with these words."""
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    return end.value.code


def test_help_and_configs_do_not_load_tensorflow():
    done = fresh(
        "import sys, tfdml.cli\n"
        "for words in (['--help'], ['configs', 'sop'], ['--version']):\n"
        "    try: tfdml.cli.main(words)\n"
        "    except SystemExit as end: assert not end.code\n"
        "print('LOADED', sorted({'tensorflow', 'keras', 'numpy', 'absl'} & set(sys.modules)))\n"
    )
    assert done.stdout.endswith("LOADED []\n"), done.stderr


def test_help_has_a_line_for_each_command(capsys):
    assert status_of("--help") == 0
    output = capsys.readouterr().out
    for name, text in {**cli.STAGES, **cli.OTHERS}.items():
        assert f"  {name:<12}{text}\n" in output
    assert [load(name).name for name in cli.STAGES] == list(cli.STAGES)


@pytest.mark.parametrize("words", ["--help", pytest.param("train --help", marks=pytest.mark.slow)])
def test_a_reader_that_has_had_enough_ends_the_command_without_a_word(words):
    # The reader closes the pipe before the command writes.
    program = f"import sys, tfdml.cli; sys.stdin.read(); tfdml.cli.main({words.split()})"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes, text=True, cwd=ROOT) as process:
        process.stdout.close()
        process.stdout = None
        _, errors = process.communicate("")
    assert (process.returncode, errors) == (0, "")


def test_unknown_commands_and_flags_are_one_line_with_the_nearest_before_tensorflow_loads(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_load_tensorflow", None)
    assert status_of("trian", "--epochs=1") == 2
    assert capsys.readouterr().err == "tfdml: error: there is no command 'trian'; did you mean train?\n"
    assert status_of("train", "--data_dir=x", "--epoch=1") == 2
    assert capsys.readouterr().err == "train: error: there is no flag --epoch; did you mean epochs?\n"


def test_every_flag_of_every_command_is_known_before_tensorflow_loads():
    for name in cli.STAGES:
        words = [f"--{flag}" for flag in load(name).flags] + ["--noresume", "--flagfile=x", "--help"]
        assert cli.unknown_flag(words) == "", name


def test_without_tensorflow_a_command_ends_in_one_line():
    done = fresh("import sys, tfdml.cli\nsys.modules['tensorflow'] = None\ntfdml.cli.main(['train'])")
    assert done.returncode == 2
    assert done.stderr.startswith("train: error: TensorFlow cannot be loaded (import of tensorflow halted")
    assert done.stderr.endswith("run tfdml doctor\n")


@pytest.mark.slow
def test_as_a_module_it_prints_nothing_of_tensorflow():
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}  # no TF_CPP_MIN_LOG_LEVEL
    words = [sys.executable, "-m", "tfdml", "index"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert (done.returncode, done.stderr) == (2, "index: error: --embeddings is missing\n")


def test_configs_are_listed_by_words_and_a_single_one_is_printed(capsys):
    assert status_of("configs") == 0
    lines = capsys.readouterr().out.splitlines()
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.flags")}
    assert {line.split()[0] for line in lines} == files
    assert all(len(line.split(maxsplit=1)[1]) > 20 for line in lines)
    assert status_of("configs", "sop_rankmi") == 0
    assert (ROOT / "configs" / "sop_rankmi.flags").read_text() in capsys.readouterr().out
    assert status_of("configs", "nosuch") == 2
    assert capsys.readouterr().err == "configs: error: no flag file has nosuch in its name\n"


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("raise ImportError('no library')", "a training step fails: ImportError: no library"),
        ('print(\'TRIAL ["tensorflow", ["CPU"], NaN]\')', "the loss of a training step is not a number"),
    ],
)
def test_doctor_finds_a_training_that_fails(program, fault, monkeypatch):
    monkeypatch.setattr(cli, "_TRIAL", program)
    assert cli._trial()[0].startswith(fault)


@pytest.mark.slow
def test_doctor_trains(capsys):
    assert cli._trial() == []
    assert "trained with tensorflow on CPU" in capsys.readouterr().out
