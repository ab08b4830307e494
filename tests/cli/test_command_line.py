"""Flags that have no effect next to the others, signals, and paths."""

import dataclasses
import io
import os
import re
import signal
import sys
import time

import pytest

from tests.cli import commands
from tests.cli.commands import load
from tests.docs import world
from tfdml.cli import command_line
from tfdml.cli.command_line import Command, Flags, Progress
from tfdml.errors import UserError
from tfdml.expressions import Terms
from tfdml.io import files
from tfdml.objectives.terms import build_objectives
from tfdml.training.interruption import Interrupted

RATES = ["--backbone_rate=1", "--projection_rate=1", "--objective_rate=1"]
BY_CLASS = "--sampling=class_balanced or hierarchical or neighbors"
OWN_RATES = "--backbone_rate=-1.0 or --projection_rate=-1.0 or --objective_rate=-1.0"
# By command, flags the last of which has no effect, what it needs, and flags with that.
IN_VAIN = [
    (
        "train",
        ["--sampling=shuffle", "--images_per_class=40"],
        BY_CLASS,
        ["--sampling=hierarchical(super_classes=2)"],
    ),
    ("train", [*RATES, "--learning_rate=0.1"], OWN_RATES, ["--objective_rate=-1"]),
    ("train", ["--seeds=0,1", "--seed=3"], "--seeds without a list", ["--seeds=2"]),
    ("train", ["--features=x.npz", "--flip=false"], "no --features", ["--features="]),
    ("train", ["--moment_embedder=true"], "horde(...) in --objectives", ["--objectives=horde"]),
    ("embed", ["--input=a.jpg", "--split=train"], "no --input", None),
    (
        "evaluate",
        ["--model=x.npz", "--target=far=0.1"],
        "--task=verification or classification",
        ["--task=verification"],
    ),
    ("export", ["--gallery=x", "--embedder=y", "--images=5"], "no --embedder", None),
    (
        "audit",
        ["--embeddings=x.npz", "--min_correlation=0.9"],
        "images",
        ["--data_dir=photos"],
    ),
    ("demo", ["--gallery=x.npz", "--batch_size=9"], "--model", ["--model=y"]),
    (
        "search",
        ["--gallery=lancedb:///data", "--distance=cosine"],
        "stored embeddings as --gallery",
        ["--gallery=x.npz"],
    ),
]


@pytest.mark.parametrize(("name", "words", "needs", "more"), IN_VAIN)
def test_a_flag_in_vain_on_the_command_line_is_an_error(
    name, words, needs, more, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    command = load(name)
    flag = words[-1]
    status, _, errors = commands.run(name, *words)
    assert status == 2
    assert f"{flag}: has no effect: it needs {needs}" in errors
    assert not list(tmp_path.iterdir())
    if more is not None:
        command.parse([*words, *more])


def test_a_text_is_parsed_once(monkeypatch):
    texts, parse = [], Terms.parse

    def counted(text, argument):
        texts.append(text)
        return parse(text, argument)

    monkeypatch.setattr(Terms, "parse", counted)
    command = load("train")
    command.parse(["--objectives=contrastive(margin=0.3)", "--run_dir=runs/any"])
    experiment, *_ = command.settings(command.flags)
    (objective,) = build_objectives(experiment.objectives)
    assert objective.loss.margin == 0.3
    assert texts == ["contrastive(margin=0.3)"]


def test_a_flag_in_vain_in_a_flag_file_is_reset_with_a_warning(tmp_path):
    """So that a schedule on the command line takes the place of the file's; a flag after the file
    is the command's."""
    world.write_named("photos", tmp_path)
    lines = [
        "--batch_size=64",
        "--drop_epochs=6",
        "--drop_factor=0.1",
    ]  # the last is the default, as in flags.txt
    (tmp_path / "x.flags").write_text("\n".join([*lines, "--dataset=folder", "--image_size=28"]))
    flags = [
        "--resize=32",
        "--backbone=conv4",
        f"--data_dir={tmp_path / 'photos'}",
        f"--run_dir={tmp_path / 'run'}",
    ]
    flags += [
        f"--flagfile={tmp_path / 'x.flags'}",
        "--sampling=class_balanced",
        "--schedule=cosine",
        "--dry_run",
    ]
    status, _, errors = commands.run("train", *flags)
    assert status == 0, errors
    warnings = errors.splitlines()
    for warning, flag in zip(warnings[:2], ("--batch_size=64", "--drop_epochs=6"), strict=True):
        assert f"ignored: {flag}: has no effect" in warning
    assert "drop_factor" not in "".join(warnings)
    flags = [f"--flagfile={tmp_path / 'x.flags'}", "--batch_size=32", "--run_dir=x"]
    status, _, errors = commands.run("train", *flags)
    assert (status, "--batch_size=32: has no effect" in errors) == (2, True)


def test_a_resumed_run_is_judged_by_its_own_settings(tmp_path):
    (tmp_path / "flags.txt").write_text("--sampling=shuffle\n")
    given = [f"--run_dir={tmp_path}", "--resume"]
    status, _, errors = commands.run("train", *given, "--classes_per_batch=8")
    assert (status, "--classes_per_batch=8: has no effect" in errors) == (2, True), errors
    status, _, errors = commands.run(
        "train", *given, "--batch_size=8", "--dry_run", "--dataset=none"
    )
    assert "no effect" not in errors


def ended(command, tmp_path, number):
    """(status, error output) of a command in a fork of this process, which gets a signal once it
    has begun."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            os.chdir(tmp_path)
            for number, target in ((1, os.devnull), (2, "errors.txt")):
                os.dup2(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644), number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            command_line.run(Command("try", command, Flags(), ""), [])
        except SystemExit as end:
            status = end.code
        finally:
            sys.stderr.flush()
            os._exit(status)
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    os.kill(pid, number)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, (tmp_path / "errors.txt").read_text()


def writing():
    """A command in the midst of writing a file."""
    with files.atomic_write("result.json") as temporary:
        open(temporary, "w").close()
        open("begun", "w").close()
        time.sleep(60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_a_command_in_one_line_and_leaves_no_half_file(number, tmp_path):
    line = "try: interrupted\n" if number == signal.SIGINT else f"try: ended by {number.name}\n"
    assert ended(writing, tmp_path, number) == (128 + number, line)
    assert sorted(os.listdir(tmp_path)) == ["begun", "errors.txt"]


def test_paths_are_repeated_or_have_commas(tmp_path, monkeypatch):
    """An existing file may have commas in its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b.jpg").write_text("")
    values = load("search").flags
    values.parse(["--queries=a,b.jpg", "--queries=*.png,c.jpg"])
    assert values.queries == ["a,b.jpg", "*.png", "c.jpg"]


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (None, 0, ""),
        (KeyboardInterrupt(), 130, "index: interrupted\n"),
        (Interrupted(signal.SIGTERM), 143, "index: ended by SIGTERM\n"),
        (
            UserError("is\nmissing", truncate_dim=...),
            2,
            "index: error: --truncate_dim: is missing\n",
        ),
        (OSError(28, "No space left", "/full"), 2, "index: error: /full: No space left\n"),
        (OSError(0, None, "/odd"), 2, "index: error: /odd: "),
    ],
)
def test_a_command_ends_with_its_status_and_a_line(error, status, says, monkeypatch):
    ended, out, err = run_that_raises(error, monkeypatch)
    assert (ended, out) == (status, "")
    assert err.startswith(says)
    assert err.count("\n") == bool(status)


