"""Writes checkpoints as PyTorch, Caffe and safetensors do, byte by byte, without any of them."""

import io
import json
import pickle
import struct
import sys
import types
import zipfile
from collections import OrderedDict

import numpy as np

_STORAGES = {"<f4": "FloatStorage", "<f8": "DoubleStorage", "<f2": "HalfStorage", "<i8": "LongStorage"}


class _Stand:
    """Pickles as a call of torch._utils._rebuild_tensor_v2."""

    def __init__(self, array, key, kinds):
        self.array, self.key, self.kinds = array, key, kinds

    def __reduce__(self):
        strides = tuple(stride // self.array.itemsize for stride in self.array.strides)
        storage = _Storage(self.kinds.storage(self.array), self.key, self.array.size)
        return self.kinds.rebuild, (storage, 0, self.array.shape, strides, False, OrderedDict())


class _Storage:
    def __init__(self, kind, key, size):
        self.pid = ("storage", kind, key, "cpu", size)


class _Pickler(pickle.Pickler):
    def persistent_id(self, value):
        return value.pid if isinstance(value, _Storage) else None


class _Kinds:
    """The names in PyTorch that a checkpoint refers to, as empty stand-ins."""

    def __init__(self):
        self.torch, self.utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
        for name in _STORAGES.values():
            setattr(self.torch, name, type(name, (), {"__module__": "torch", "__qualname__": name}))

        def rebuild():
            raise AssertionError("a reader must not call what a file names")

        rebuild.__module__, rebuild.__qualname__, rebuild.__name__ = ("torch._utils", *["_rebuild_tensor_v2"] * 2)
        self.rebuild = self.utils._rebuild_tensor_v2 = rebuild
        self.torch._utils = self.utils

    def storage(self, array):
        return getattr(self.torch, _STORAGES[array.dtype.str])


def write_torch(path, arrays, monkeypatch, legacy=False, wrap=lambda state: state):
    """A state dict as torch.save writes it, today or before PyTorch 1.6."""
    kinds = _Kinds()
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    state = OrderedDict((name, _Stand(array, str(i), kinds)) for i, (name, array) in enumerate(arrays.items()))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", kinds.torch)
        patch.setitem(sys.modules, "torch._utils", kinds.utils)
        content = io.BytesIO()
        _Pickler(content, protocol=2).dump(wrap(state))
    if legacy:
        with open(path, "wb") as file:
            for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}):
                pickle.dump(part, file, protocol=2)
            file.write(content.getvalue())
            pickle.dump([str(i) for i in range(len(arrays))], file, protocol=2)
            for array in arrays.values():
                file.write(struct.pack("<q", array.size) + array.tobytes())
        return
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content.getvalue())
        archive.writestr("archive/byteorder", "little")
        for i, array in enumerate(arrays.values()):
            archive.writestr(f"archive/data/{i}", array.tobytes())


def write_safetensors(path, arrays):
    kinds = {"<f4": "F32", "<f2": "F16", "<f8": "F64", "<u2": "BF16", "<i8": "I64"}
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name, array in arrays.items():
        data = array.tobytes()
        span = [len(body), len(body) + len(data)]
        header[name] = {"dtype": kinds[array.dtype.str], "shape": list(array.shape), "data_offsets": span}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def varint(value):
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number, data):
    """A length-delimited field of a protocol buffer."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def write_caffemodel(path, layers, old=False):
    """A NetParameter; layers: name -> blobs. `old` is the form before 2015, with four sides a blob."""
    message = field(1, b"net")
    for name, blobs in layers.items():
        text = field(4 if old else 1, name.encode()) + (b"" if old else field(2, b"Convolution"))
        for blob in blobs:
            blob = np.asarray(blob, "<f4")
            if old:
                sides = (1,) * (4 - blob.ndim) + blob.shape
                shape = b"".join(varint(i << 3) + varint(side) for i, side in enumerate(sides, start=1))
                # Numbers one by one, as the format allows.
                data = b"".join(varint(5 << 3 | 5) + number.tobytes() for number in blob.ravel()[:9])
                data += field(5, blob.ravel()[9:].tobytes())
            else:
                shape = field(7, field(1, b"".join(varint(side) for side in blob.shape)))
                data = field(5, blob.tobytes())
            text += field(6 if old else 7, shape + data)
        # A layer's other settings: a varint, 32 and 64 bits, a message.
        text += varint(10 << 3) + varint(300) + varint(11 << 3 | 5) + b"\0" * 4 + varint(12 << 3 | 1) + b"\0" * 8
        message += field(2 if old else 100, text)
    path.write_bytes(message)
