"""PyTorch's checkpoint files, read without PyTorch and without running what a pickle asks for."""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import pickletools
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tfdml.errors import UserError

# The number that files written before PyTorch 1.6 begin with, as pickled by protocol 2.
_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_HEAD = pickle.dumps(_MAGIC, protocol=2)
_STORAGES = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "?",
}
# Tensors may share a storage, as tied weights do, and 16 bits become 32: more than this is no network's.
_MOST_SHARING = 16
# Where training scripts put the state dict among other things.
_NESTED = ("state_dict", "model_state_dict", "model", "net", "network", "ema")


@dataclasses.dataclass(frozen=True)
class _Storage:
    key: str
    dtype: str
    size: int


@dataclasses.dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def array(self, storage: np.ndarray) -> np.ndarray:
        """The tensor's numbers, copied out of its storage."""
        reach = self.offset + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        if math.prod(self.shape) == 0:
            return np.zeros(self.shape, storage.dtype)
        if self.offset < 0 or min(self.strides, default=0) < 0 or reach >= len(storage):
            raise ValueError(f"a tensor of shape {self.shape} reaches beyond its storage")
        # A stride of 0 repeats numbers: a file of a kilobyte could ask for all the memory there is.
        if math.prod(self.shape) > len(storage):
            raise ValueError(f"a tensor of shape {self.shape} is larger than its storage of {len(storage)} numbers")
        strides = [stride * storage.itemsize for stride in self.strides]
        return np.lib.stride_tricks.as_strided(storage[self.offset :], self.shape, strides).copy()


def is_legacy(head: bytes) -> bool:
    """Whether a file that begins like this was written by `torch.save` before PyTorch 1.6."""
    return head.startswith(_LEGACY_HEAD)


