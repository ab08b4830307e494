"""Arrays by name from the files that checkpoints come in, without the libraries that wrote them."""

from __future__ import annotations

import json
import os
import re
import struct
import zipfile
from pathlib import Path

import h5py
import numpy as np

from tfdml import storage
from tfdml.backbones.conversion.caffemodel import read_caffemodel
from tfdml.backbones.conversion.torch_file import from_bfloat16, is_legacy, read_torch
from tfdml.errors import UserError, short_message

_SAFETENSORS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"}
_SAFETENSORS |= {"U8": "u1", "BOOL": "?", "BF16": "<u2"}


def read_checkpoint(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint by name; half precision comes out as float32.

    Read are PyTorch files (`torch.save` of a state dict, in the format of today or in that before PyTorch 1.6),
    `.safetensors`, `.caffemodel`, Caffe's `.caffemodel.h5`, other `.h5` files of arrays, and `.npz`. PyTorch is not
    needed, and nothing that a file says is executed. The arrays of Caffe's layers are called `layer.0`, `layer.1` ...

    Args:
        path: The file; its content decides, not its name, save for `.caffemodel`.

    Raises:
        UserError: The file is missing, damaged, or of another kind.

    Example:
        >>> sorted(read_checkpoint("bn_inception-52deb4733.pth"))[:2]
        ['conv1_7x7_s2.bias', 'conv1_7x7_s2.weight']
    """
    path = Path(path)
    try:
        with storage.open_file(path) as file:
            head = file.read(16)
    except OSError as error:
        raise UserError(f"`path={path}` cannot be read: {error.strerror}") from error
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                is_numpy = any(name.endswith(".npy") for name in archive.namelist())
            arrays = _read_npz(path) if is_numpy else read_torch(path)
        elif head.startswith(b"\x89HDF\r\n\x1a\n"):
            arrays = _read_hdf5(path)
        elif is_legacy(head):
            arrays = read_torch(path)
        elif head[8:9] == b"{":
            arrays = _read_safetensors(path)
        elif path.suffix == ".caffemodel":
            arrays = read_caffemodel(path)
        else:
            raise UserError(
                f"`path={path}` is of no known kind: PyTorch (.pth of a state dict), .safetensors, .caffemodel, .h5, "
                ".npz"
            )
    except UserError:
        raise
    except Exception as error:
        # Whatever a damaged file makes the readers stumble over.
        raise UserError(f"`path={path}` is damaged or no checkpoint ({short_message(error, named=True)})") from error
    if not arrays:
        raise UserError(f"`path={path}` holds no arrays")
    return {name: _widen(array) for name, array in arrays.items()}


def _widen(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _read_hdf5(path: Path) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}

    def take(name, item):
        if isinstance(item, h5py.Dataset):
            if item.external or item.is_virtual:
                raise UserError(f"`path={path}`: the numbers of {name} lie in other files, which are not opened")
            # Caffe: data/<layer, which may hold slashes>/<index>.
            layer = re.sub(r"/(\d+)$", r".\1", name)
            arrays[layer.removeprefix("data/") if layer != name else name] = item[()]

    with h5py.File(path, "r") as file:
        file.visititems(take)
    return arrays


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    data = memoryview(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    if length > len(data) - 8:
        raise ValueError("its header is cut short")
    header = json.loads(bytes(data[8 : 8 + length]))
    body = data[8 + length :]
    arrays = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _SAFETENSORS:
            raise UserError(f"`path={path}`: {name} is of type {entry['dtype']}, which is not read")
        first, last = entry["data_offsets"]
        array = np.frombuffer(body[first:last], _SAFETENSORS[entry["dtype"]]).reshape(entry["shape"])
        arrays[name] = from_bfloat16(array) if entry["dtype"] == "BF16" else array
    return arrays
