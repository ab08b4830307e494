"""Flag files: where they are looked for, and command lines that name them."""

import pytest

from tfdml.errors import UserError
from tfdml.flags import read_flag_files, shipped


def test_flags_of_files_stand_in_their_place(tmp_path):
    (tmp_path / "inner.flags").write_text("--epochs=1\n")
    inner = f"--flagfile={tmp_path}/inner.flags"
    (tmp_path / "outer.flags").write_text(
        f"# --flagfile=none\n// --flagfile=none\n\n --seed=3 \n{inner}\n  {inner}\n"
    )
    words = [
        "--report",
        f"--flagfile={tmp_path}/outer.flags",
        "--flagfile",
        f"{tmp_path}/inner.flags",
        "--seed=1",
    ]
    expected = ["--report", "--seed=3", "--epochs=1", "--epochs=1", "--epochs=1", "--seed=1"]
    assert read_flag_files(words) == expected


def test_a_file_is_looked_for_next_to_the_one_that_names_it_first(tmp_path, monkeypatch):
    (tmp_path / "more").mkdir()
    (tmp_path / "a.flags").write_text("--seed=1\n")
    (tmp_path / "more" / "b.flags").write_text("--flagfile=../a.flags\n--flagfile=a.flags\n")
    with pytest.raises(UserError, match=r"flagfile=a\.flags"):
        read_flag_files([f"--flagfile={tmp_path}/more/b.flags"])
    monkeypatch.chdir(tmp_path)
    assert read_flag_files(["--flagfile=more/b.flags"]) == ["--seed=1", "--seed=1"]
    (tmp_path / "more" / "a.flags").write_text("--seed=2\n")
    assert read_flag_files(["--flagfile=more/b.flags"]) == ["--seed=1", "--seed=2"]


def test_a_file_of_the_working_folder_goes_before_one_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    word = "--flagfile=configs/baselines/cars_triplet.flags"
    flags = {
        "--dataset=cars196",
        "--objectives=triplet(margin=0.1, distance=sqeuclidean, average=all)",
    }
    assert flags <= set(read_flag_files([word]))  # and of the file that it names
    (tmp_path / "configs" / "baselines").mkdir(parents=True)
    (tmp_path / "configs" / "baselines" / "cars_triplet.flags").write_text("--epochs=3\n")
    assert read_flag_files([word]) == ["--epochs=3"]
    assert shipped("configs/../setup.cfg") is None


def test_wrong_files_are_refused(tmp_path):
    (tmp_path / "a.flags").write_text(f"--flagfile={tmp_path}/b.flags\n")
    (tmp_path / "b.flags").write_text(f"--flagfile={tmp_path}/a.flags\n")
    (tmp_path / "binary.flags").write_bytes(b"\xff\xfe-\0")
    for path, message in [
        (tmp_path / "a.flags", "includes itself"),
        (tmp_path / "binary.flags", "as text"),
        ("configs/sop_rnakmi.flags", r"configs/sop_rankmi\.flags"),
    ]:
        with pytest.raises(UserError, match=message):
            read_flag_files([f"--flagfile={path}"])
