"""An S3 server for the tests of this folder, moto's, with an empty bucket."""

import urllib.request

import pytest

from tfdml.io import files

KEYS = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}


class Bucket:
    """The bucket to which `s3://photos` leads."""

    def __init__(self, address):
        import boto3

        urllib.request.urlopen(f"{address}/moto-api/reset", b"").close()
        self._client = boto3.client("s3", endpoint_url=address, region_name="us-east-1", **KEYS)
        self._client.create_bucket(Bucket="photos")

    def put(self, key, data):
        self._client.put_object(Bucket="photos", Key=key, Body=data)

    def get(self, key):
        return self._client.get_object(Bucket="photos", Key=key)["Body"].read()

    def delete(self, key):
        self._client.delete_object(Bucket="photos", Key=key)


@pytest.fixture(scope="session")
def s3_address():
    moto = pytest.importorskip("moto.server", reason="moto is missing: pip install 'tfdml[dev]'")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3(s3_address, monkeypatch):
    names = {name.upper(): value for name, value in KEYS.items()} | {
        "AWS_DEFAULT_REGION": "us-east-1"
    }
    for name, value in {
        **names,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": s3_address,
    }.items():
        monkeypatch.setenv(name, value)
    files._arrow.cache_clear()
    yield Bucket(s3_address)
    files._arrow.cache_clear()
