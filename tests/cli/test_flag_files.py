"""What is wrong with a command line before its flags are parsed."""

import os

import pytest

from tfdml.cli.command_line import read_flag_files
from tfdml.errors import UserError


def test_flags_of_files_stand_in_their_place(tmp_path):
    (tmp_path / "inner.flags").write_text("--epochs=1\n")
    inner = f"--flagfile={tmp_path}/inner.flags"
    (tmp_path / "outer.flags").write_text(f"# --flagfile=none\n// --flagfile=none\n\n --seed=3 \n{inner}\n  {inner}\n")
    given = ["--report", f"--flagfile={tmp_path}/outer.flags", "--flagfile", f"{tmp_path}/inner.flags", "--seed=1"]
    wanted = ["--report", "--seed=3", "--epochs=1", "--epochs=1", "--epochs=1", "--seed=1"]
    assert read_flag_files(given) == wanted


def test_a_file_is_looked_for_beside_the_one_that_names_it(tmp_path, monkeypatch):
    (tmp_path / "more").mkdir()
    (tmp_path / "a.flags").write_text("--seed=1\n")
    (tmp_path / "more" / "b.flags").write_text("--flagfile=../a.flags\n--flagfile=a.flags\n")
    with pytest.raises(UserError, match=r"--flagfile=a.flags cannot be read: No such file"):
        read_flag_files([f"--flagfile={tmp_path}/more/b.flags"])
    monkeypatch.chdir(tmp_path)
    assert read_flag_files(["--flagfile=more/b.flags"]) == ["--seed=1", "--seed=1"]
    (tmp_path / "more" / "a.flags").write_text("--seed=2\n")
    assert read_flag_files(["--flagfile=more/b.flags"]) == ["--seed=1", "--seed=2"]


def test_a_circle_of_two_is_refused(tmp_path):
    (tmp_path / "a.flags").write_text(f"--flagfile={tmp_path}/b.flags\n")
    (tmp_path / "b.flags").write_text(f"--flagfile={tmp_path}/a.flags\n")
    with pytest.raises(UserError, match="the file includes itself"):
        read_flag_files([f"--flagfile={tmp_path}/a.flags"])


@pytest.mark.parametrize(
    ("content", "says"), [(b"\xff\xfe-\0", "no UTF-8 text"), (b"--epochs=1\0", "is no text"), (None, "cannot be read")]
)
def test_what_is_no_text_is_refused(tmp_path, content, says):
    if content is not None:
        (tmp_path / "x.flags").write_bytes(content)
    with pytest.raises(UserError, match=says):
        read_flag_files([f"--flagfile={tmp_path}/x.flags"])


def test_a_pipe_is_read_once():
    reading, writing = os.pipe()
    os.write(writing, b"--epochs=1\n")
    os.close(writing)
    assert read_flag_files([f"--flagfile=/dev/fd/{reading}"]) == ["--epochs=1"]
    os.close(reading)


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(UserError, match=r"'--run_dir=a\\udcff' is not UTF-8 text"):
        read_flag_files(["--run_dir=a\udcff"])