def read_torch(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a `torch.save` file of a state dict, by name.

    Raises:
        UserError: The file holds more than tensors, or no state dict.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            content, load = _open_zip(path, archive)
            return _arrays(path, content, load)
    with open(path, "rb") as file:
        content, load = _open_legacy(path, file)
    return _arrays(path, content, load)


class _Unpickler(pickle.Unpickler):
    """Knows tensors, their storages and ordered dicts; whatever else a pickle names is refused."""

    def __init__(self, path: Path, file: BinaryIO):
        # Files from Python 2 hold byte strings.
        super().__init__(file, encoding="utf-8")
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("torch", "torch.cuda") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch._utils":
            known: dict[str, Callable] = {
                "_rebuild_tensor": _rebuild,
                "_rebuild_tensor_v2": _rebuild,
                "_rebuild_parameter": lambda tensor, *rest: tensor,
            }
            if name in known:
                return known[name]
        raise UserError(
            f"`path={self.path}` holds more than tensors: {module}.{name}, which is not loaded, since a pickle can run "
            "any code. Where PyTorch and the model's code are at hand, write torch.save(model.state_dict(), 'file.pth')"
        )

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, size = pid[:5]
        if kind != "storage" or not isinstance(dtype, str) or (len(pid) > 5 and pid[5] is not None):
            raise ValueError(f"a storage of a form that is not read: {pid!r}")
        return _Storage(str(key), dtype, int(size))


def _unpickled(path: Path, file: BinaryIO) -> Any:
    """The next pickle of a file."""
    start = file.tell()
    for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
        # Objects are remembered under numbers that count up from 0; Python makes room for as many as the largest says.
        if "PUT" in opcode.name and argument is not None and argument > count:
            raise ValueError(f"a pickle with a memo of {argument:,} objects")
    file.seek(start)
    return _Unpickler(path, file).load()


def _rebuild(storage, offset, shape, strides, *rest) -> _Tensor:
    del rest
    return _Tensor(storage, int(offset), tuple(shape), tuple(strides))


def _open_zip(path: Path, archive: zipfile.ZipFile):
    names = [name for name in archive.namelist() if name.endswith("/data.pkl") or name == "data.pkl"]
    if len(names) != 1:
        raise UserError(f"`path={path}` is a zip file, but no PyTorch checkpoint")
    length = path.stat().st_size
    inflated = next((part for part in archive.infolist() if part.file_size > length), None)
    if inflated:  # PyTorch stores its parts as they are
        raise ValueError(f"{inflated.filename} would take {inflated.file_size:,} bytes, more than the file has")
    folder = names[0].removesuffix("data.pkl")
    if f"{folder}constants.pkl" in archive.namelist():
        raise UserError(f"`path={path}` is a TorchScript program: write torch.save(model.state_dict(), 'file.pth')")
    if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
        raise UserError(f"`path={path}` was written on a big-endian machine: load and save it on another")
    content = _unpickled(path, io.BytesIO(archive.read(names[0])))
    return content, lambda storage: archive.read(f"{folder}data/{storage.key}")


def _open_legacy(path: Path, file: BinaryIO):
    if _unpickled(path, file) != _MAGIC:
        raise UserError(f"`path={path}` is no PyTorch checkpoint")
    _protocol, system = _unpickled(path, file), _unpickled(path, file)
    if not system.get("little_endian", True):
        raise UserError(f"`path={path}` was written on a big-endian machine: load and save it on another")
    content, keys = _unpickled(path, file), _unpickled(path, file)
    sizes = {tensor.storage.key: _bytes_of(tensor.storage) for _, tensor in _tensors(content)}
    # The storages follow in the order of the keys: how many numbers, and the numbers.
    data = {}
    for key in map(str, keys):
        (count,) = struct.unpack("<q", file.read(8))
        if key not in sizes:
            raise ValueError(f"storage {key} belongs to no tensor")
        itemsize, expected = sizes[key]
        if count != expected:
            raise ValueError(f"storage {key} holds {count} numbers, not {expected}")
        data[key] = file.read(count * itemsize)
    return content, lambda storage: data[storage.key]


def _bytes_of(storage: _Storage) -> tuple[int, int]:
    return (2 if storage.dtype == "bfloat16" else np.dtype(storage.dtype).itemsize), storage.size


def _tensors(content, prefix: str = ""):
    """Every (path of keys, tensor) in nested dicts and lists."""
    if isinstance(content, _Tensor):
        yield prefix, content
    elif isinstance(content, dict):
        for key, item in content.items():
            yield from _tensors(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(content, (list, tuple)):
        for index, item in enumerate(content):
            yield from _tensors(item, f"{prefix}.{index}" if prefix else str(index))


def _arrays(path: Path, content, load: Callable[[_Storage], bytes]) -> dict[str, np.ndarray]:
    state = content
    if isinstance(content, dict) and not any(isinstance(item, _Tensor) for item in content.values()):
        state = next((content[key] for key in _NESTED if isinstance(content.get(key), dict)), {})
    if not isinstance(state, dict) or not any(isinstance(item, _Tensor) for item in state.values()):
        raise UserError(f"`path={path}` holds no state dict, that is, no dictionary from names to tensors")
    storages: dict[str, np.ndarray] = {}
    arrays: dict[str, np.ndarray] = {}
    left = _MOST_SHARING * path.stat().st_size
    for name, tensor in state.items():
        if isinstance(tensor, _Tensor):
            if tensor.storage.key not in storages:
                storages[tensor.storage.key] = _numbers(tensor.storage, load(tensor.storage))
            arrays[str(name)] = tensor.array(storages[tensor.storage.key])
            left -= arrays[str(name)].nbytes
            if left < 0:
                raise ValueError(f"its tensors take more than {_MOST_SHARING} times the bytes of the file")
    return arrays


def _numbers(storage: _Storage, data: bytes) -> np.ndarray:
    if storage.dtype == "bfloat16":
        return from_bfloat16(np.frombuffer(data, "<u2"))
    return np.frombuffer(data, storage.dtype)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """The float32 numbers whose upper halves these 16-bit integers are."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
