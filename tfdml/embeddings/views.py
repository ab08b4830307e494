"""Several views of an image at test time: their embeddings are averaged."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tfdml.arguments import boolean, integer
from tfdml.data.transforms import EvaluationTransform
from tfdml.embeddings.backends.base import EmbeddingBackend
from tfdml.errors import UserError

if TYPE_CHECKING:
    from tfdml.data.dataset import ImageDataset

# Of the room that a crop has, in halves from the top and from the left: the centre, and the four corners.
_PLACES = {1: ((1, 1),), 5: ((1, 1), (0, 0), (0, 2), (2, 0), (2, 2))}


@dataclasses.dataclass(frozen=True)
class ViewTransform(EvaluationTransform):
    """An evaluation view whose crop lies elsewhere, or is mirrored.

    Args:
        top: Halves of the room that are above the crop: 0, 1 or 2.
        left: Halves of the room that are to its left.
        mirrored: Whether left and right change places after the crop.

    Example:
        >>> ViewTransform(resize=40, image_size=32, top=0, left=2)(tf.zeros((40, 60, 3), tf.uint8)).shape
        TensorShape([32, 32, 3])
    """

    top: int = 1
    left: int = 1
    mirrored: bool = False

    def place(self, size: tuple) -> list:
        """The top and left edge of the crop in a resized image of this height and width."""
        return [
            (edge - self.image_size) * halves // 2 for edge, halves in zip(size, (self.top, self.left), strict=True)
        ]

    def finish(self, part: tf.Tensor, window: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        """See `EvaluationTransform.finish`."""
        if self.resize_mode == "pad":
            return self(part)
        view = super().finish(part, window, size)
        return tf.reverse(view, [-2]) if self.mirrored else view

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        """See `EvaluationTransform.__call__`."""
        views = super().__call__(images)
        return tf.reverse(views, [-2]) if self.mirrored else views


@dataclasses.dataclass(frozen=True)
class Views:
    """Which views of an image are embedded: f = sum_v f_v, scaled to length 1, over crops and, with `flip`, their
    mirror images.

    Args:
        flip: Whether each crop is also embedded mirrored.
        crops: 1: the centre; 5: the four corners too, where `resize` leaves room around `image_size`.

    Raises:
        ValueError: `crops` is neither.

    Example:
        >>> len(Views(flip=True, crops=5).of(EvaluationTransform(resize=256, image_size=224)))
        10

    Source: Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks", NIPS 2012, sec. 4.1.
    """

    flip: bool = True
    crops: int = 1

    def __post_init__(self):
        boolean("flip", self.flip)
        if integer("crops", self.crops, at_least=1) not in _PLACES:
            raise ValueError(f"crops must be 1 or 5, not {self.crops}")

    def of(self, transform: EvaluationTransform) -> list[ViewTransform]:
        """The views, that of the transform itself first.

        Raises:
            UserError: Several crops are asked for and the image is not resized to more than one.
        """
        if self.crops > 1 and transform.resize == transform.image_size:
            raise UserError(
                f"views(crops={self.crops}): images are resized to {transform.resize} px, the crop itself: there is no "
                "room for others"
            )
        plain = {field.name: getattr(transform, field.name) for field in dataclasses.fields(EvaluationTransform)}
        mirrored = (False, True) if self.flip else (False,)
        return [
            ViewTransform(**plain, top=top, left=left, mirrored=m)
            for top, left in _PLACES[self.crops]
            for m in mirrored
        ]


def embed_views(backend: EmbeddingBackend, dataset: ImageDataset, batch_size: int, views: Views) -> np.ndarray:
    """The averaged embeddings of a data set; a pass for each view.

    Args:
        backend: A Keras embedder, LiteRT or ONNX file; SavedModels and endpoints have their one view inside.
        dataset: The images.
        batch_size: B.
        views: Which.

    Returns:
        (N, d) float32 of length 1; 0 where the views cancel.

    Raises:
        UserError: The model has its view inside, or there is no room for crops; as `EmbeddingBackend.embed`.
    """
    transform = getattr(backend, "transform", None)
    if not isinstance(transform, EvaluationTransform):
        raise UserError(
            f"{backend.address} has its one view inside: views needs a run folder, .keras, .tflite or .onnx file"
        )
    total: np.ndarray | None = None
    for view in views.of(transform):
        other = copy.copy(backend)
        other.transform = view  # type: ignore[attr-defined]
        vectors = other.embed(dataset, batch_size)
        total = vectors if total is None else total + vectors
    assert total is not None
    return total / np.maximum(np.linalg.norm(total, axis=1, keepdims=True), np.finfo(np.float32).tiny)
