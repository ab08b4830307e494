"""Draws the picture of README: five characters of unseen classes, and the nearest images of each.

    python -m tools.neighbors runs/glyphs --out=docs/images/neighbors.png

The run is that of `configs/quickstart.flags`.
"""

from __future__ import annotations

import argparse

import numpy as np
from PIL import Image

# The classes of the rows, and which image of each is the query.
QUERIES = {"ϡ": 0, "a": 17, "Պ": 6, "△": 16, "÷": 16}
NEIGHBORS = 7


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", help="the folder of the run")
    parser.add_argument("--out", required=True, help="the picture")
    arguments = parser.parse_args()
    from matplotlib.figure import Figure

    from tfdml.retrieval import nearest_neighbors
    from tfdml.training import Experiment, TrainingRun

    run = TrainingRun(Experiment.of_run(arguments.run_dir), {})
    test = run.splits.test
    assert test is not None  # the quickstart measures
    numbers = {name: number for number, name in test.class_names.items()}
    rows = [np.flatnonzero(test.labels == numbers[name])[i] for name, i in QUERIES.items()]
    neighbors = nearest_neighbors(run.embeddings, k=NEIGHBORS)[0]
    pixels = test.images.pixels()
    figure = Figure(figsize=(8, 5.4), dpi=100, layout="tight")
    axes = figure.subplots(len(rows), NEIGHBORS + 1)
    for line, query in zip(axes, rows, strict=True):
        for axis, row in zip(line, [query, *neighbors[query]], strict=True):
            is_same = test.labels[row] == test.labels[query]
            color = "#1a7f37" if is_same else "#cf222e"
            axis.imshow(pixels[row])
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set(color="black" if row == query else color, linewidth=3)
    axes[0, 0].set_title("query", fontsize=8)
    axes[0, 1].set_title("nearest images", fontsize=8)
    figure.savefig(arguments.out)
    # A sixth of the size.
    with Image.open(arguments.out) as picture:
        small = picture.convert("RGB").quantize(128)
    small.save(arguments.out, optimize=True)


if __name__ == "__main__":
    main()
