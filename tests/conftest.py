"""Fixtures that every part of the suite shares."""

import os
import pathlib

import pytest


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """The folder with `data/` and `weights/`: TFDML_TEST_DATA, or `shared` beside the repository."""
    named = os.environ.get("TFDML_TEST_DATA")
    folder = pathlib.Path(named) if named else pathlib.Path(__file__).resolve().parents[2] / "shared"
    if not (folder / "data").is_dir():
        pytest.skip("no folder with data/ and weights/: set TFDML_TEST_DATA")
    return folder
