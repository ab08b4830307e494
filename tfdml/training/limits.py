"""Checks that fail before training starts: batches without positive pairs, and models that do not fit in memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdml.data.transforms import TrainTransform
from tfdml.errors import UserError
from tfdml.memory import free_memory, require_memory
from tfdml.models import Embedder
from tfdml.objectives import Objective
from tfdml.training import distribution
from tfdml.training.settings import DataSettings

_FLOAT32 = 4
# What an optimiser keeps beside each weight, in numbers.
_OPTIMIZER_STATE = {"adam": 2, "adamw": 2, "rmsprop": 1, "sgd": 1, "lion": 1, "muon": 2}


def check_pairs(settings: DataSettings, objectives: Sequence[Objective]) -> None:
    """Refuse batches in which a term would never find what it learns from.

    Args:
        settings: How batches are composed.
        objectives: The terms.

    Raises:
        UserError: A term needs pairs of images of one class, or of two, and no batch would hold one.
    """
    needed = {pair: term.name for term in objectives for pair in term.learns_from}
    by_class = settings.sampling in ("class_balanced", "hierarchical")
    batch_size = settings.classes_per_batch * settings.images_per_class if by_class else settings.batch_size
    if needed and batch_size == 1:
        flag = "--classes_per_batch=1 --images_per_class=1" if by_class else "--batch_size=1"
        raise UserError(
            f"{flag}: {next(iter(needed.values()))} learns from pairs of images, and no batch would hold one"
        )
    if by_class and "positive" in needed and settings.images_per_class == 1:
        raise UserError(
            f"--images_per_class=1: {needed['positive']} learns from pairs of images of one class, and no batch would "
            "hold one; use 2 or more"
        )
    if by_class and "negative" in needed and settings.classes_per_batch == 1:
        raise UserError(
            f"--classes_per_batch=1: {needed['negative']} learns from pairs of images of different classes, and no "
            "batch would hold one; use 2 or more"
        )


def check_starts(objectives: Sequence[Objective], steps: int) -> None:
    """Refuse a memory that would be empty to the end of the run.

    Args:
        objectives: The terms.
        steps: How many steps the run has.

    Raises:
        UserError: A term's memory starts after them.
    """
    for term in objectives:
        start = getattr(term, "start", 0)
        if 0 < steps <= start:
            raise UserError(
                f"{term.name}: the memory starts after {start:,} steps (--xbm_start, or start in --objectives), and "
                f"the run has {steps:,}: start earlier, or train for longer"
            )


def step_memory(embedder: Embedder, view: TrainTransform, batch_size: int, chunk: int = 0) -> float:
    """Bytes that a training step takes at least, besides the weights: the images, and what the backbone keeps.

    Counted are the outputs of the layers with weights, which their neighbours' gradients need; of a backbone that does
    not train, the largest output and its input.

    Args:
        embedder: The built embedder.
        view: The view of training.
        batch_size: Images per step.
        chunk: How many of them the backbone sees at a time; 0 for all.
    """
    outputs = [_size(layer) for layer in embedder.backbone.layers if layer.weights]
    kept = sum(outputs) if embedder.backbone.trainable else 2 * max(outputs, default=0)
    width = _FLOAT32 if embedder.compute_dtype == "float32" else 2
    floats = 3 * view.image_size**2 * _FLOAT32
    return images_memory(view, batch_size) + min(batch_size, chunk or batch_size) * (floats + kept * width)


def images_memory(view: TrainTransform, batch_size: int) -> float:
    """Bytes that the images of a step take at least in the host's memory: the batch, and one that is being resized.

    Args:
        view: The view of training.
        batch_size: Images per step.
    """
    side: float = view.resize
    if view.augmentation == "multi_resolution":
        side = max(side, view.resolutions[1] * view.image_size)
    return _FLOAT32 * 3 * side**2 + batch_size * 3 * view.image_size**2


def check_memory(embedder: Embedder, view: TrainTransform, batch_size: int, chunk: int = 0) -> None:
    """Refuse a run whose steps need more memory than is free; of a GPU's memory, the GPU tells so itself.

    Args:
        embedder: The built embedder.
        view: The view of training.
        batch_size: Images per step.
        chunk: How many of them the backbone sees at a time; 0 for all.

    Raises:
        UserError: It does not fit.
    """
    what = f"a step on {batch_size:,} images of --image_size={view.image_size}"
    advice = "lower --image_size, --resize or the batch"
    if distribution.on_gpu():
        require_memory(images_memory(view, batch_size), what, advice)
    else:
        advice += ", choose a smaller --backbone, or add --gradient_cache"
        require_memory(step_memory(embedder, view, batch_size, chunk), what, advice)


@contextlib.contextmanager
def weights_within_memory(optimizer: str, averages: bool = False) -> Iterator[None]:
    """Refuse a weight, before it is made, with which training would take more memory than was free at the start.

    Args:
        optimizer: Its name, which says how much it keeps of each weight.
        averages: Whether it keeps an average of each, too.

    Raises:
        UserError: The weights made in the scope, their gradients and the optimiser's state for them do not fit.
    """
    free, total = free_memory(), 0.0
    # A random initial value takes three times its size while it is drawn.
    copies = max(3, 2 + _OPTIMIZER_STATE[optimizer] + averages)

    def create(next_creator, **arguments):
        nonlocal total
        shape, size = _shape_and_bytes(arguments)
        total += size * (copies if arguments.get("trainable") else 1)
        if total > free:
            raise UserError(
                f"training the network would take more than {total / 2**30:,.1f} GB of memory, and "
                f"{free / 2**30:,.1f} GB are free: a weight ({arguments.get('name')}) has the shape {shape}; lower "
                "--embedding_dim, or the sizes in --backbone and --objectives"
            )
        return next_creator(**arguments)

    # A GPU has memory of its own, and tells when it is full.
    guard = contextlib.nullcontext() if distribution.on_gpu() else tf.variable_creator_scope(create)
    try:
        with guard:
            yield
    except tf.errors.ResourceExhaustedError as error:
        raise UserError(
            "the network does not fit the device's memory: lower --embedding_dim, or the sizes in --backbone and "
            "--objectives"
        ) from error


def _shape_and_bytes(arguments: dict[str, Any]) -> tuple[tuple[int, ...], float]:
    """Of a variable that is to be made: its initial value is asked in a graph, where nothing is computed."""
    value = arguments["initial_value"]
    if callable(value):
        with tf.Graph().as_default():
            value = value()
    # A single weight may begin as a plain number.
    shape = tuple(tf.TensorShape(getattr(value, "shape", ())).as_list())
    dtype = tf.as_dtype(arguments.get("dtype") or getattr(value, "dtype", tf.float32))
    return shape, float(math.prod(shape)) * dtype.size


def _size(layer: keras.layers.Layer) -> int:
    """Numbers in a layer's output for one image; 0 for a layer that stands in several places."""
    try:
        shapes = [tensor.shape[1:] for tensor in keras.tree.flatten(layer.output)]
    except (AttributeError, ValueError):
        return 0
    return sum(math.prod(shape) for shape in shapes if None not in shape)
