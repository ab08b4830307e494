"""Versions are there whole or not at all, count up, and never overwrite one another."""

import concurrent.futures
import os
import stat

import pytest

from tfdml.errors import UserError
from tfdml.export.versions import new_version, version_numbers


def write(versions, content):
    with new_version(versions) as version:
        assert version.folder.parent == versions
        assert version.folder.name.startswith(".")
        (version.folder / "below").mkdir()
        (version.folder / "below" / "file").write_text(content)
    return version.path


def test_versions_count_up_and_old_ones_stay(tmp_path):
    versions = tmp_path / "models" / "cars"
    assert [write(versions, text).name for text in ("one", "two")] == ["1", "2"]
    assert [(versions / name / "below" / "file").read_text() for name in "12"] == ["one", "two"]
    assert version_numbers(versions) == [1, 2]


def test_the_next_number_is_one_more_than_the_highest(tmp_path):
    for name in ("3", "10", "notes", ".partial-x", "7a"):
        (tmp_path / name).mkdir()
    assert write(tmp_path, "new").name == "11"
    assert (tmp_path / ".partial-x").is_dir()  # it may be another process's


def test_a_failure_leaves_nothing_not_even_the_folders_that_were_made_for_it(tmp_path):
    with pytest.raises(ZeroDivisionError), new_version(tmp_path / "a" / "b") as version:
        (version.folder / "half").write_text(str(1 // len(version.path or "")))
    assert not list(tmp_path.iterdir())
    (tmp_path / "1").mkdir()
    with pytest.raises(UserError), new_version(tmp_path):
        raise UserError("refused")
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]


def test_exporters_at_once_get_numbers_of_their_own(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda number: write(tmp_path, str(number)), range(24)))
    assert sorted(int(path.name) for path in paths) == list(range(1, 25))
    assert [(path / "below" / "file").read_text() for path in paths] == [str(number) for number in range(24)]
    assert len(list(tmp_path.iterdir())) == 24


def test_another_user_may_read_a_version(tmp_path):
    mode = stat.S_IMODE(write(tmp_path, "x").stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    assert mode == 0o777 & ~mask


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match="file"), new_version(tmp_path / "file" / "below"):
        pytest.fail("there is no such place")
    assert version_numbers(tmp_path / "file") == []
