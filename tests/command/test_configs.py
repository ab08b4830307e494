"""`tfdml configs`, and the flag files of the package."""

import pytest

from tests.cli.commands import ROOT
from tfdml.cli.command_line import read_flag_files
from tfdml.errors import UserError
from tfdml_command import configs


def test_every_file_is_listed_with_its_data_set_and_method():
    rows = configs.rows()
    assert {row["flag file"] for row in rows} == {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.flags")
    }
    assert all(row["data set"] and row["method"] for row in rows)


@pytest.mark.parametrize(
    ("name", "data", "number", "time", "method"),
    [
        ("sop_rankmi", "sop", "74.3", "", "RankMI, mutual information with alternating updates"),
        ("inshop_jrd", "inshop", "", "", "JRD, joint representation similarity over AMSoftmax"),  # no row in the paper
        ("baselines/cars_triplet", "cars196", "68.3", "", "The triplet loss, ECAML's base"),  # names another file
        ("quickstart", "glyphs", "", "one to two minutes on two CPU cores", "High-order moments over multi-similarity"),
    ],
)
def test_numbers_are_those_of_the_files(name, data, number, time, method):
    (row,) = [row for row in configs.rows() if row["flag file"] == f"configs/{name}.flags"]
    assert list(row.values()) == [f"configs/{name}.flags", data, number, time, method]


def test_a_single_one_is_printed(capsys):
    assert configs.main(["sop_rankmi"]) == 0
    assert (ROOT / "configs" / "sop_rankmi.flags").read_text() in capsys.readouterr().out
    assert configs.main(["nosuch"]) == 2
    assert capsys.readouterr().err == "configs: error: no flag file has nosuch in its name\n"


def test_a_flag_file_comes_from_the_working_folder_first_and_the_package_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    word = "--flagfile=configs/baselines/cars_triplet.flags"
    shipped = read_flag_files([word])
    assert {"--dataset=cars196", "--objectives=triplet(margin=0.1, distance=sqeuclidean, average=all)"} <= set(shipped)
    (tmp_path / "configs" / "baselines").mkdir(parents=True)
    (tmp_path / "configs" / "baselines" / "cars_triplet.flags").write_text("--epochs=3\n")
    assert read_flag_files([word]) == ["--epochs=3"]
    assert configs.shipped("configs/../setup.cfg") is None


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("configs/sop_rnakmi.flags", "did you mean configs/sop_rankmi.flags?"),
        ("sop_rankmi.flags", "did you mean configs/sop_rankmi.flags?"),
        ("mine/tryal.flags", "did you mean mine/trial.flags?"),
        ("nothing", "see tfdml configs"),
    ],
)
def test_a_wrong_name_of_a_flag_file_names_the_nearest(tmp_path, monkeypatch, name, advice):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "trial.flags").write_text("--epochs=3\n")
    with pytest.raises(UserError) as error:
        read_flag_files([f"--flagfile={name}"])
    assert str(error.value) == f"--flagfile={name}: there is no such file; {advice}"
