"""Converters without their chatter."""

from __future__ import annotations

import contextlib
import logging as python_logging
import warnings
from collections.abc import Iterator

from absl import logging


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what TensorFlow and tf2onnx log of every save and conversion; what fails is raised."""
    verbosity = logging.get_verbosity()
    onnx = python_logging.getLogger("tf2onnx")
    level = onnx.level
    logging.set_verbosity(logging.ERROR)
    onnx.setLevel(python_logging.ERROR)
    try:
        with warnings.catch_warnings():
            # The converter warns of an interpreter that it uses itself.
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        onnx.setLevel(level)
