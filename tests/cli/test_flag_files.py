"""What is wrong with a command line before its flags are parsed."""

import os

import pytest

from tfdml.cli import flag_files
from tfdml.errors import UserError


def test_flag_files_in_flag_files_are_read(tmp_path):
    (tmp_path / "inner.flags").write_text("--epochs=1\n")
    inner = f"--flagfile={tmp_path}/inner.flags"
    (tmp_path / "outer.flags").write_text(f"# --flagfile=none\n// --flagfile=none\n\n{inner}\n  {inner}\n")
    flag_files.check([f"--flagfile={tmp_path}/outer.flags", "--flagfile", f"{tmp_path}/inner.flags", "--seed=1"])


def test_a_circle_of_two_is_refused(tmp_path):
    (tmp_path / "a.flags").write_text(f"--flagfile={tmp_path}/b.flags\n")
    (tmp_path / "b.flags").write_text(f"--flagfile={tmp_path}/a.flags\n")
    with pytest.raises(UserError, match="the file includes itself"):
        flag_files.check([f"--flagfile={tmp_path}/a.flags"])


@pytest.mark.parametrize(
    ("content", "says"), [(b"\xff\xfe-\0", "no UTF-8 text"), (b"--epochs=1\0", "is no text"), (None, "cannot be read")]
)
def test_what_is_no_text_is_refused(tmp_path, content, says):
    if content is not None:
        (tmp_path / "x.flags").write_bytes(content)
    with pytest.raises(UserError, match=says):
        flag_files.check([f"--flagfile={tmp_path}/x.flags"])


def test_a_pipe_is_left_to_be_read_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    flag_files.check([f"--flagfile={tmp_path}/pipe"])


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(UserError, match=r"'--run_dir=a\\udcff' is not UTF-8 text"):
        flag_files.check(["--run_dir=a\udcff"])
