"""What came of a sweep: a table, and a picture of it."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np

from tfdml.io.files import atomic_write


def sweep_table(rows: Sequence[dict[str, Any]], score: str) -> list[str]:
    """Return the runs of a sweep as lines of text.

    Args:
        rows: Of each run `trial`, `values` and the score in [0, 1], or `error`.
        score: The name of the score.

    Example:
        >>> sweep_table([{"trial": 3, "values": {"epochs": "2"}, "recall@1": 0.25}], "recall@1")
        ['trial  epochs  recall@1', '  3    2          25.0 %']
    """
    names = list(rows[0]["values"])
    widths = [max(len(name), *(len(row["values"][name]) for row in rows)) for name in names]
    lines = ["  ".join(["trial", *(name.ljust(width) for name, width in zip(names, widths, strict=True)), score])]
    for row in rows:
        values = [row["values"][name].ljust(width) for name, width in zip(names, widths, strict=True)]
        outcome = f"{100 * row[score]:6.1f} %" if score in row else f"failed: {row['error']}"
        lines.append("  ".join([f"{row['trial']:3d}  ", *values, outcome]))
    return lines


def write_sweep(folder: Path, rows: Sequence[dict[str, Any]], score: str) -> None:
    """Write `sweep.csv`, and `sweep.png` with the score over each setting.

    Args:
        folder: Where they are written.
        rows: As `sweep_table`.
        score: The name of the score.

    Raises:
        UserError: A file cannot be written.
    """
    names = list(rows[0]["values"])
    with atomic_write(folder / "sweep.csv") as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, ["trial", *names, score, "error"], extrasaction="ignore")
        table.writeheader()
        table.writerows({**row["values"], **row} for row in rows)
    measured = [row for row in rows if score in row]
    figure = matplotlib.figure.Figure(figsize=(3.6 * len(names), 3.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
        _plot(axes, [row["values"][name] for row in measured], [100 * row[score] for row in measured])
        axes.set_xlabel(name)
    figure.axes[0].set_ylabel(f"{score} on held-out classes, %")
    with atomic_write(folder / "sweep.png") as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def _plot(axes: Any, values: Sequence[str], scores: Sequence[float]) -> None:
    try:
        places = np.array([float(value) for value in values])
    except ValueError:
        axes.scatter(list(values), scores)  # words
        return
    axes.scatter(places, scores)
    if len(places) and places.min() > 0 and places.max() / places.min() >= 3:
        axes.set_xscale("log")
