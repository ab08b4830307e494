"""The command `tfdml` before a subcommand works."""

import subprocess
import sys

import pytest

import tfdml_command
from tests.cli.commands import ROOT, load
from tfdml_command.completion import script


def fresh(program, **environment):
    """A program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT, env=environment or None
    )


@pytest.mark.parametrize("words", [["--help"], [], ["configs", "sop"], ["doctor", "--help"], ["--version"]])
def test_help_and_configs_do_not_load_tensorflow(words):
    done = fresh(
        "import sys, tfdml_command\n"
        f"try: tfdml_command.main({words})\n"
        "except SystemExit as end: assert not end.code\n"
        "print('LOADED', sorted({'tensorflow', 'keras', 'numpy', 'tfdml'} & set(sys.modules)))\n"
    )
    assert done.stdout.endswith("LOADED []\n"), done.stderr
    assert len(done.stdout) > 12


def test_help_has_a_line_for_each_command(capsys):
    tfdml_command.main(["--help"])
    said = capsys.readouterr().out
    for name, text in {**tfdml_command.STAGES, **tfdml_command.OTHERS}.items():
        assert f"  {name:<12}{text}\n" in said


@pytest.mark.parametrize("words", ["--help", "configs", pytest.param("train --help", marks=pytest.mark.slow)])
def test_a_reader_that_has_had_enough_ends_the_command_without_a_word(words):
    # The reader closes the pipe before the command writes.
    program = f"import sys, tfdml_command; sys.stdin.read(); tfdml_command.main({words.split()})"
    command = [sys.executable, "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, cwd=ROOT) as process:
        process.stdout.close()
        process.stdout = None
        _, errors = process.communicate("")
    assert (process.returncode, errors) == (0, "")


def test_an_unknown_command_is_one_line_with_the_nearest(capsys):
    with pytest.raises(SystemExit) as end:
        tfdml_command.main(["trian", "--epochs=1"])
    assert (end.value.code, capsys.readouterr().err) == (
        2,
        "tfdml: error: there is no command 'trian'; did you mean train?\n",
    )


def test_an_unknown_flag_is_one_line_with_the_nearest_before_tensorflow_loads(monkeypatch, capsys):
    monkeypatch.setattr(tfdml_command, "_load_tensorflow", None)
    with pytest.raises(SystemExit) as end:
        tfdml_command.main(["train", "--data_dir=x", "--epoch=1"])
    assert (end.value.code, capsys.readouterr().err) == (
        2,
        "train: error: there is no flag --epoch; did you mean epochs?\n",
    )


def test_every_flag_of_every_command_is_known_before_tensorflow_loads():
    for name in tfdml_command.STAGES:
        words = [f"--{flag}" for flag in load(name).flags] + ["--noresume", "--flagfile=x", "--help"]
        assert tfdml_command.unknown_flag(words) == "", name


def test_without_tensorflow_a_command_ends_in_one_line():
    done = fresh("import sys, tfdml_command\nsys.modules['tensorflow'] = None\ntfdml_command.main(['train'])")
    assert done.returncode == 2
    assert done.stderr.startswith("train: error: TensorFlow cannot be loaded (import of tensorflow halted")
    assert done.stderr.endswith("run tfdml doctor\n")


def test_every_stage_is_known_by_its_name():
    assert [load(name).name for name in tfdml_command.STAGES] == list(tfdml_command.STAGES)


# The words as readline parts them, and some of what may follow.
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tfdml", "ex"], ["export"]),
        (["tfdml", "train", "--objec"], ["--objectives=", "--objective_rate="]),
        (["tfdml", "train", "--resu"], ["--resume"]),
        (["tfdml", "train", "--flagfile", "=", "configs/sop_r"], ["configs/sop_rankmi.flags"]),
        (["tfdml", "train", "--data_dir", "=", "tfdml/cl"], ["tfdml/cli", "tfdml/cluster"]),
        (["tfdml", "train", "--data_dir", "="], ["tfdml"]),
    ],
)
def test_bash_completes(words, expected):
    line = " ".join(f"'{word}'" for word in words)
    at = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}"
    program = f"{script('bash')}\n{at}; _tfdml; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert set(expected) <= set(done.stdout.split())
    if words[-1] != "=":
        assert all(found.startswith(words[-1]) for found in done.stdout.split())
