import pytest
from PIL import Image

from tfdml.data import catalog
from tfdml.errors import UserError


def test_unknown_and_missing_names_splits_options_and_folders_are_named(tmp_path):
    for arguments, options, message in (
        (["cars"], {}, "dataset=cars: unknown"),
        (["glyphs", None, "all"], {}, "split"),
        (["glyphs"], {"color": True}, "color"),
        (["list"], {}, "data_dir"),
        (["cars196", tmp_path / "nowhere"], {}, "nowhere"),
    ):
        with pytest.raises(UserError, match=message):
            catalog.load(*arguments, **options)


def test_options_reach_the_reader_and_a_tilde_is_expanded(tmp_path, monkeypatch):
    for name in "abcd":
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name / "1.png")
    monkeypatch.setenv("HOME", str(tmp_path))
    dataset = catalog.load("folder", "~/photos", "test", test_fraction=0.25)
    assert dataset.class_names == {3: "d"}
    assert dataset.images.paths == (str(tmp_path / "photos" / "d" / "1.png"),)
