import numpy as np
import pytest

from tests.retrieval.databases import Databases, postgres


@pytest.fixture(scope="package")
def databases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("galleries")
    with postgres() as socket, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PGHOST", socket)
        yield Databases(folder, bool(socket))


@pytest.fixture(scope="package")
def few():
    """(300, 6) vectors."""
    return np.random.default_rng(3).normal(size=(300, 6)).astype(np.float32)
