#!/usr/bin/env python3
"""A client of a served embedder or retriever, over gRPC or REST; it needs nothing of tfdml.

    python client.py --url=grpc://localhost:8500/embedder car.jpg van.png
    python client.py --url=http://localhost:8501/v1/models/embedder photos/*.jpg
    python client.py --url=grpc://localhost:8500/retriever --k=5 car.jpg
    python client.py --url=http://localhost:8501/v1/models/retriever --classify car.jpg
    python client.py --url=http://localhost:8501/v1/models/embedder --same=passport.jpg face.jpg

One line of JSON an image: `{"image": ..., "embedding": [...]}`, or its neighbors, its class, or whether it shows the
same as that of --same; or its `error`. --classify and --same need a model that was exported with --calibrate. The
exit status is 0 where every image has its answer, 1 where one has not, 2 where the server has not answered at all.

gRPC needs `pip install grpcio tensorflow-serving-api`; REST needs Python alone. In a program:

    with Client("grpc://localhost:8500/embedder") as client:
        for answer in client.embed([jpeg, png]):
            print(answer.error or answer.values["embedding"])
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import http.client
import json
import random
import re
import struct
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence

_ADDRESS = re.compile(
    r"(?:(?P<grpc>grpc)://(?P<target>[^/]+)/|(?P<http>https?)://(?P<server>[^/]+)/v1/models/)"
    r"(?P<model>[^/:]+)(?:/(?:versions/)?(?P<version>\d+))?/?"
)
_MB = 2**20


class ServerError(Exception):
    """The server gave no answer to a request: it is away, too slow, or does not serve the model."""


class _Refused(Exception):
    """The request as it stands will not be answered: something in it is bad, or it is too large."""


class _Busy(Exception):
    """Worth another attempt."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came back for one image or embedding.

    Args:
        values: The outputs for it by name: `embedding`; or `indices`, `ids`, `distances`, `similarities`, `labels` and
            `metadata`; or `classes`, `labels`, `distances` and `confidences`; or `distances`, `same` and
            `probabilities`. None where it was refused.
        error: Why it was refused; empty where it was not.
    """

    values: dict | None = None
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Limits:
    """How patient a client is, and how much it asks for at once.

    Args:
        deadline: Seconds that a batch may take with all its attempts.
        timeout: Seconds that one attempt may take.
        attempts: Most attempts of a request. Prediction changes nothing, so that asking again is safe.
        pause: Seconds before the second attempt; doubled before each further one, and shortened at random, so that
            clients that failed together do not come back together.
        batch_images: Most images of a request.
        batch_bytes: Most bytes of their encoded files; an image that is larger goes alone.
    """

    deadline: float = 60.0
    timeout: float = 20.0
    attempts: int = 5
    pause: float = 0.1
    batch_images: int = 32
    batch_bytes: int = 16 * _MB


class Client:
    """A client of one model; any number of threads may use it at once.

    Images go out in batches, to the signatures `embed_each` and `search_each`, which answer for every image by itself.
    Where the server refuses a batch all the same, it is halved until what is bad is found: that gets its error, and all
    others their answer.

    Args:
        url: `grpc://host:port/NAME`, or `http://host:port/v1/models/NAME`; then `/VERSION` or `/versions/VERSION`.
        limits: Deadlines, attempts, batches.
        each: False for models that have `serving_default` and `search_bytes` alone. Do not use it on a server that puts
            the requests of several clients into one batch: the bad image of one fails all.

    Raises:
        ValueError: The address is neither.
    """

    def __init__(self, url: str, limits: Limits | None = None, each: bool = True):
        match = _ADDRESS.fullmatch(url)
        if not match:
            raise ValueError(f"{url}: write grpc://host:port/NAME or http://host:port/v1/models/NAME")
        self.limits = limits or Limits()
        self._signatures = ("embed_each", "search_each") if each else ("serving_default", "search_bytes")
        self._transport = (_Grpc if match["grpc"] else _Rest)(match)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections of this thread."""
        self._transport.close()

    def embed(self, images: Sequence[bytes]) -> list[Answer]:
        """Return the embedding of every image.

        Args:
            images: The bytes of JPEG, PNG or WebP files.

        Returns:
            One answer an image, in their order.

        Raises:
            ServerError: The server did not answer in time, or not at all.
            TypeError: An image is not bytes, such as the path of one.
        """
        return self._all(self._signatures[0], {"image_bytes": images}, _lengths(images))

    def search(self, images: Sequence[bytes], k: int) -> list[Answer]:
        """Return the k nearest gallery items of every image, from a retriever; see `embed`."""
        return self._all(self._signatures[1], {"image_bytes": images, "k": [k] * len(images)}, _lengths(images))

    def search_embeddings(self, embeddings: Sequence[Sequence[float]], k: int) -> list[Answer]:
        """Return the k nearest gallery items of every embedding, from a retriever; see `embed`."""
        sizes = [4 * len(embedding) for embedding in embeddings]
        return self._all("search_embedding", {"embedding": embeddings, "k": [k] * len(embeddings)}, sizes)

    def classify(self, images: Sequence[bytes], k: int = 5) -> list[Answer]:
        """Return the class of every image by a vote of its k nearest gallery items, "unknown" beyond the threshold."""
        return self._all("classify", {"image_bytes": images, "k": [k] * len(images)}, _lengths(images))

    def same(self, images: Sequence[bytes], others: Sequence[bytes]) -> list[Answer]:
        """Return whether every image shows the same as the one in its place among the others."""
        if len(images) != len(others):
            raise ValueError(f"there are {len(images)} images, and {len(others)} others: give as many")
        sizes = [sum(pair) for pair in zip(_lengths(images), _lengths(others), strict=True)]
        return self._all("same", {"image_bytes": images, "other_image_bytes": others}, sizes)

    def _all(self, signature: str, inputs: dict[str, Sequence], sizes: list[int]) -> list[Answer]:
        answers: list[Answer] = []
        for batch in self._batches(sizes):
            end = time.monotonic() + self.limits.deadline
            part = {name: list(values[batch.start : batch.stop]) for name, values in inputs.items()}
            answers += self._halving(signature, part, end)
        return answers

    def _batches(self, sizes: list[int]) -> Iterator[range]:
        first, held = 0, 0
        for row, size in enumerate(sizes):
            if row > first and (row - first == self.limits.batch_images or held + size > self.limits.batch_bytes):
                yield range(first, row)
                first, held = row, 0
            held += size
        if first < len(sizes):
            yield range(first, len(sizes))

    def _halving(self, signature: str, inputs: dict[str, list], end: float) -> list[Answer]:
        count = len(next(iter(inputs.values())))
        try:
            return self._patiently(signature, inputs, count, end)
        except _Refused as refused:
            if count == 1:
                return [Answer(error=str(refused))]
        halves = (slice(count // 2), slice(count // 2, None))
        return [
            answer
            for half in halves
            for answer in self._halving(signature, {name: values[half] for name, values in inputs.items()}, end)
        ]

    def _patiently(self, signature: str, inputs: dict[str, list], count: int, end: float) -> list[Answer]:
        for attempt in range(1, self.limits.attempts + 1):
            left = end - time.monotonic()
            if left <= 0:
                raise ServerError(f"no answer within the deadline of {self.limits.deadline:g} s")
            try:
                columns = self._transport.predict(signature, inputs, min(left, self.limits.timeout))
            except _Busy as busy:
                pause = self.limits.pause * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)
                if attempt == self.limits.attempts or time.monotonic() + pause >= end:
                    raise ServerError(f"no answer in {attempt} attempts: {busy}") from busy
                time.sleep(pause)
                continue
            short = [column for column, values in columns.items() if len(values) != count]
            if short:
                raise ServerError(f"the output {short[0]} has another number of rows than the request")
            errors = columns.pop("error", [""] * count)
            rows = ({column: values[row] for column, values in columns.items()} for row in range(count))
            return [Answer(None, error) if error else Answer(row) for row, error in zip(rows, errors, strict=True)]
        raise AssertionError


def _lengths(images: Sequence[bytes]) -> list[int]:
    for row, image in enumerate(images):
        if not isinstance(image, bytes):
            kind = type(image).__name__
            raise TypeError(f"images[{row}] must be the bytes of an image file, not {kind}: read the file first")
    return [len(image) for image in images]


class _Grpc:
    """gRPC by TF Serving's own stubs; tensors are packed and unpacked here."""

    def __init__(self, match: re.Match):
        try:
            import grpc
            from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc
        except ImportError as error:
            raise ServerError(f"gRPC needs: pip install grpcio tensorflow-serving-api ({error})") from error
        self._grpc, self._messages = grpc, predict_pb2
        self._model, self._version = match["model"], int(match["version"] or 0)
        # Attempts are the client's to space out; batches of photographs are beyond the default of 4 MB.
        options = [
            ("grpc.enable_retries", 0),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        self._channel = grpc.insecure_channel(match["target"], options=options)
        self._stub = prediction_service_pb2_grpc.PredictionServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def predict(self, signature: str, inputs: dict[str, list], timeout: float) -> dict[str, list]:
        request = self._messages.PredictRequest()
        request.model_spec.name, request.model_spec.signature_name = self._model, signature
        if self._version:
            request.model_spec.version.value = self._version
        for name, values in inputs.items():
            _pack(request.inputs[name], values)
        codes = self._grpc.StatusCode
        try:
            outputs = self._stub.Predict(request, timeout=timeout).outputs
        except self._grpc.RpcError as error:
            code, details = error.code(), _gist(error.details() or "no reason given")
            if code in (codes.INVALID_ARGUMENT, codes.RESOURCE_EXHAUSTED, codes.FAILED_PRECONDITION):
                raise _Refused(details) from None
            if code in (codes.UNAVAILABLE, codes.ABORTED, codes.DEADLINE_EXCEEDED):
                raise _Busy(f"{code.name}: {details}") from None
            raise ServerError(f"{code.name}: {details}") from None
        return {name: _unpack(tensor) for name, tensor in outputs.items()}


# Numbers of tensorflow.DataType; struct's letter, and the field of TensorProto that holds such values unpacked.
_STRING = 7
_NUMBERS = {1: ("f", "float_val"), 3: ("i", "int_val"), 9: ("q", "int64_val"), 10: ("?", "bool_val")}


def _pack(tensor, values: list) -> None:
    """Fill a TensorProto: strings (B,), int32 (B,) or float32 (B, d)."""
    tensor.tensor_shape.dim.add(size=len(values))
    if values and isinstance(values[0], bytes):
        tensor.dtype = _STRING
        tensor.string_val.extend(values)
    elif values and isinstance(values[0], int):
        tensor.dtype = 3
        tensor.int_val.extend(values)
    else:
        tensor.dtype = 1
        width = len(values[0]) if values else 0
        if any(len(row) != width for row in values):
            raise _Refused(f"embeddings must have one length; the first has {width}")
        tensor.tensor_shape.dim.add(size=width)
        tensor.tensor_content = b"".join(struct.pack(f"<{width}f", *row) for row in values)


def _unpack(tensor) -> list:
    """Return a TensorProto as lists; strings are UTF-8."""
    shape = [dimension.size for dimension in tensor.tensor_shape.dim]
    size = 1
    for length in shape:
        size *= length
    if tensor.dtype == _STRING:
        flat = [text.decode("utf-8", "replace") for text in tensor.string_val]
    elif tensor.dtype in _NUMBERS:
        letter, field = _NUMBERS[tensor.dtype]
        content = tensor.tensor_content
        flat = list(struct.unpack(f"<{size}{letter}", content)) if content else list(getattr(tensor, field))
    else:
        raise ServerError(f"an output has the type {tensor.dtype}, which this client does not know")
    # What is equal to the end is sent once.
    flat += flat[-1:] * (size - len(flat))
    for length in reversed(shape[1:]):
        flat = [flat[first : first + length] for first in range(0, len(flat), length)] if length else [[]] * shape[0]
    return flat


class _Rest:
    """REST: JSON, bytes in base64."""

    def __init__(self, match: re.Match):
        self._connect = http.client.HTTPSConnection if match["http"] == "https" else http.client.HTTPConnection
        self._server = match["server"]
        version = f"/versions/{match['version']}" if match["version"] else ""
        self._path = f"/v1/models/{urllib.parse.quote(match['model'])}{version}:predict"
        self._local = threading.local()

    def close(self) -> None:
        connection = self._local.__dict__.pop("connection", None)
        if connection is not None:
            connection.close()

    def predict(self, signature: str, inputs: dict[str, list], timeout: float) -> dict[str, list]:
        columns = {name: [_as_json(value) for value in values] for name, values in inputs.items()}
        body = json.dumps({"signature_name": signature, "inputs": columns}).encode()
        status, text = self._post(body, timeout)
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = text
        said = _gist(str(answer.get("error", text) if isinstance(answer, dict) else text))
        if status in (400, 413):
            raise _Refused(said)
        if status in (408, 409, 429, 502, 503, 504):
            raise _Busy(f"{status}: {said}")
        if status != 200 or not isinstance(answer, dict) or "outputs" not in answer:
            raise ServerError(f"{status}: {said}")
        outputs = answer["outputs"]
        # A single output comes without its name.
        return outputs if isinstance(outputs, dict) else {"embedding": outputs}

    def _post(self, body: bytes, timeout: float) -> tuple[int, str]:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connect(self._server)
        connection.timeout = timeout
        if connection.sock is not None:
            connection.sock.settimeout(timeout)
        try:
            connection.request("POST", self._path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise _Busy(str(error) or type(error).__name__) from error


def _as_json(value):
    if isinstance(value, bytes):
        return {"b64": base64.b64encode(value).decode("ascii")}
    return value


def _gist(text: str) -> str:
    """Return the line of TensorFlow's message that says what is wrong."""
    lines = [line.strip() for line in text.partition("[[{{node")[0].splitlines() if line.strip()]
    last = lines[-1] if lines else text.strip()
    said = re.fullmatch(r"assertion failed: \[(.*)\]", last)
    return said[1] if said else last


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        print(json.dumps({"image": path, "error": f"cannot be read: {error.strerror}"}), flush=True)
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Return the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="where the model is served")
    parser.add_argument("--k", type=int, default=0, help="search for so many neighbors; 0: embed")
    parser.add_argument("--classify", action="store_true", help="the class by a vote of k neighbors (5), or unknown")
    parser.add_argument("--same", metavar="IMAGE", help="whether each image shows the same as this one")
    for field in dataclasses.fields(Limits):
        # A literal default determines the type.
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    parser.add_argument("images", nargs="+", help="image files")
    args = parser.parse_args(argv)
    limits = Limits(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Limits)})
    named = [(path, image) for path, image in ((path, _read(path)) for path in args.images) if image is not None]
    good = len(named) == len(args.images)
    other = _read(args.same) if args.same else None
    if args.same and other is None:
        return 1
    try:
        with Client(args.url, limits) as client:
            images = [image for _, image in named]
            if other is not None:
                answers = client.same(images, [other] * len(images))
            elif args.classify:
                answers = client.classify(images, args.k or 5)
            else:
                answers = client.search(images, args.k) if args.k else client.embed(images)
    except (ServerError, ValueError) as error:
        print(f"client: error: {error}", file=sys.stderr)
        return 2
    for (path, _), answer in zip(named, answers, strict=True):
        print(json.dumps({"image": path, **(answer.values or {"error": answer.error})}), flush=True)
        good = good and not answer.error
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
