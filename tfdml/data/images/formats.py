"""The image formats that are decoded, told by their first bytes, and how many pixels an image may have."""

from __future__ import annotations

import dataclasses

# TensorFlow's decoders hold at most 2^29 values, that is so many pixels of three.
DECODER_LIMIT = 178_956_970
# What three bytes of a decoded pixel may take in a server by default: 300 MB for the largest image.
SERVING_LIMIT = 100_000_000


@dataclasses.dataclass(frozen=True)
class Format:
    """An image format.

    Args:
        name: As the feature `image/format` of record files has it.
        start: The bytes that a file begins with.
        extensions: Of file names, in lower case.
        brand: The bytes from the ninth on; empty for any.
    """

    name: str
    start: bytes
    extensions: tuple[str, ...]
    brand: bytes = b""

    def matches(self, head: bytes) -> bool:
        """Whether a file with these first bytes is of the format.

        Example:
            >>> PNG.matches(b"GIF89a"), WEBP.matches(b"RIFF....WEBPVP8 ")
            (False, True)
        """
        return head.startswith(self.start) and head[8:].startswith(self.brand)


JPEG = Format("jpeg", b"\xff\xd8\xff", (".jpg", ".jpeg"))
PNG = Format("png", b"\x89PNG\r\n\x1a\n", (".png",))
WEBP = Format("webp", b"RIFF", (".webp",), b"WEBP")
GIF = Format("gif", b"GIF8", (".gif",))
BMP = Format("bmp", b"BM", (".bmp",))
FORMATS = (JPEG, PNG, WEBP, GIF, BMP)
# The extensions of file names, by which images are found in folders; what a file is, its bytes say.
EXTENSIONS = tuple(extension for known in FORMATS for extension in known.extensions)
FOREIGN = "not a JPEG, PNG, GIF, BMP or WebP image"


def format_of(head: bytes) -> Format | None:
    """The format of a file by its first 16 bytes; None for another.

    Example:
        >>> format_of(b"GIF89a").name
        'gif'
    """
    return next((known for known in FORMATS if known.matches(head)), None)
