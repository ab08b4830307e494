"""Two small embedders in every form, which the tests share and do not change."""

import pytest

from tests.export import models_on_disk


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return models_on_disk.make(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def other(tmp_path_factory):
    return models_on_disk.make(tmp_path_factory.mktemp("other"), seed=1)
