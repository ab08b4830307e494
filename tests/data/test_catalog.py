import pytest
from PIL import Image

from tfdml.data import catalog
from tfdml.errors import UserError


def test_unknown_and_missing_names_splits_and_options_are_named():
    with pytest.raises(UserError, match=r"unknown data set 'cars'.*cars196, cub200, folder, glyphs"):
        catalog.load("cars")
    with pytest.raises(UserError, match=r"unknown split of glyphs 'validation'.*train, test"):
        catalog.load("glyphs", split="validation")
    with pytest.raises(UserError, match=r"glyphs has no option 'color'.*images_per_class, size, seed"):
        catalog.load("glyphs", color=True)
    with pytest.raises(UserError, match="has no option 'check_counts'"):
        catalog.load("folder", "anywhere", check_counts=False)
    with pytest.raises(UserError, match=r"list is read from a file; name it, `data_dir=FILE`"):
        catalog.load("list")


def test_all_is_of_a_folder_alone(tmp_path):
    (tmp_path / "cat").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "cat" / "1.png")
    assert catalog.load("folder", tmp_path, "all").split == "all"
    with pytest.raises(UserError, match=r"unknown split of glyphs 'all'; .*one of train, test, query, gallery"):
        catalog.load("glyphs", split="all")


@pytest.mark.parametrize("name", ["cars196", "cub200", "folder", "inshop", "omniglot", "sop"])
def test_a_reader_asks_for_its_folder_and_names_one_that_is_not_there(name, tmp_path):
    with pytest.raises(UserError, match=f"{name} is read from a folder.*`data_dir=DIR`"):
        catalog.load(name)
    with pytest.raises(UserError, match=str(tmp_path / "nowhere")):
        catalog.load(name, tmp_path / "nowhere", "test")


def test_options_reach_the_reader_and_a_tilde_is_expanded(tmp_path, monkeypatch):
    for name in "abcd":
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name / "1.png")
    monkeypatch.setenv("HOME", str(tmp_path))
    dataset = catalog.load("folder", "~/photos", "test", test_fraction=0.25)
    assert dataset.class_names == {3: "d"}
    assert dataset.images.paths == (str(tmp_path / "photos" / "d" / "1.png"),)
