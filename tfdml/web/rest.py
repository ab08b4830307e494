"""TensorFlow Serving's REST API for a SavedModel: `ServedModel`, and the routes to ask it."""

import json
from pathlib import Path

import numpy as np
import tensorflow as tf
from absl import logging
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tfdml.errors import ERROR_TEXT, UserError, short_message, user_errors
from tfdml.export.saved_model import WARM_UP, warm_up_requests
from tfdml.web.lanes import Lanes
from tfdml.web.requests import Call, check_pixels, crop_boxes, parse_call, write_answer
from tfdml.web.settings import WebSettings

_AVAILABLE = {"state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}


class ServedModel:
    """A version of a model that `tfdml export` wrote, loaded and warm.

    Args:
        folder: The version, a SavedModel.
        name: What requests call the model.

    Raises:
        UserError: It cannot be loaded, or answers its warm-up requests with NaN.
    """

    def __init__(self, folder: Path, name: str):
        self.name = name
        self.version = folder.name
        unloadable = f"version {folder} is not served: cannot be loaded: {ERROR_TEXT}"
        with user_errors((OSError, tf.errors.OpError, ValueError), unloadable, keep="first"):
            # Kept, as its signatures live no longer than it.
            self._model = tf.saved_model.load(str(folder))
        self._functions = dict(self._model.signatures)
        self.inputs = {
            signature: function.structured_input_signature[1]
            for signature, function in self._functions.items()
        }
        if (folder / WARM_UP).is_file():
            self._warm_up(folder)

    def _warm_up(self, folder: Path) -> None:
        for signature, inputs in warm_up_requests(self._functions):
            outputs = self.compute(Call(signature, inputs, by_row=False))
            for output, array in outputs.items():
                if array.dtype.kind == "f" and np.isnan(array).any():
                    raise UserError(
                        f"version {folder} is not served: its signature {signature} answers a "
                        f"warm-up request with NaN as {output}"
                    )

    def compute(self, call: Call) -> dict[str, np.ndarray]:
        """Return the outputs of a signature, by name.

        Raises:
            UserError: The model refuses the inputs.
        """
        tensors = {}
        for name, array in call.inputs.items():
            dtype = tf.string if array.dtype == object else None
            tensors[name] = tf.constant(array, dtype)
        refusals = (tf.errors.InvalidArgumentError, TypeError, ValueError)
        with user_errors(refusals, ERROR_TEXT, keep="last"):
            outputs = self._functions[call.signature](**tensors)
            return {name: tensor.numpy() for name, tensor in outputs.items()}

    def answer(self, body: bytes, settings: WebSettings) -> tuple[int, bytes]:
        """Return the status and the body of the answer to a predict request."""
        try:
            call = parse_call(body, self.inputs, settings.max_instances)
            check_pixels(call, settings.max_megapixels)
            crop_boxes(call, settings.max_megapixels)
            return 200, write_answer(self.compute(call), call.by_row)
        except UserError as error:
            return 400, _error(short_message(error))
        except Exception as error:
            logging.exception("a request failed")
            return 500, _error(f"the model failed: {short_message(error, 'last', named=True)}")


def _error(message: str) -> bytes:
    return json.dumps({"error": message}).encode()


def rest_routes(model: ServedModel, lanes: Lanes) -> list[Route]:
    """Return the routes of the REST API of a model.

    Args:
        model: What is served.
        lanes: Where it computes.
    """
    settings = lanes.settings

    def check_version(request: Request) -> None:
        if request.path_params.get("version") not in (None, model.version):
            raise HTTPException(404, f"Servable not found for request: {request.url.path}")

    async def predict(request: Request) -> Response:
        async with lanes.place():
            return await answer(request)

    async def answer(request: Request) -> Response:
        check_version(request)
        body = await lanes.read_body(request)
        code, content = await lanes.compute(request, model.answer, body, settings)
        return Response(content, code, media_type="application/json")

    async def status(request: Request) -> Response:
        check_version(request)
        return JSONResponse({"model_version_status": [{"version": model.version, **_AVAILABLE}]})

    path = f"/v1/models/{model.name}"
    versions = f"{path}/versions/{{version}}"
    predictions = [
        Route(f"{place}:predict", predict, methods=["POST"]) for place in (path, versions)
    ]
    return [*predictions, Route(path, status), Route(versions, status)]
