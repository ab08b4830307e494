"""The command `tfdml` before a subcommand works, and the subcommands `configs` and `doctor`."""

import http.server
import runpy
import subprocess
import sys
import threading
import types
import urllib.request
import webbrowser

import keras
import pytest

from tests.cli.commands import ROOT
from tfdml import cli


def fresh(program):
    """A program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )


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


def test_unknown_commands_and_flags_are_one_line_with_the_nearest(capsys):
    for words, nearest in (
        (("trian", "--epochs=1"), "train"),
        (("train", "--data_dir=x", "--epoch=1"), "epochs"),
    ):
        assert status_of(*words) == 2
        assert f"did you mean {nearest}?" in capsys.readouterr().err


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("first", [str(ROOT), "/elsewhere"])
def test_python_m_takes_away_the_current_folder_alone(safe, first, monkeypatch):
    """Which is first, unless Python runs with -P or the package lies in it."""
    flags = {name: getattr(sys.flags, name) for name in dir(sys.flags) if name[0] != "_"}
    monkeypatch.setattr(sys, "flags", types.SimpleNamespace(**{**flags, "safe_path": safe}))
    monkeypatch.setattr(sys, "path", [first, *sys.path])
    before = [*sys.path]
    runpy.run_path(str(ROOT / "tfdml" / "__main__.py"))
    assert sys.path == (before if safe or first == str(ROOT) else before[1:])


def test_without_tensorflow_a_command_ends_in_one_line():
    done = fresh(
        "import sys, tfdml.cli\nsys.modules['tensorflow'] = None\n"
        "tfdml.cli.main(['embed', '--model=x', '--out=y'])"
    )
    assert done.returncode == 2
    assert "TensorFlow cannot be loaded" in done.stderr


def test_configs_are_listed_by_words_and_a_single_one_is_printed(capsys):
    assert status_of("configs") == 0
    output = capsys.readouterr()
    assert not output.err
    lines = output.out.splitlines()
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.flags")}
    assert {line.split()[0] for line in lines} == files
    assert status_of("configs", "sop_rankmi") == 0
    assert (ROOT / "configs" / "sop_rankmi.flags").read_text() in capsys.readouterr().out
    assert status_of("configs", "nosuch") == 2
    assert "no flag file has nosuch in its name" in capsys.readouterr().err


def test_docs_serves_its_pages_and_says_where_there_are_none(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli, "package_folder", lambda name: tmp_path / name)
    assert status_of("docs") == 2
    assert "make docs writes those of a checkout" in capsys.readouterr().err
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("the first page")
    assert status_of("docs", "--path") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'site'}\n"
    pages, done = [], threading.Event()

    def read(address):
        with urllib.request.urlopen(address) as answer:
            pages.append(answer.read())
        done.set()

    monkeypatch.setattr(
        webbrowser, "open", lambda address: threading.Thread(target=read, args=[address]).start()
    )
    server = http.server.ThreadingHTTPServer
    # One request in place of Ctrl-C.
    monkeypatch.setattr(server, "serve_forever", server.handle_request)
    assert status_of("docs") == 0
    assert done.wait(10)
    assert pages == [b"the first page"]


@pytest.mark.slow
def test_doctor_trains():
    assert cli._trial() == []


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("raise ImportError('no library')", "problem: a training step fails: ImportError: no lib"),
        ("pass", "problem: a training step fails: the process ended with status 0"),
        (
            'print(\'TRIAL ["jax", ["CPU"], 0.5]\'); raise SystemExit(3)',
            "problem: a training step fails: the process ended with status 3",
        ),
        ('print(\'TRIAL ["jax", ["CPU"], NaN]\')', "problem: the loss of a training step is not"),
        ('print(\'TRIAL ["jax", ["CPU"], 0.5]\')', "\ntfdml works here.\n"),
    ],
)
def test_doctor_says_whether_training_works(program, verdict, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_TRIAL", program)
    fails = "problem" in verdict
    assert cli.doctor([]) == fails
    said = capsys.readouterr().out
    assert verdict in said
    assert said.endswith("tfdml does not work here yet.\n") == fails
    assert f"keras {keras.__version__}" in said
    ends_well = "TRIAL" in program and "SystemExit" not in program
    assert ("trained with jax on CPU: loss" in said) == ends_well


def test_doctor_takes_no_words(capsys):
    assert (cli.doctor(["--help"]), cli.doctor(["often"])) == (0, 2)
    assert capsys.readouterr().out.count("tfdml doctor") == 2
