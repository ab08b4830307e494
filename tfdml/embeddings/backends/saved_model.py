"""An exported SavedModel, called in this process as a server would call it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfdml.embeddings.backends.base import EncodedImagesBackend, ImageRefused, checksum_of
from tfdml.embeddings.backends.model_card import CARD, compare_with_card, view_of_card
from tfdml.errors import UserError, short_message


class SavedModelEmbedder(EncodedImagesBackend):
    """A SavedModel whose signature `serving_default` takes `image_bytes` (B,) and gives `embedding` (B, d).

    Args:
        path: The path of a version.

    Raises:
        UserError: It cannot be loaded, or has no such signature.
    """

    kind = "saved_model"

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.address = str(path)
        self.view = view_of_card(self.path / CARD)
        compare_with_card(self.path)
        try:
            # Kept, because what the signature refers to lives only as long as this.
            self.loaded = tf.saved_model.load(str(path))
        except Exception as error:  # whatever TensorFlow raises on a damaged graph
            raise UserError(
                f"`model={path}` cannot be loaded as a SavedModel: {short_message(error, 'last')}"
            ) from error
        if "serving_default" not in self.loaded.signatures:
            raise UserError(f"`model={path}`: the SavedModel has no signature serving_default")
        self.serve = self.loaded.signatures["serving_default"]
        inputs, outputs = self.serve.structured_input_signature[1], self.serve.structured_outputs
        if list(inputs) != ["image_bytes"] or "embedding" not in outputs:
            raise UserError(
                f"`model={path}`: serving_default must take image_bytes and give embedding; it takes "
                f"{', '.join(inputs)} and gives {', '.join(outputs)}"
            )

    def checksum(self) -> str:
        """Of all files of the version."""
        return checksum_of(self.path)

    def request(self, encoded_images: list[bytes]) -> np.ndarray:
        """See `EncodedImagesBackend.request`."""
        try:
            return self.serve(image_bytes=tf.constant(encoded_images))["embedding"].numpy()
        except tf.errors.InvalidArgumentError as error:
            raise ImageRefused(short_message(error, "last")) from error

    def request_each(self, encoded_images: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """See `EncodedImagesBackend.request_each`; by the signature `embed_each`, where there is one."""
        if "embed_each" not in self.loaded.signatures:
            return super().request_each(encoded_images)
        found = self.loaded.signatures["embed_each"](image_bytes=tf.constant(encoded_images))
        return found["embedding"].numpy(), found["error"].numpy() == b""
