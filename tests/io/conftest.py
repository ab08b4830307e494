"""An S3 server for the tests of this folder."""

import pytest

from tfdml.io import files


@pytest.fixture(scope="session")
def s3_server():
    pytest.importorskip("moto", reason="moto is missing: pip install 'tfdml[dev]'")
    from tests.io.s3_server import S3Server

    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(s3_server, monkeypatch):
    """The server with an empty bucket, to which `s3://photos` leads."""
    from tests.io.s3_server import KEYS

    for name, value in {**KEYS, "AWS_ENDPOINT_URL": s3_server.address}.items():
        monkeypatch.setenv(name, value)
    s3_server.reset()
    files._arrow.cache_clear()
    yield s3_server
    files._arrow.cache_clear()
