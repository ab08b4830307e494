"""Arguments in the library's messages, as the flags of a command."""

import logging

import pytest

from tests.cli import commands
from tfdml.cli.command_line import Command, Flags, Formatter, as_flags


@pytest.fixture
def known():
    """The flags of a command."""
    values = Flags()
    for name in ("batch_size", "bad_images", "out", "dataset_options", "data_dir"):
        values.define("string", name, "", "")
    values.define("bool", "allow_extra", False, "")
    return values


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("raise `batch_size`, or lower it", "raise --batch_size, or lower it"),
        ("`batch_size=0` must be at least 1", "--batch_size=0 must be at least 1"),
        ("leave them out with `bad_images='skip'`", "leave them out with --bad_images=skip"),
        ('leave them out with `bad_images="skip"`', "leave them out with --bad_images=skip"),
        ("`allow_extra=True` leaves them out", "--allow_extra leaves them out"),
        ("`allow_extra=False` refuses them", "--noallow_extra refuses them"),
        ("`data_dir=/a b/it's=1`: no such folder", "--data_dir=/a b/it's=1: no such folder"),
        ("`data_dir=`: name a folder", "--data_dir=: name a folder"),
        ("`folder=x` is a file, `out` is not", "--out=x is a file, --out is not"),
        ("size must be positive (one of its `options`)", "size must be positive (one of its --dataset_options)"),
        # No flags of this command.
        ("`margin` must be positive, and `log_dir=1`", "`margin` must be positive, and `log_dir=1`"),
        ("run `tfds build cars196`", "run `tfds build cars196`"),
        ("a`batch_size is no argument", "a`batch_size is no argument"),
        ("batch_size=3 of the file flags.txt", "batch_size=3 of the file flags.txt"),
    ],
)
def test_arguments_are_shown_as_flags(message, shown, known):
    assert as_flags(message, known, {"folder": "out"}) == shown


def test_a_commands_own_names_go_before_those_of_all(known):
    assert as_flags("`options`", known, {"options": "out"}) == "--out"


def test_warnings_are_shown_with_flags(known):
    record = logging.LogRecord("absl", logging.WARNING, "", 0, "`%s=%d` is large", ("batch_size", 9), None)
    assert Formatter(Command("try", print, known, "")).format(record) == "--batch_size=9 is large"


@pytest.mark.parametrize(
    ("command", "arguments", "says"),
    [
        ("prepare", ["--dataset=folder", "--check_only"], "read from a folder; name it, --data_dir=DIR"),
        ("prepare", ["--dataset=tfds", "--check_only"], "(one of its --dataset_options)"),
        ("prepare", ["--dataset=glyphs", "--out=x", "--shrink=-1"], "--shrink=-1: give the pixels"),
        ("train", ["--run_dir=gs://bucket/run"], "--run_dir=gs://bucket/run: only local folders"),
        ("export", ["--run_dir=run", "--out=gs://bucket/x"], "--out=gs://bucket/x: only local folders"),
        ("export", ["--run_dir=run", "--out=x", "--formats=onnxx"], "--formats=onnxx: must be of"),
        ("embed", ["--model=run", "--out=gs://bucket/x"], "--out=gs://bucket/x: only local folders"),
        ("evaluate", ["--model=grpc://nowhere", "--dataset=glyphs"], "--model=grpc://nowhere: write grpc://"),
    ],
)
def test_commands_show_flags(command, arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, error = commands.run(command, *arguments)
    assert status == 2
    assert says in error
    assert "`" not in error
