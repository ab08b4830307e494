#!/usr/bin/env python3
"""A client of a served embedder or retriever, over gRPC or REST; it needs nothing of tfdml.

    python client.py --url=grpc://localhost:8500/embedder car.jpg van.png
    python client.py --url=http://localhost:8501/v1/models/retriever --k=5 car.jpg

All images go out in one request, and one line of JSON comes back for each:
`{"image": ..., "embedding": [...]}`, or its neighbors; or its `error`. The exit status is 0 where
every image has its answer, 1 where one has not, 2 where the request has none.

gRPC needs `pip install tensorflow-serving-api`; REST needs Python alone. In a program:

    address = "http://localhost:8501/v1/models/embedder"
    predict(address, "embed_each", {"image_bytes": [jpeg, png]})["embedding"]
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import json
import pathlib
import re
import sys
import urllib.error
import urllib.request

_ADDRESS = re.compile(
    r"(?:(?P<grpc>grpc)://(?P<target>[^/]+)/|(?P<server>https?://[^/]+)/v1/models/)"
    r"(?P<model>[^/:?#]+)(?:/(?:versions/)?(?P<version>[0-9]{1,18}))?/?"
)


class ServerError(Exception):
    """The server refused the request, or did not answer it:
    `400: image_bytes[1] of 2: no bytes`."""


def predict(
    url: str, signature: str, inputs: dict[str, list], timeout: float = 20.0
) -> dict[str, list]:
    """Return the outputs of a signature by name, a row for each row of the inputs.

    Args:
        url: `grpc://host:port/NAME`, or `http://host:port/v1/models/NAME`; then `/VERSION` or
            `/versions/VERSION`.
        signature: Such as `embed_each`, whose `error` is empty where an image has its embedding.
        inputs: Columns of bytes, integers or lists of floats by name.
        timeout: Seconds that the server may take.

    Raises:
        ValueError: The address is neither.
        ServerError: There is no answer.
    """
    match = _ADDRESS.fullmatch(url)
    if not match:
        raise ValueError(f"{url}: write grpc://host:port/NAME or http://host:port/v1/models/NAME")
    return (_over_grpc if match["grpc"] else _over_rest)(match, signature, inputs, timeout)


def _over_grpc(
    match: re.Match, signature: str, inputs: dict[str, list], timeout: float
) -> dict[str, list]:
    try:
        import grpc
        import tensorflow as tf
        from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc
    except ImportError as error:
        raise ServerError(f"gRPC needs: pip install tensorflow-serving-api ({error})") from error
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = match["model"], signature
    if match["version"]:
        request.model_spec.version.value = int(match["version"])
    for name, values in inputs.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(values))
    # Batches of photographs are beyond the default of 4 MB.
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(match["target"], options=options) as channel:
        try:
            stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
            outputs = stub.Predict(request, timeout=timeout).outputs
        except grpc.RpcError as error:
            raise ServerError(f"{error.code().name}: {_gist(error.details() or '')}") from None
    arrays = {name: tf.make_ndarray(tensor) for name, tensor in outputs.items()}
    return {
        name: _texts(array.tolist()) if array.dtype == object else array.tolist()
        for name, array in arrays.items()
    }


def _texts(value: list | bytes) -> list | str:
    return (
        [_texts(part) for part in value]
        if isinstance(value, list)
        else value.decode("utf-8", "replace")
    )


def _over_rest(
    match: re.Match, signature: str, inputs: dict[str, list], timeout: float
) -> dict[str, list]:
    columns = {
        name: [
            {"b64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
            for value in values
        ]
        for name, values in inputs.items()
    }
    version = f"/versions/{match['version']}" if match["version"] else ""
    url = f"{match['server']}/v1/models/{match['model']}{version}:predict"
    body = json.dumps({"signature_name": signature, "inputs": columns}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            outputs = json.load(response)["outputs"]
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace")
        with contextlib.suppress(ValueError, KeyError, TypeError):
            text = str(json.loads(text)["error"])
        raise ServerError(f"{error.code}: {_gist(text)}") from None
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise ServerError(
            f"no answer: {getattr(error, 'reason', None) or error or type(error).__name__}"
        ) from error
    # A single output comes without its name.
    return outputs if isinstance(outputs, dict) else {"embedding": outputs}


def _gist(text: str) -> str:
    """Return the line of TensorFlow's message that names what is wrong."""
    last = text.partition("[[{{node")[0].strip().splitlines()[-1:] or [text]
    return re.sub(r"^assertion failed: \[(.*)\]$", r"\1", last[0].strip())


def main(argv: list[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", required=True, help="where the model is served")
    parser.add_argument("--k", type=int, default=0, help="search for so many neighbors; 0: embed")
    parser.add_argument(
        "--timeout", type=float, default=20.0, help="seconds that the server may take"
    )
    parser.add_argument("images", nargs="+", help="image files")
    args = parser.parse_args(argv)
    try:
        images = [pathlib.Path(path).read_bytes() for path in args.images]
        inputs = {"image_bytes": images, **({"k": [args.k] * len(images)} if args.k else {})}
        outputs = predict(args.url, "search_each" if args.k else "embed_each", inputs, args.timeout)
    except (OSError, ServerError, ValueError) as error:
        print(f"client: error: {error}", file=sys.stderr)
        return 2
    errors = outputs.pop("error", [""] * len(images))
    for row, (path, error) in enumerate(zip(args.images, errors, strict=True)):
        answer = (
            {"error": error} if error else {name: values[row] for name, values in outputs.items()}
        )
        print(json.dumps({"image": path, **answer}), flush=True)
    return int(any(errors))


if __name__ == "__main__":
    sys.exit(main())
