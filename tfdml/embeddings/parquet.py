"""The Parquet files of embeddings, which any Parquet tool reads: their columns, writing and reading them."""

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from tfdml.errors import REASON, UserError, user_errors
from tfdml.memory import free_memory

DTYPES = ("float32", "int8")
# The columns, in this order. A file from elsewhere needs `embedding` only.
COLUMNS = ("id", "path", "label", "class", "role", "group", "embedding", "scale")
# Rows of one group, which readers take at once.
_GROUP_BYTES = 2**24
_BATCH_ROWS = 8192
# The share of the free memory that embeddings may take. Larger ones are copied into a file that is memory-mapped.
_SHARE_OF_MEMORY = 0.25


def quantized(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows in 8 bits with a scale each: v is about scale * q, to half a scale in each component.

    Args:
        vectors: (N, d) finite.

    Returns:
        q (N, d) int8 in -127 .. 127 and the scales (N,) float32, max |v| / 127; a zero row has scale 0.

    Example:
        >>> q, scale = quantized(np.array([[1.27, -0.5], [0.0, 0.0]]))
        >>> q.tolist(), np.round(scale, 4).tolist()
        ([[127, -50], [0, 0]], [0.01, 0.0])
    """
    scale = (np.abs(vectors).max(axis=1) / 127).astype(np.float32)
    # A scale too small for float32 is that of a zero row.
    divisor = np.where(scale > 0, scale, np.float32(1))[:, None]
    return np.clip(np.rint(vectors / divisor), -127, 127).astype(np.int8) * (scale > 0)[:, None], scale


def table_of(images: Mapping[str, Any], vectors: np.ndarray, dtype: str = "float32") -> Any:
    """Return the Arrow table of images and their embeddings.

    Args:
        images: (N,) values of `id`, `path` and, where known, `label`, `class`, `role` and `group`; None where they are
            not.
        vectors: (N, d) float32.
        dtype: `"float32"`, or `"int8"` with a `scale` for each row, see `quantized`.

    Returns:
        A `pyarrow.Table` with `COLUMNS`; `group` and `scale` where there are any. `embedding` is a fixed-size list.

    Raises:
        UserError: A path is not UTF-8.

    Example:
        >>> table_of({"id": [0], "path": ["a.jpg"], "label": [3]}, np.ones((1, 2), np.float32)).column_names
        ['id', 'path', 'label', 'class', 'role', 'embedding']
    """
    require_utf8(images["path"])
    values, scale = (vectors.astype(np.float32, copy=False), None) if dtype == "float32" else quantized(vectors)
    text = pa.dictionary(pa.int32(), pa.string())
    kinds = {"id": pa.int64(), "path": pa.string(), "label": pa.int64(), "class": text, "role": text}
    kinds |= {"group": pa.int64()} if images.get("group") is not None else {}
    empty = [None] * len(values)
    given = {name: empty if images.get(name) is None else images[name] for name in kinds}
    columns = {name: pa.array(given[name], kind) for name, kind in kinds.items()}
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    columns["embedding"] = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    if scale is not None:
        columns["scale"] = pa.array(scale)
    return pa.table(columns)


def require_utf8(paths: Iterable[str]) -> None:
    """Raise a `UserError` for a path that is not UTF-8, as Parquet's texts are."""
    for path in paths:
        try:
            path.encode()
        except UnicodeEncodeError:
            shown = path.encode("utf-8", "backslashreplace").decode()
            raise UserError(f"Parquet holds paths as UTF-8, and {shown} is not: rename the file") from None


def row_bytes(dimension: int, dtype: str) -> int:
    """About the bytes of a row, its path apart."""
    return dimension * (4 if dtype == "float32" else 1) + 32


def write_file(path: str | os.PathLike | Any, table: Any) -> None:
    """Write a table of `table_of`; the same table gives the same bytes.

    Args:
        path: The file.
        table: The table.
    """
    field = table.schema.field("embedding").type
    width = field.value_type.bit_width // 8 * field.list_size
    # Numbers that look random do not shrink; the rest does.
    names = [name for name in table.column_names if name != "embedding"]
    compression = {**dict.fromkeys(names, "zstd"), "embedding.list.element": "none"}
    pa.parquet.write_table(
        table,
        path,
        row_group_size=max(1, _GROUP_BYTES // width),
        use_dictionary=["class", "role"],
        compression=compression,
        write_statistics=["id", "label"],
    )


def part_name(number: int) -> str:
    """Return the name of one of the files of a folder.

    Example:
        >>> part_name(7)
        'part-000007.parquet'
    """
    return f"part-{number:06d}.parquet"


def read_files(files: Sequence[Path]) -> tuple[np.ndarray, dict[str, np.ndarray | None]]:
    """Return the embeddings of Parquet files, one after another.

    Args:
        files: Their paths. `embedding` is a list of numbers, the same number in each row, fixed-size or not; with a
            column `scale`, each row is multiplied by its own. `label`, `class`, `role` and `group` may be there.

    Returns:
        (N, d) float32 embeddings, of many in a file that is mapped; and the (N,) values of each of these columns, or
        None. Labels are int64 or names of classes. Groups are numbered from 0; a row without one is a group of its
        own, with a negative number.

    Raises:
        UserError: A file cannot be read, or holds no such columns.

    Example:
        >>> read_files(sorted(Path("embeddings/cars").glob("*.parquet")))[0].shape
        (256, 8)
    """
    opened = [_open(path) for path in files]
    count = sum(file.metadata.num_rows for file in opened)
    if not count:
        raise UserError(f"{files[0]} holds no row" if len(files) == 1 else f"{files[0].parent} holds no row")
    embeddings, done = None, 0
    for path, batch in _batches(files, opened, ("embedding", "scale")):
        vectors = _vectors(path, batch)
        if embeddings is None:
            embeddings = _allocate((count, vectors.shape[1]))
        if vectors.shape[1] != embeddings.shape[1]:
            raise UserError(f"{path}: embeddings of {vectors.shape[1]} dimensions after {embeddings.shape[1]}")
        embeddings[done : done + len(vectors)] = vectors
        done += len(vectors)
    assert embeddings is not None
    return embeddings, {name: _column(files, opened, name) for name in ("label", "class", "role", "group")}


def read_paths(files: Sequence[Path]) -> tuple[str, ...]:
    """Return the column `path` in the order of `read_files`; the numbers of the rows where there is none."""
    opened = [_open(path) for path in files]
    paths = _column(files, opened, "path")
    numbers = range(sum(file.metadata.num_rows for file in opened))
    return tuple(map(str, numbers if paths is None else paths.tolist()))


def _open(path: Path) -> Any:
    with user_errors((OSError, pa.ArrowException), f"{path} cannot be read as Parquet: {REASON}", keep="first"):
        file = pa.parquet.ParquetFile(path, memory_map=True)
        names = file.schema_arrow.names
    if "embedding" not in names:
        raise UserError(f"{path} has no column embedding; it has {', '.join(names)}")
    return file


def _batches(files: Sequence[Path], opened: Sequence[Any], names: Sequence[str]) -> Iterator[tuple[Path, Any]]:
    for path, file in zip(files, opened, strict=True):
        wanted = [name for name in names if name in file.schema_arrow.names]
        with user_errors((OSError, pa.ArrowException), f"{path} is damaged: {REASON}", keep="first"):
            for batch in file.iter_batches(_BATCH_ROWS, columns=wanted):
                yield path, batch


def _vectors(path: Path, batch: Any) -> np.ndarray:
    """(B, d) float32 of a batch."""
    column = batch.column("embedding")
    column = getattr(column, "storage", column)  # of an extension type, such as another library's tensors
    is_list = pa.types.is_fixed_size_list(column.type) or pa.types.is_list(column.type)
    if not is_list or not (pa.types.is_floating(column.type.value_type) or pa.types.is_integer(column.type.value_type)):
        raise UserError(f"{path}: embedding must be a list of numbers, not {column.type}")
    values, lengths = column.flatten(), column.value_lengths().unique()
    if values.null_count or lengths.null_count or len(lengths) != 1:
        raise UserError(f"{path}: every row needs an embedding of as many numbers, without null")
    dimension = lengths[0].as_py()
    if not dimension:
        raise UserError(f"{path}: embeddings of no dimension")
    vectors = values.to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, dimension)
    if "scale" in batch.schema.names:
        vectors *= batch.column("scale").to_numpy(zero_copy_only=False).astype(np.float32)[:, None]
    return vectors


def _column(files: Sequence[Path], opened: Sequence[Any], name: str) -> np.ndarray | None:
    """All of a column, (N,); None where it is in no file, or no value."""
    if not all(name in file.schema_arrow.names for file in opened):
        return None
    values = pa.chunked_array([batch.column(name) for _, batch in _batches(files, opened, (name,))])
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if values.null_count == len(values):
        return None
    if name == "group":
        if not (pa.types.is_integer(values.type) or values.type in (pa.string(), pa.large_string())):
            raise UserError(f"{files[0].parent}: group must be integers or text, not {values.type}")
        numbers = values.combine_chunks().dictionary_encode().indices.fill_null(-1).to_numpy().astype(np.int64)
        return np.where(numbers < 0, -1 - np.arange(len(numbers)), numbers)
    if values.null_count:
        share = f"{values.null_count:,} of {len(values):,} rows"
        raise UserError(f"{files[0].parent}: {share} have no {name}; all or none must")
    array = values.to_numpy()
    return array.astype(np.str_) if array.dtype == object else array


def _allocate(shape: tuple[int, int]) -> np.ndarray:
    """Space for embeddings: in memory, or in a nameless file that is mapped where they are many.

    Raises:
        UserError: The disk cannot hold the file. Writing into the map of a full disk would end the process.
    """
    size = 4 * shape[0] * shape[1]
    if size <= _SHARE_OF_MEMORY * free_memory():
        return np.empty(shape, np.float32)
    with tempfile.NamedTemporaryFile(prefix="tfdml-embeddings-") as file:  # gone once nothing maps it
        return np.memmap(file.name, np.float32, "w+", shape=shape)
