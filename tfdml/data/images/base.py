"""What an image set is to the rest of the library: images that can be read, measured and looked up by index."""

from __future__ import annotations

import abc
import io
from typing import BinaryIO, ClassVar

import numpy as np
from PIL import Image

from tfdml.data.images.lookup import Source

_ORIENTATION_TAG = 0x0112


class Images(abc.ABC):
    """Images by index. A new kind says how its bytes are read and how a batch of it is looked up; the rest follows.

    Attributes:
        decoded: Whether the images are held as pixels, so that there is nothing to decode and nothing to be damaged.
        verified: Whether whoever made the set has examined its images, so that headers need no second look.
    """

    decoded: ClassVar[bool] = False
    verified: ClassVar[bool] = False

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many images there are."""

    def __repr__(self) -> str:
        # The names of a million images say nothing.
        return f"<{type(self).__name__} of {len(self)} images>"

    @abc.abstractmethod
    def name(self, index: int) -> str:
        """The name of one image in messages and reports."""

    def place(self, index: int) -> str:
        """Where one image lies, for messages on what is wrong with it."""
        return self.name(index)

    @abc.abstractmethod
    def take(self, indices: np.ndarray) -> Images:
        """The images at `indices`, in that order."""

    @abc.abstractmethod
    def encoded(self, index: int) -> bytes:
        """The encoded bytes of one image, cut to its box where it has one.

        Raises:
            OSError: A local file cannot be read.
            tf.errors.OpError: A remote file cannot be read.
            UserError: A record file is damaged.
        """

    @abc.abstractmethod
    def lookup(self) -> Source:
        """How the input pipeline reads a batch of them."""

    def pixels(self) -> np.ndarray:
        """The images themselves, of a kind whose images are `decoded`."""
        raise TypeError(f"{type(self).__name__} holds no decoded images")

    @abc.abstractmethod
    def stamps(self) -> list[tuple[int, int]]:
        """Size in bytes and time of change in nanoseconds of every image, as far as they have such; else 0."""

    def open(self, index: int) -> BinaryIO:
        """One image as a file, for those who need only its beginning or its end."""
        return io.BytesIO(self.encoded(index))

    def size(self, index: int) -> tuple[int, int] | None:
        """Height and width of one image as it is shown, from its header alone; None for what is no image."""
        try:
            with self.open(index) as file, Image.open(file) as image:
                width, height = image.size
                return (width, height) if image.getexif().get(_ORIENTATION_TAG, 1) >= 5 else (height, width)
        except Exception:  # a file system's own errors, and a dozen types that Pillow raises on damaged headers
            return None