def test_an_error_of_no_file_is_a_traceback(monkeypatch):
    with pytest.raises(OSError, match="odd"):
        run_that_raises(OSError("odd"), monkeypatch)


def run_that_raises(error, monkeypatch):
    """Run a command whose work raises an error; None: it ends well."""

    def work():
        if error is not None:
            raise error

    command = dataclasses.replace(
        load("index"), work=work, settings=lambda flags: (), needs_tensorflow=False
    )
    monkeypatch.setattr(commands, "load", lambda name: command)
    return commands.run("index")


@pytest.mark.parametrize("name", commands.NAMES)
def test_help_has_every_flag_with_its_meaning_and_default(name):
    command, text = load(name), commands.printed(name, "--help")
    assert text.startswith(command.usage.strip().splitlines()[0])
    assert "\n  --flagfile=PATH\n" in text
    blocks = {
        lines[0].strip().removeprefix("[no]"): lines[1]
        for block in re.split(r"\n  --(?=\w|\[no\])", text)[1:]
        for lines in [block.splitlines()]
    }
    assert blocks.keys() == {*command.flags} | {"flagfile=PATH"}
    for flag_name in command.flags:
        flag = command.flags[flag_name]
        stated = re.search(r" Default: (.*)\.$", blocks[flag_name])
        if flag.default in (None, "", []):
            assert stated is None
        else:
            assert stated[1] == flag.default_as_str
        assert (f"--[no]{flag_name}\n" in text) == bool(flag.boolean)


@pytest.mark.parametrize("live", [False, True])
def test_progress_is_shown_now_and_then(live, monkeypatch):
    shown, now = io.StringIO(), [100.0]
    monkeypatch.setattr(shown, "isatty", lambda: live, raising=False)
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Progress(5_000, 1_000) as progress:
        for seconds, done in ((0.4, 1_500), (20, 3_000), (20.4, 3_100), (40, 5_000)):
            now[0] = 100 + seconds
            progress.images(done, bad=2 * (done == 5_000))
        now[0] = 160
        progress.bytes("download", 3 * 2**20, 4 * 2**20)
    lines = [
        "3,000 of 5,000 images, 100 images a second",
        "5,000 of 5,000 images, 2 bad, 100 images a second",
        "download: 3 of 4 MB",
    ]
    expected = "".join(f"\r{line:<79}" for line in lines) if live else "\n".join(lines)
    assert shown.getvalue() == expected + "\n"
