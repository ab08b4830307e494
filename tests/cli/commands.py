"""The commands in this process."""

from __future__ import annotations

import contextlib
import io
import pathlib
import zlib

import numpy as np
from PIL import Image

from tfdml.cli import STAGES, command_line, load
from tfdml.models import Embedder

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAMES = tuple(STAGES)
__all__ = ["NAMES", "ROOT", "load", "printed", "run", "write_embedder", "write_noise"]


def run(name: str, *arguments: str) -> tuple[int, str, str]:
    """Run a command in this process: its exit status, and what it printed to either stream.

    An exception that leaves `run` is a traceback to a user, and is raised.
    """
    out, err = io.StringIO(), io.StringIO()
    status = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command_line.run(load(name), arguments)
        except SystemExit as end:
            status = end.code
    return status, out.getvalue(), err.getvalue()


def printed(name: str, *arguments: str) -> str:
    """What a command prints that ends well."""
    status, out, err = run(name, *arguments)
    assert status == 0, err
    return out


def write_noise(folder: pathlib.Path, classes: str, count: int) -> None:
    """`<class>/<n>.png` of noise, 20 pixels square."""
    rng = np.random.default_rng(zlib.crc32(folder.name.encode()))
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(rng.integers(0, 256, (20, 20, 3), np.uint8)).save(
                folder / name / f"{number}.png"
            )


def write_embedder(path: pathlib.Path) -> Embedder:
    """An embedder of random weights, of 16 pixels and 4 dimensions."""
    embedder = Embedder("conv4", embedding_dim=4, image_size=16)
    embedder.build((None, 16, 16, 3))
    embedder.save(path)
    return embedder
