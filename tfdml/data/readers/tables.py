"""The official label files: tables of columns separated by white space, whose faults are named by line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdml.data.readers.label_files import quoted, read_text
from tfdml.errors import UserError

# 18 digits always fit in 64 bits.
_MOST_DIGITS = 18


def read_table(
    name: str, path: str, columns: Sequence[str], *, first_line: int = 1, header: bool = False
) -> list[list[str]]:
    """Reads a table whose columns are separated by white space, as the official label files are.

    Args:
        name: The data set, for messages.
        path: The file.
        columns: What its columns are called.
        first_line: The line at which the table begins, from 1.
        header: Whether its first line repeats the names of the columns.

    Returns:
        One list per column. Blank lines are left out.

    Raises:
        UserError: The file cannot be read, the header is another, a line has another number of columns, or there
            is no row.

    Example:
        >>> ids, names = read_table("cub200", "data/CUB_200_2011/classes.txt", ("id", "name"))
        >>> ids[-1]
        '200'
    """
    lines = read_text(name, path).split("\n")[first_line - 1 :]
    if header:
        found = lines[0].split() if lines else []
        if found != list(columns):
            raise UserError(
                f"{name}: {path}, line {first_line}: expected the header {' '.join(columns)!r}, "
                f"found {quoted(' '.join(found))}; is it the official file?"
            )
        lines, first_line = lines[1:], first_line + 1
    for line, text in enumerate(lines, first_line):
        row = text.split()
        if len(row) not in (0, len(columns)):
            raise UserError(
                f"{name}: {path}, line {line}: expected {len(columns)} columns ({' '.join(columns)}), found "
                f"{len(row)}: {quoted(' '.join(row))}"
            )
    # Split again as a whole: 100,000 small lists kept would cost more, in garbage collection.
    cells = "\n".join(lines).split()
    if not cells:
        raise UserError(f"{name}: {path} has no row; download it again")
    return [cells[column :: len(columns)] for column in range(len(columns))]


def line_of(name: str, path: str, row: int, first_line: int = 1) -> int:
    """The line that a row of a table is on; reads the file again, for messages.

    Args:
        name: The data set, for messages.
        path: The file.
        row: The row, from 0.
        first_line: The line at which the rows begin.

    Example:
        >>> line_of("cub200", "data/CUB_200_2011/classes.txt", 199)
        200
    """
    lines = read_text(name, path).split("\n")
    return [number for number, line in enumerate(lines, 1) if number >= first_line and line.strip()][row]


def integers(
    name: str,
    path: str,
    column: str,
    values: Sequence[str],
    low: int = 0,
    high: int = 10**18,
    *,
    first_line: int = 1,
) -> np.ndarray:
    """A column of whole numbers as (N,) int64.

    Args:
        name: The data set, for messages.
        path: The file that the column is from.
        column: What it is called.
        values: Its cells, in the order of the file.
        low: The smallest permitted number, not negative.
        high: The largest.
        first_line: The line at which the rows begin.

    Raises:
        UserError: A cell is no whole number from `low` to `high`; the message names its line.

    Example:
        >>> integers("cub200", "classes.txt", "class", ["1", "200"], low=1, high=200)
        array([  1, 200])
    """
    # int() alone would take 1_0, or the digits of other scripts. All cells at once: a loop costs as much as the rest.
    together = "".join(values)
    if together.isdigit() and together.isascii() and max(map(len, values)) <= _MOST_DIGITS:
        numbers = np.fromiter(map(int, values), np.int64, len(values))
        outside = np.flatnonzero((numbers < low) | (numbers > high))
        if not len(outside):
            return numbers
        row = int(outside[0])
    else:
        row = next(i for i, v in enumerate(values) if not (v.isdigit() and v.isascii() and len(v) <= _MOST_DIGITS))
    raise UserError(
        f"{name}: {path}, line {line_of(name, path, row, first_line)}: {column} is {quoted(values[row])}; expected a "
        f"whole number from {low:,} to {high:,}"
    )


def check_distinct(name: str, path: str, column: str, values: Sequence[str], *, first_line: int = 1) -> None:
    """Refuses a column in which a value comes twice, whatever the rest of the rows says.

    Args:
        name: The data set, for messages.
        path: The file that the column is from.
        column: What it is called.
        values: Its cells, in the order of the file.
        first_line: The line at which the rows begin.

    Raises:
        UserError: A value comes twice; the message names both lines, and how many rows repeat another.

    Example:
        >>> check_distinct("cub200", "images.txt", "path", ["a.jpg", "b.jpg"])
    """
    repeated = len(values) - len(set(values))
    if not repeated:
        return
    first: dict[str, int] = {}
    row = next(row for row, value in enumerate(values) if first.setdefault(value, row) != row)
    lines = [line_of(name, path, number, first_line) for number in (first[values[row]], row)]
    raise UserError(
        f"{name}: {path}, lines {lines[0]} and {lines[1]}: {column} {quoted(values[row])} comes twice "
        f"({repeated} rows repeat the {column} of another); get the official file again"
    )


def check_one_to_one(
    name: str,
    path: str,
    columns: tuple[str, str],
    keys: np.ndarray,
    values: np.ndarray,
    *,
    first_line: int = 1,
) -> None:
    """Refuses a table in which rows of one key have different values, such as a class in two super-classes.

    Args:
        name: The data set, for messages.
        path: The file that the columns are from.
        columns: What keys and values are called.
        keys: (N,) the key of every row, in the order of the file.
        values: (N,) its value.
        first_line: The line at which the rows begin.

    Raises:
        UserError: A key has two values; the message names both lines.

    Example:
        >>> check_one_to_one("sop", "Ebay_train.txt", ("class", "kind"), np.array([1, 1, 2]), np.array([5, 5, 6]))
    """
    _, first, of = np.unique(keys, return_index=True, return_inverse=True)
    wrong = np.flatnonzero(values != values[first][of])
    if len(wrong):
        row = int(wrong[0])
        other = int(first[of[row]])
        lines = [line_of(name, path, number, first_line) for number in (other, row)]
        raise UserError(
            f"{name}: {path}, lines {lines[0]} and {lines[1]}: {columns[0]} {keys[row]} has {columns[1]} "
            f"{values[other]} and {values[row]}; get the official file again"
        )
