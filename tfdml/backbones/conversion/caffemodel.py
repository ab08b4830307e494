"""Caffe's `.caffemodel`: the blobs of each layer, from the wire format of protocol buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tfdml.errors import UserError

# Field numbers of caffe.proto. `layers` is what files of before 2015 have for `layer`.
_NET_LAYER, _NET_LAYERS_V1 = 100, 2
_LAYER = {"name": 1, "blobs": 7}
_LAYER_V1 = {"name": 4, "blobs": 6}
_BLOB_SIDES, _BLOB_DATA, _BLOB_SHAPE, _BLOB_DOUBLES = (1, 2, 3, 4), 5, 7, 8
_SHAPE_DIM = 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def read_caffemodel(path: Path) -> dict[str, np.ndarray]:
    """The blobs of every layer that has any, called `layer.0`, `layer.1` ...

    Raises:
        UserError: Two layers share a name.
    """
    arrays: dict[str, np.ndarray] = {}
    for number, layer in _fields(memoryview(path.read_bytes())):
        if number not in (_NET_LAYER, _NET_LAYERS_V1):
            continue
        fields = _LAYER if number == _NET_LAYER else _LAYER_V1
        name, blobs = "", []
        for inner, value in _fields(layer):
            if inner == fields["name"]:
                name = bytes(value).decode()
            elif inner == fields["blobs"]:
                blobs.append(_blob(value))
        for index, blob in enumerate(blobs):
            if f"{name}.{index}" in arrays:
                raise UserError(f"`path={path}`: two layers are called {name!r}")
            arrays[f"{name}.{index}"] = blob
    return arrays


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The fields of a message: their numbers, and their raw bytes (of a varint, the bytes that encode it)."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            _, end = _varint(data, position)
        elif wire == _BYTES:
            length, position = _varint(data, position)
            end = position + length
        elif wire in (_FIXED32, _FIXED64):
            end = position + (4 if wire == _FIXED32 else 8)
        else:
            raise ValueError(f"wire type {wire}")
        if end > len(data):
            raise ValueError("it is cut short")
        yield number, data[position:end]
        position = end


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _blob(message: memoryview) -> np.ndarray:
    numbers: dict[int, list[bytes]] = {_BLOB_DATA: [], _BLOB_DOUBLES: []}
    sides = dict.fromkeys(_BLOB_SIDES, 1)
    shape: tuple[int, ...] | None = None
    for number, value in _fields(message):
        if number in numbers:
            # Packed, or one by one: the bytes are the same.
            numbers[number].append(bytes(value))
        elif number in sides:
            sides[number] = _varint(value, 0)[0]
        elif number == _BLOB_SHAPE:
            shape = tuple(_dimensions(value))
    single, double = (b"".join(numbers[number]) for number in (_BLOB_DATA, _BLOB_DOUBLES))
    array = np.frombuffer(single, "<f4") if single else np.frombuffer(double, "<f8").astype(np.float32)
    if shape is None:
        shape = tuple(sides[number] for number in _BLOB_SIDES)
    if math.prod(shape) != array.size:
        raise ValueError(f"a blob of shape {shape} holds {array.size} numbers")
    return array.reshape(shape)


def _dimensions(message: memoryview) -> Iterator[int]:
    for number, value in _fields(message):
        position = 0
        while number == _SHAPE_DIM and position < len(value):
            size, position = _varint(value, position)
            yield size
