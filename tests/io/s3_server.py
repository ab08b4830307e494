"""An S3 server of this machine (moto's), which can be made slow and faulty."""

import contextlib
import re
import socket
import threading
import time
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
    """One bucket, and the faults that its answers have.

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
        """Make the bucket new and the server well."""
        self._faults, self.requests = [], []
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
    def fault(self, kind, method="", path="", times=10**9):
        """Have requests fail in the block.

        Args:
            kind: A status such as 503; `"reset"` or `"reset after"`, which does what was asked and then resets the
                connection; `"half"` of an answer; seconds that an answer waits.
            method: Of which requests; empty: of all.
            path: A pattern that their paths have.
            times: How many of them.
        """
        fault = [kind, method, path, times]
        self._faults.append(fault)
        try:
            yield
        finally:
            self._faults.remove(fault)

    def __call__(self, environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append(f"{method} {path}")
        for fault in self._faults:
            kind, asked, pattern, left = fault
            if left and asked in ("", method) and re.search(pattern, path):
                fault[3] -= 1
                break
        else:
            kind = None
        if isinstance(kind, float):
            time.sleep(kind)
        if kind == "reset":
            return self._reset(environ)
        if isinstance(kind, int):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(f"{kind} Fault", [("Content-Length", "0")])
            return [b""]
        answer = {}

        def start(status, headers, exc_info=None):
            answer.update(status=status, headers=[(name, value) for name, value in headers if not is_hop_by_hop(name)])

        body = b"".join(self._moto(environ, start))
        if kind == "reset after":
            return self._reset(environ)
        start_response(answer["status"], answer["headers"])
        if kind == "half" and method == "GET":
            return self._halved(environ, body)
        return [body]

    def _halved(self, environ, body):
        yield body[: len(body) // 2]
        yield from self._reset(environ)

    def _reset(self, environ):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionResetError
