"""Tables from outside as a `Table`, checked strictly: CSV, JSON lines, Parquet and .npz by
`read_table`, the label files of official archives by `read_words`.

Names pass `tfdml.names.clean`. Needs no TensorFlow."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import difflib
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from tfdml.errors import ERROR_TEXT, UserError, user_errors
from tfdml.io import files
from tfdml.names import Kind, clean, quoted, warn

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

JSON_EXTENSIONS = (".jsonl", ".ndjson", ".json")
LIST_EXTENSIONS = (".csv", ".parquet", ".npz", *JSON_EXTENSIONS)
BETWEEN = "|"  # the names of one cell

# Other spellings of columns, which are accepted in every format.
_SYNONYMS = {
    "classes": "class",
    "embeddings": "embedding",
    "groups": "group",
    "ids": "id",
    "labels": "label",
    "names": "path",
    "paths": "path",
    "roles": "role",
    "splits": "split",
    "super_labels": "super_label",
    "texts": "text",
    "x_1": "x1",
    "x_2": "x2",
    "y_1": "y1",
    "y_2": "y2",
}
# What else is called like a column, and is refused where that column is missing.
_MEANT = {
    "class": "label",
    "class_id": "label",
    "class_name": "label",
    "file_name": "path",
    "filename": "path",
    "is_gallery": "role",
    "is_query": "role",
    "split": "role",
    "subset": "split",
    "xmax": "x2",
    "xmin": "x1",
    "ymax": "y2",
    "ymin": "y1",
}
# How alike another name is that stands for a column, and the shortest name that has such.
_ALIKE, _SHORTEST = 0.8, 4
_DELIMITERS = ",;\t"
# By which a spreadsheet names the delimiter, in the first line.
_SEPARATOR = re.compile(r'"?sep=(.)"?\n')
# 18 digits always fit in 64 bits.
_MOST_DIGITS = 18
# The share of the free memory that the columns of a file may take.
_SHARE_OF_MEMORY = 0.5
# Bytes that are read whatever is free.
_LEAST = 2**20
# Bytes that texts of an .npz file may take, which are all as wide as the longest.
_MOST_OF_FIXED_WIDTH = 2**30
# Rows that become Python's objects at once.
_BATCH_ROWS = 2**16
# Numbers of vectors that are read at once.
_BATCH_VALUES = 2**22


class Column(NamedTuple):
    """A column that a reader takes.

    Args:
        kind: How its names are made plain. None: it has numbers, an array of any shape (N, ...).
        numbers: Whether an array of numbers stays one, and only texts are names.
        several: Whether a cell has several names: a list, or a text with `|` between them.
    """

    kind: Kind | None
    numbers: bool = False
    several: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """Columns of one length, with checks whose messages name the rows.

    Args:
        name: The data set, for messages; empty where the path says all.
        path: The file or the folder.
        columns: Plain names in a list, lists of several, or numbers in an array; by column.
        place: Returns where a row is, such as `"line 3"`.
        keys: What the known columns are called in the file, by column.
    """

    name: str
    path: str
    columns: dict[str, Any]
    place: Callable[[int], str] = lambda row: f"row {row + 1}"
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    @property
    def source(self) -> str:
        """The data set and the file, for messages."""
        return f"{self.name}: {self.path}" if self.name else self.path

    def where(self, *rows: int) -> str:
        """Return the data set, the file, and the places of some rows, for messages."""
        return f"{self.source}, {' and '.join(map(self.place, rows))}"

    def take(self, rows: Sequence[int]) -> Table:
        """Return the table of these rows, in that order."""
        columns = {}
        for column, values in self.columns.items():
            columns[column] = [values[row] for row in rows]
        return Table(self.name, self.path, columns, lambda row: self.place(rows[row]), self.keys)

    def clean(self, column: str, kind: Kind) -> None:
        """Make the names of a column plain; see `tfdml.names.clean`."""
        self.columns[column] = clean(
            self.columns[column], kind, f"{self.source}, column {column}", self.place
        )

    def check_cells(self, column: str, is_right: Callable[[str], Any], expected: str) -> None:
        """Refuses a column with a cell that is not as it should be.

        Args:
            column: The name of the column.
            is_right: Whether a cell is.
            expected: What it must be, for the message.

        Raises:
            UserError: One is not; the message names its row.
        """
        cells = self.columns[column]
        wrong = next((row for row, cell in enumerate(cells) if not is_right(cell)), None)
        if wrong is not None:
            raise UserError(
                f"{self.where(wrong)}: {column} must be {expected}, it is {quoted(cells[wrong])}"
            )

    def integers(self, column: str, low: int = 0, high: int = 10**18) -> np.ndarray:
        """Return a column of whole numbers as (N,) int64.

        Args:
            column: The name of the column.
            low: The smallest permitted number, not negative.
            high: The largest.

        Raises:
            UserError: A cell is no whole number from `low` to `high`; the message names its row.

        Example:
            >>> from tfdml.names import CLASS, ID
            >>> kinds = {"id": ID, "name": CLASS}
            >>> classes = read_words("cub200", "data/CUB_200_2011/classes.txt", kinds)
            >>> classes.integers("id", 1, 200)[-2:]
            array([199, 200])
        """

        def is_right(cell: str) -> bool:
            # int() alone would take 1_0, or the digits of other scripts.
            return (
                cell.isdigit()
                and cell.isascii()
                and len(cell) <= _MOST_DIGITS
                and low <= int(cell) <= high
            )

        self.check_cells(column, is_right, f"a whole number of {low:,} to {high:,}")
        return np.array(list(map(int, self.columns[column])), np.int64)

    def check_distinct(self, column: str) -> None:
        """Refuses a column in which a value comes twice, whatever the rest of the rows says.

        Raises:
            UserError: A value comes twice; the message names both rows.
        """
        first: dict[str, int] = {}
        for row, value in enumerate(self.columns[column]):
            if first.setdefault(value, row) != row:
                raise UserError(
                    f"{self.where(first[value], row)}: {column} {quoted(value)} comes twice"
                )


def read_text(name: str, path: str) -> str:
    """Read a text file in UTF-8, with or without a byte order mark; every line end becomes a line
    feed.

    Args:
        name: The data set, for messages.
        path: A file on a local disk or on any file system that `fsspec` knows.

    Raises:
        UserError: The file is missing, may not be read, or is not UTF-8.

    Example:
        >>> len(read_text("cub200", "data/CUB_200_2011/classes.txt").splitlines())
        200
    """
    try:
        data = files.read_bytes(path)
    except Exception as error:  # remote file systems have their own error types
        fault = files.access_fault(error)
        raise UserError(f"{name}: {path} is {fault}; check data_dir") from error
    with user_errors(
        UnicodeDecodeError, f"{name}: {path} is not UTF-8 text; save the file as UTF-8"
    ):
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def read_words(
    name: str,
    path: str,
    columns: Mapping[str, Kind],
    *,
    first_line: int = 1,
    header: bool = False,
) -> Table:
    """Read a table whose columns are separated by white space, as the official label files are.

    Args:
        name: The data set, for messages.
        path: The file.
        columns: What its columns are called, in their order, and how their names are made plain.
        first_line: The line at which the table begins, from 1.
        header: Whether its first line repeats the names of the columns.

    Returns:
        The table; blank lines are left out.

    Raises:
        UserError: The file cannot be read, the header is another, a line has another number of
            columns or is no text, or there is no row.

    Example:
        >>> from tfdml.names import CLASS, ID
        >>> kinds = {"id": ID, "name": CLASS}
        >>> classes = read_words("cub200", "data/CUB_200_2011/classes.txt", kinds)
        >>> classes.columns["id"][-1], classes.place(199)
        ('200', 'line 200')
    """
    texts = enumerate(read_text(name, path).split("\n"), 1)
    rows = [(line, text.split()) for line, text in texts if line >= first_line and text.strip()]
    if header and (not rows or rows.pop(0)[1] != list(columns)):
        raise UserError(f"{name}: {path} has no header {' '.join(columns)!r} in line {first_line}")
    for line, cells in rows:
        if len(cells) != len(columns):
            raise UserError(
                f"{name}: {path}, line {line}: expected {len(columns)} columns, found {len(cells)}"
            )
    if not rows:
        raise UserError(f"{name}: {path} has no row; download it again")
    of_columns = map(list, zip(*(cells for _, cells in rows), strict=True))
    table = Table(
        name, path, dict(zip(columns, of_columns, strict=True)), lambda row: f"line {rows[row][0]}"
    )
    for column, kind in columns.items():
        table.clean(column, kind)
    return table


def read_table(
    name: str,
    path: str,
    columns: Mapping[str, Column | None],
    required: Sequence[str] = (),
    parts: Sequence[str] = (),
) -> Table:
    """Read the columns of a table that are known, whatever its format.

    Names of columns count in capitals or not. Plurals such as `labels` stand for their column where
    they are no column of their own. Columns without any value are left out.

    Args:
        name: What the table is, for messages; empty where the path says it.
        path: The file: `*.parquet`, `*.npz`, `*.jsonl`, `*.ndjson` or `*.json`; any other name for
            CSV or JSON lines.
        columns: The columns that are read, by name; None for one that is known and not read. A
            warning names the others.
        required: The columns that it must have; `labels` or `text` may stand for `label`.
        parts: Parquet files that are the table, one after another, in place of the file `path`.

    Raises:
        UserError: It cannot be read or would take too much memory, a column is missing or nearly
            one that is known, columns differ in length, or a name is none.

    Example:
        >>> from tfdml.names import PATH
        >>> read_table("list", "photos/list.csv", {"path": Column(PATH)}).columns["path"][0]
        'bus/0.jpg'
    """
    table = Table(name, str(path), {})
    with _opened(table, parts) as file:
        keys = _keys_of(table.source, file.header, columns)
        for column in required:
            if column not in keys and not (column == "label" and keys.keys() & {"labels", "text"}):
                has = ", ".join(map(quoted, file.header)) or "none"
                raise UserError(f"{table.source} has no column {column}; it has {has}")
        read_keys = {column: key for column, key in keys.items() if columns[column] is not None}
        file.check_size(list(read_keys.values()))
        cells = {column: file.read(key) for column, key in read_keys.items()}
    table = Table(name, str(path), {}, file.place, keys)
    _check_lengths(table.source, cells)
    for column, values in cells.items():
        if column in required or isinstance(values, np.ndarray) or not _is_void(values):
            spec = columns[column]
            assert spec is not None
            table.columns[column] = _plain_cells(table, column, values, spec)
    return table


def _is_void(values: list) -> bool:
    return all(value is None for value in values)


def _plain_name(column: str) -> str:
    return column.strip().lower().replace(" ", "_")


def _keys_of(
    source: str, header: Sequence[str], columns: Mapping[str, Column | None]
) -> dict[str, str]:
    """Return the key of each known column in a file; warn of the others, and refuse one that is
    nearly a known column."""
    keys: dict[str, str] = {}
    others: dict[str, str] = {}
    for key in header:
        column = _plain_name(key)
        if column not in columns:
            others[key] = column
        elif column in keys:
            raise UserError(f"{source}: column {quoted(column)} is twice in {_listed(header)}")
        else:
            keys[column] = key
    plain_columns = set(keys)
    for key, name in list(others.items()):
        column = _SYNONYMS.get(name, "")
        if column not in columns or column in plain_columns:
            continue
        if column in keys:
            raise UserError(f"{source}: column {column!r} is twice in {_listed(header)}")
        keys[column] = key
        del others[key]
    for key, name in others.items():
        column = _near(name, columns)
        if column and column not in keys:
            raise UserError(
                f"{source} has a column {quoted(key)}: call it {column!r}, or leave it out"
            )
    if others:
        names = ", ".join(columns)
        warn(f"{source}: other columns than {names} are ignored: {_listed(list(others))}")
    return keys


def _listed(header: Sequence[str]) -> str:
    return ", ".join(map(quoted, header))


def _near(name: str, columns: Mapping[str, Any]) -> str:
    """Return the known column that another column nearly has the name of; empty for none."""
    if _MEANT.get(name) in columns:
        return _MEANT[name]
    plurals = [plural for plural, column in _SYNONYMS.items() if column in columns]
    long = [column for column in (*columns, *plurals) if len(column) >= _SHORTEST]
    near = next(iter(difflib.get_close_matches(name, long, 1, _ALIKE)), "")
    return near if near in columns else _SYNONYMS.get(near, "")


def _check_lengths(source: str, cells: Mapping[str, Any]) -> None:
    lengths = {column: len(values) for column, values in cells.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{column} {count:,}" for column, count in lengths.items())
        raise UserError(f"{source}: columns differ in their number of rows: {counts}")
    if 0 in lengths.values():
        raise UserError(f"{source} has no row")


def _plain_cells(table: Table, column: str, cells: Any, spec: Column) -> Any:
    """Return the cells of a column: plain names, lists of them, or an array of numbers."""
    is_array = isinstance(cells, np.ndarray)
    if spec.kind is None or (spec.numbers and is_array):
        return cells
    source = f"{table.source}, column {column}"
    if not spec.several:
        return clean(cells, spec.kind, source, table.place)
    sets = [_as_set(cell) for cell in cells]
    counts = [len(names) for names in sets]
    row_of = np.repeat(np.arange(len(sets)), counts)
    names = itertools.chain.from_iterable(sets)
    plain = iter(clean(names, spec.kind, source, lambda name: table.place(int(row_of[name]))))
    return [list(itertools.islice(plain, count)) for count in counts]


def _as_set(cell: Any) -> list:
    if cell is None:
        return []
    if isinstance(cell, str):
        return [name for name in cell.split(BETWEEN) if name.strip()]
    return cell if isinstance(cell, list) else [cell]


class _File(Protocol):
    """A table that is open.

    Attributes:
        header: The names of its columns, as they are written.
    """

    header: Sequence[str]

    def place(self, row: int) -> str:
        """Return where a row is, such as `"line 3"`."""

    def check_size(self, keys: Sequence[str]) -> None:
        """Raise a `UserError` where columns would take too much memory."""

    def read(self, key: str) -> Any:
        """Return the cells of a column: an array of numbers, or a list."""


@contextlib.contextmanager
def _opened(table: Table, parts: Sequence[str]) -> Iterator[_File]:
    """Open the file of a table by the end of its name."""
    end = table.path.lower()
    source = table.source
    if parts or end.endswith(".parquet"):
        with _damage(source, "Parquet"):
            yield _ParquetFiles(source, parts or [table.path])
    elif end.endswith(".npz"):
        with _damage(source, ".npz"), files.open_file(table.path) as file:
            if file.read(2) != b"PK":
                raise ValueError("it is no zip archive")
            file.seek(0)
            with np.load(file) as archive:
                yield _Npz(source, archive)
    else:
        text = read_text(table.name, table.path)
        is_json = end.endswith(JSON_EXTENSIONS) or text.lstrip().startswith("{")
        yield (_json_lines if is_json else _csv)(source, text)


def _damage(source: str, format: str) -> contextlib.AbstractContextManager[None]:
    # Whatever NumPy, Arrow and file systems raise.
    return user_errors(
        Exception, f"{source} cannot be read as {format}: {ERROR_TEXT}", keep="first", longest=200
    )


def check_memory(source: str, size: int, most: float | None = None) -> None:
    """Refuse what would not fit in the memory.

    Args:
        source: What is read, for the message.
        size: Its bytes.
        most: Those that it may take; by default half of the free memory.

    Raises:
        UserError: It would take more.

    Example:
        >>> check_memory("list.npz", 8 * 10**9, most=10**9)
        Traceback (most recent call last):
        tfdml.errors.UserError: list.npz would take 8,000 MB of memory, of at most 1,000 MB: ...
    """
    if most is None:
        most = max(_LEAST, _SHARE_OF_MEMORY * files.free_memory())
    if size > most:
        raise UserError(
            f"{source} would take {size / 1e6:,.0f} MB of memory, of at most {most / 1e6:,.0f} MB: "
            "save it in several files; texts as Parquet, whose columns are as long as their texts"
        )


@dataclasses.dataclass
class _Cells:
    """The cells of a text file, and the line of each row; see `_File`."""

    header: Sequence[str]
    lines: Sequence[int]
    columns: Mapping[str, list]

    def place(self, row: int) -> str:
        return f"line {self.lines[row]}"

    def check_size(self, keys: Sequence[str]) -> None:
        """Do nothing: the text is in the memory already."""

    def read(self, key: str) -> list:
        return self.columns[key]


def _csv(source: str, text: str) -> _Cells:
    separator = _SEPARATOR.match(text)
    text = "\n" + text[separator.end() :] if separator else text
    head = next((line for line in text.split("\n") if line.strip(_DELIMITERS + ' "')), "")
    delimiter = separator[1] if separator else max(_DELIMITERS, key=head.count)
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True, strict=True)
    header: list[str] = []
    lines: list[int] = []
    columns: list[list[str]] = []
    before = 0
    try:
        for cells in reader:
            line = before + 1  # cells may have several
            before = reader.line_num
            if not any(map(str.strip, cells)):
                continue
            if not header:
                header = cells
                columns = [[] for _ in header]
                continue
            if len(cells) != len(header):
                raise UserError(
                    f"{source}, line {line}: expected {len(header)} cells as in the header, found "
                    f"{len(cells)}"
                )
            lines.append(line)
            for column, cell in zip(columns, cells, strict=True):
                column.append(cell)
    except csv.Error as error:
        raise UserError(f"{source}, line {reader.line_num}: not CSV ({error})") from None
    return _Cells(header, lines, dict(zip(header, columns, strict=True)))


def _json_lines(source: str, text: str) -> _Cells:
    rows = []
    lines = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                cells = json.loads(line)
            except (ValueError, RecursionError):
                cells = None
            if not isinstance(cells, dict):
                expected = 'expected one JSON object, such as {"path": "a.jpg"}'
                raise UserError(f"{source}, line {number}: {expected}, found {quoted(line)}")
            rows.append(cells)
            lines.append(number)
    header = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
    columns = {}
    for key in header:
        columns[key] = [cells.get(key) for cells in rows]
    return _Cells(header, lines, columns)


class _Npz:
    """An .npz archive; see `_File`."""

    def __init__(self, source: str, archive: np.lib.npyio.NpzFile):
        self._source = source
        self._archive = archive
        assert archive.zip is not None
        self._zip = archive.zip
        self.header: Sequence[str] = list(archive.files)

    def place(self, row: int) -> str:
        return f"row {row + 1}"

    def check_size(self, keys: Sequence[str]) -> None:
        sizes = {}
        for key in keys:
            sizes[key] = self._zip.getinfo(f"{key}.npy").file_size
        check_memory(self._source, sum(sizes.values()))
        for key, size in sizes.items():
            if self._is_text(key):
                check_memory(f"{self._source}, {key}", size, _MOST_OF_FIXED_WIDTH)

    def _is_text(self, key: str) -> bool:
        with self._zip.open(f"{key}.npy") as member:
            version = np.lib.format.read_magic(member)
            read_header = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }.get(version)
            # The third version is that of names of fields, which no column has.
            return read_header is not None and read_header(member)[2].kind in "US"

    def read(self, key: str) -> Any:
        array = self._archive[key]
        is_text = array.dtype.kind in "US"
        if array.ndim == 0 or (array.ndim > 1 and is_text):
            raise UserError(
                f"{self._source}: {key} has the shape {array.shape}; give one value for each row"
            )
        if not is_text:
            return array
        shared: dict[Any, Any] = {}
        cells: list = []
        for first in range(0, len(array), _BATCH_ROWS):
            values = array[first : first + _BATCH_ROWS].tolist()
            cells += [shared.setdefault(value, value) for value in values]
        return cells


class _ParquetFiles:
    """Parquet files, one after another; see `_File`."""

    def __init__(self, source: str, paths: Sequence[str]):
        self._source = source
        self._paths = paths
        self._metadata = []
        schemas = []
        for path in paths:
            with open_parquet(path) as file:
                self._metadata.append(file.metadata)
                schemas.append(file.schema_arrow.names)
        self._ends = np.cumsum([metadata.num_rows for metadata in self._metadata])
        repeated = max(schemas, key=lambda names: len(names) - len(set(names)))
        names = itertools.chain.from_iterable(schemas)
        self.header = repeated if len(set(repeated)) < len(repeated) else list(dict.fromkeys(names))
        self._schemas = schemas

    def place(self, row: int) -> str:
        if len(self._paths) == 1:
            return f"row {row + 1}"
        part = int(np.searchsorted(self._ends, row, "right"))
        first = self._ends[part] - self._metadata[part].num_rows
        return f"{self._paths[part].rpartition('/')[2]}, row {row - first + 1}"

    def check_size(self, keys: Sequence[str]) -> None:
        rows = int(self._ends[-1])
        # Each row has a reference to its text, before and after it is made plain.
        size = 16 * rows * len(keys)
        for metadata in self._metadata:
            size += sum(leaf.total_uncompressed_size for leaf in _leaves(metadata, keys))
        check_memory(self._source, size)

    def read(self, key: str) -> Any:
        shared: dict[Any, Any] = {}
        blocks: list[Any] = []
        for part, metadata in enumerate(self._metadata):
            if key in self._schemas[part]:
                blocks += self._blocks(part, key, shared)
            else:
                blocks.append([None] * metadata.num_rows)
        if all(isinstance(block, np.ndarray) for block in blocks):
            return np.concatenate(blocks)
        return list(itertools.chain.from_iterable(map(_as_list, blocks)))

    def _blocks(self, part: int, key: str, shared: dict[Any, Any]) -> Iterator[Any]:
        texts = [
            leaf.path_in_schema
            for leaf in _leaves(self._metadata[part], [key])
            if leaf.physical_type == "BYTE_ARRAY"
        ]
        with open_parquet(self._paths[part], read_dictionary=texts) as file:
            # Not by batches: each would repeat the texts of those before it.
            for group in range(file.num_row_groups):
                for column in file.read_row_group(group, columns=[key]).column(0).chunks:
                    if is_numeric(column.type) and not column.null_count:
                        yield column.to_numpy(zero_copy_only=False)
                    else:
                        yield _cells_of(column, shared)


def _as_list(block: Any) -> list:
    return block.tolist() if isinstance(block, np.ndarray) else block


def _leaves(metadata: pq.FileMetaData, keys: Sequence[str]) -> Iterator[pq.ColumnChunkMetaData]:
    """Yield what a file's metadata say of the chunks of some columns."""
    for group in range(metadata.num_row_groups):
        chunks = metadata.row_group(group)
        for index in range(chunks.num_columns):
            leaf = chunks.column(index)
            if leaf.path_in_schema in keys or leaf.path_in_schema.split(".")[0] in keys:
                yield leaf


def _cells_of(column: pa.Array, shared: dict[Any, Any]) -> list:
    """Return the cells of an Arrow array as Python's objects; equal texts are one object."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(column.type):
        texts = _cells_of(column.dictionary, shared)
        return [None if index is None else texts[index] for index in column.indices.to_pylist()]
    if is_list(column.type):
        values = iter(_cells_of(pc.list_flatten(column), shared))
        lengths = pc.list_value_length(column).to_pylist()
        return [n if n is None else list(itertools.islice(values, n)) for n in lengths]
    if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        return [shared.setdefault(value, value) for value in column.to_pylist()]
    return column.to_pylist()


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of Arrow has lists, of whichever kind.

    Example:
        >>> import pyarrow as pa
        >>> is_list(pa.large_list(pa.float32()))
        True
    """
    import pyarrow as pa

    kinds = pa.ListType, pa.LargeListType, pa.FixedSizeListType
    return isinstance(kind, (*kinds, pa.ListViewType, pa.LargeListViewType))


def is_numeric(kind: pa.DataType) -> bool:
    """Whether a column of Arrow has integers, floats or flags.

    Example:
        >>> import pyarrow as pa
        >>> is_numeric(pa.float16())
        True
    """
    import pyarrow as pa

    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return is_number or pa.types.is_boolean(kind)


def vector_blocks(paths: Sequence[str], key: str) -> Iterator[np.ndarray]:
    """Yield the vectors of a column of Parquet files, (B, d) float32, in their order.

    Args:
        paths: The files.
        key: The name of the column, whose cells are lists of numbers of any type.

    Raises:
        UserError: They are no lists of as many numbers in every row; the message names the file.
    """
    for path in paths:
        with open_parquet(path) as file:
            values = sum(leaf.num_values for leaf in _leaves(file.metadata, [key]))
            dimension = max(1, values // max(1, file.metadata.num_rows))
            rows = min(max(1, _BATCH_VALUES // dimension), _BATCH_ROWS)
            for batch in file.iter_batches(rows, columns=[key]):
                yield _vectors(path, key, batch.column(0))


def _vectors(path: str, key: str, column: pa.Array) -> np.ndarray:
    import pyarrow.compute as pc

    column = getattr(column, "storage", column)  # of an extension type, such as another's tensors
    if is_list(column.type):
        values = pc.list_flatten(column)
        lengths = pc.list_value_length(column).unique().to_pylist()
        is_full = is_numeric(values.type) and not values.null_count
        if is_full and len(lengths) == 1 and lengths[0]:
            numbers = values.to_numpy(zero_copy_only=False)
            return numbers.astype(np.float32).reshape(-1, lengths[0])
    raise UserError(
        f"{path}: {key} must be a list of as many numbers in every row, without null, not "
        f"{column.type}"
    )


@contextlib.contextmanager
def open_parquet(path: str, **options: Any) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file; a local one is mapped.

    Args:
        path: On a local disk or on any file system that `fsspec` knows.
        **options: As of `pyarrow.parquet.ParquetFile`.
    """
    import pyarrow.parquet as pq  # takes a while to import

    if not files.is_remote(path):
        with pq.ParquetFile(path, memory_map=True, **options) as file:
            yield file
        return
    with files.open_file(path) as opened:
        yield pq.ParquetFile(opened, **options)
