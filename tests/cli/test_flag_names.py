"""Arguments in the library's messages, as the flags of a command."""

import logging

import pytest
from absl import flags

from tests.cli.commands import Commands
from tfdml.cli.flag_names import Formatter, as_flags, own_flags


@pytest.fixture
def flags_of_a_command(monkeypatch):
    """The flags of a command, beside one of another library's."""
    values = flags.FlagValues()
    for name in ("batch_size", "bad_images", "out", "dataset_options", "data_dir"):
        flags.DEFINE_string(name, "", "", flag_values=values, module_name="tfdml.cli.command")
    flags.DEFINE_bool("allow_extra", False, "", flag_values=values, module_name="tfdml.cli.command")
    flags.DEFINE_string("log_dir", "", "", flag_values=values, module_name="absl.logging")
    monkeypatch.setattr(flags, "FLAGS", values)


@pytest.mark.usefixtures("flags_of_a_command")
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
def test_arguments_are_shown_as_flags(message, shown):
    assert as_flags(message, {"folder": "out"}) == shown


@pytest.mark.usefixtures("flags_of_a_command")
def test_a_commands_own_names_go_before_those_of_all():
    assert as_flags("`options`", {"options": "out"}) == "--out"


@pytest.mark.usefixtures("flags_of_a_command")
def test_warnings_are_shown_with_flags():
    record = logging.LogRecord("absl", logging.WARNING, "", 0, "`%s=%d` is large", ("batch_size", 9), None)
    assert Formatter(None).format(record) == "--batch_size=9 is large"


@pytest.mark.usefixtures("flags_of_a_command")
def test_only_our_own_flags_are_known():
    assert sorted(own_flags()) == ["allow_extra", "bad_images", "batch_size", "data_dir", "dataset_options", "out"]


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
    status, _, error = Commands().run(command, *arguments)
    assert status == 2
    assert says in error
    assert "`" not in error
