"""The headers of JPEG, PNG, GIF, BMP and WebP files: how many pixels they state, and whether our decoder takes them.

Nothing is decoded, so that a small file which states a huge image is found before it exhausts the memory.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

# TensorFlow's decoders hold at most 2^29 values, that is so many pixels of three.
MAX_PIXELS = 178_956_970
# What libjpeg and libpng take at most along one side.
_JPEG_SIDE = 65_500
_PNG_SIDE = 1_000_000
_PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
# Markers that start a frame, less those of lossless, hierarchical and arithmetic lossless coding.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_DECODED = (0xC0, 0xC1, 0xC2, 0xC9, 0xCA)
_JPEG_ALONE = frozenset((0x01, *range(0xD0, 0xD9)))
_JPEG_SCAN = 0xDA


class HeaderFault(Exception):
    """The header says that the file cannot be decoded; the message is the reason."""


class Window:
    """Random access to a file whose first bytes have been read already.

    Args:
        file: The file.
        head: Its first bytes.
        size: Its length.
    """

    _AHEAD = 4096

    def __init__(self, file: BinaryIO, head: bytes, size: int):
        self.size = size
        self._file = file
        self._start, self._held = 0, head

    def at(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on; fewer where the file ends before."""
        if not self._start <= offset <= offset + count <= self._start + len(self._held):
            self._file.seek(offset)
            self._start, self._held = offset, self._file.read(max(count, self._AHEAD))
        return self._held[offset - self._start :][:count]


def pixels(window: Window) -> tuple[int, int] | None:
    """Width and height that an image file's header states; of an animation, as if its frames lay side by side.

    Args:
        window: The file.

    Returns:
        (width, height), or None for a file of another type.

    Raises:
        HeaderFault: The decoder will not take the file.

    Example:
        >>> import io
        >>> data = b"BM" + bytes(8) + struct.pack("<IIiiHHI", 54, 40, 1, 1, 1, 24, 0) + bytes(24)
        >>> pixels(Window(io.BytesIO(data), data, len(data)))
        (1, 1)
    """
    head = window.at(0, 16)
    if head.startswith(b"\xff\xd8\xff"):
        return _jpeg(window)
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return _png(window)
    if head.startswith(b"GIF8"):
        return _gif(window)
    if head.startswith(b"BM"):
        return _bmp(window)
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return _webp(window)
    return None


def _jpeg(window: Window) -> tuple[int, int]:
    at = 2
    while at + 4 <= window.size:
        mark, marker, length = struct.unpack(">BBH", window.at(at, 4))
        if mark != 0xFF:
            at += 1  # decoders skip extra bytes between segments
        elif marker == 0xFF or marker in _JPEG_ALONE:
            at += 1 if marker == 0xFF else 2
        elif marker == _JPEG_SCAN:
            break
        elif marker in _JPEG_FRAMES:
            return _jpeg_frame(marker, window.at(at + 4, 6))
        else:
            at += 2 + length
    raise HeaderFault("truncated JPEG (no end-of-image marker)" if at + 4 > window.size else "JPEG without a frame")


def _jpeg_frame(marker: int, frame: bytes) -> tuple[int, int]:
    if len(frame) < 6:
        raise HeaderFault("truncated JPEG (no end-of-image marker)")
    bits, height, width, components = struct.unpack(">BHHB", frame)
    if marker not in _JPEG_DECODED:
        raise HeaderFault("unsupported type: lossless or hierarchical JPEG; save it as baseline JPEG or PNG")
    if bits != 8:
        raise HeaderFault(f"unsupported type: JPEG of {bits} bits; save it with 8")
    if components not in (1, 3, 4):
        raise HeaderFault(f"unsupported type: JPEG of {components} channels; save it as RGB")
    if not width or not height:
        raise HeaderFault("damaged JPEG (no size in its header)")
    if max(width, height) > _JPEG_SIDE:
        raise HeaderFault(f"unsupported type: JPEG of more than {_JPEG_SIDE:,} pixels a side; shrink it")
    return width, height


