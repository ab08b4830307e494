"""An S3 server of this machine (moto's), whose answers can be cut."""

import contextlib
import socket
import threading
from wsgiref.util import is_hop_by_hop

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "photos"
KEYS = {
    "AWS_ACCESS_KEY_ID": "a",
    "AWS_SECRET_ACCESS_KEY": "b",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class S3Server:
    """One bucket.

    Attributes:
        address: Its URL.
        requests: Method and path of each request since the last `reset`.
    """

    def __init__(self):
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self, threaded=True)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
        self._client = boto3.client("s3", endpoint_url=self.address, **keys)
        self.reset()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def reset(self):
        """Make the bucket new."""
        self._halved, self.requests = None, []
        with contextlib.suppress(self._client.exceptions.NoSuchBucket):
            for key in self.keys():
                self._client.delete_object(Bucket=BUCKET, Key=key)
        with contextlib.suppress(self._client.exceptions.BucketAlreadyOwnedByYou):
            self._client.create_bucket(Bucket=BUCKET)
        self.requests.clear()

    def put(self, key, data):
        self._client.put_object(Bucket=BUCKET, Key=key, Body=data)

    def get(self, key):
        return self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def keys(self, prefix=""):
        """The keys of the objects; those of folders, which end with a slash, are left out."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", []) if not item["Key"].endswith("/")]

    @contextlib.contextmanager
    def halved(self, path):
        """Have the answers to GET requests of this path end in the middle, in the block."""
        self._halved = path
        try:
            yield
        finally:
            self._halved = None

    def __call__(self, environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append(f"{method} {path}")
        answer = {}

        def start(status, headers, exc_info=None):
            answer.update(status=status, headers=[(name, value) for name, value in headers if not is_hop_by_hop(name)])

        body = b"".join(self._moto(environ, start))
        start_response(answer["status"], answer["headers"])
        if self._halved and method == "GET" and self._halved in path:
            return self._half(environ, body)
        return [body]

    def _half(self, environ, body):
        yield body[: len(body) // 2]
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionResetError
