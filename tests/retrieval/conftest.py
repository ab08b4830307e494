import pytest

from tests.retrieval.databases import Databases, postgres


@pytest.fixture(scope="module")
def databases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("galleries")
    with postgres(folder / "pg") as server:
        yield Databases(folder, server.get("host", ""))