def _png(window: Window) -> tuple[int, int]:
    header = window.at(8, 21)
    if len(header) < 21:
        raise HeaderFault("truncated PNG (no IEND chunk)")
    kind, width, height, bits, colours, compression, filtering, interlace = struct.unpack(">4x4sIIBBBBB", header)
    sound = bits in _PNG_DEPTHS.get(colours, ()) and not compression and not filtering and interlace < 2
    if kind != b"IHDR" or not sound or not width or not height:
        raise HeaderFault("damaged PNG (impossible header)")
    if max(width, height) > _PNG_SIDE:
        raise HeaderFault(f"unsupported type: PNG of more than {_PNG_SIDE:,} pixels a side; shrink it")
    return width, height


def _gif(window: Window) -> tuple[int, int]:
    """All frames count: TensorFlow's decoder unpacks them all to return the first."""
    flags = window.at(10, 1)
    at = 13 + _palette(flags)
    width = height = 0
    while block := window.at(at, 10):
        if block[:1] == b"\x2c" and len(block) == 10:
            frame_width, frame_height = struct.unpack("<5xHHx", block)
            width, height = width + frame_width, max(height, frame_height)
            at += 11 + _palette(block[9:])
        elif block[:1] == b"\x21":
            at += 2
        else:
            break
        while length := window.at(at, 1):
            at += 1 + length[0]
            if not length[0]:
                break
    if not width or not height:
        raise HeaderFault("truncated GIF (no frame)" if at >= window.size else "damaged GIF (no frame)")
    return width, height


def _palette(flags: bytes) -> int:
    return 3 * (2 << (flags[0] & 7)) if flags and flags[0] & 0x80 else 0


def _bmp(window: Window) -> tuple[int, int]:
    header = window.at(10, 24)
    if len(header) < 24:
        raise HeaderFault("truncated BMP (shorter than its header says)")
    start, form, width, height, _, bits, compression = struct.unpack("<IIiiHHI", header)
    if form < 40:
        raise HeaderFault("unsupported type: BMP of OS/2; save it as PNG")
    if bits not in (8, 24, 32):
        raise HeaderFault(f"unsupported type: BMP with {bits} bits per pixel; save it as PNG")
    if compression and not (compression == 3 and bits == 32):
        raise HeaderFault("unsupported type: compressed BMP; save it as PNG")
    # A negative height means that the top row comes first.
    height = abs(height)
    if width < 1 or not height:
        raise HeaderFault("damaged BMP (no size in its header)")
    row = (width * bits // 8 + 3) // 4 * 4
    if window.size < max(start + height * row, 54):
        raise HeaderFault("truncated BMP (shorter than its header says)")
    return width, height


def _webp(window: Window) -> tuple[int, int]:
    header = window.at(0, 30)
    stated = int.from_bytes(header[4:8], "little") + 8
    if window.size < stated or len(header) < 30:
        raise HeaderFault("truncated WebP (shorter than its header says)")
    kind, length = struct.unpack("<4sI", header[12:20])
    if stated < 20 + length:
        raise HeaderFault("damaged WebP (its image is longer than its header says)")
    if kind == b"VP8X":
        if header[20] & 0x02:
            raise HeaderFault("unsupported type: animated WebP; save one frame of it")
        return 1 + int.from_bytes(header[24:27], "little"), 1 + int.from_bytes(header[27:30], "little")
    if kind == b"VP8L" and header[20] == 0x2F:
        bits = int.from_bytes(header[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and not header[20] & 1 and header[23:26] == b"\x9d\x01\x2a":
        width, height = (value & 0x3FFF for value in struct.unpack("<HH", header[26:30]))
        if width and height:
            return width, height
    raise HeaderFault("damaged WebP (no image behind its header)")
