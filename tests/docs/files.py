"""The files that examples and pages name, made small: photos, the layouts of the published data
sets, runs, models.

docs/api/index.md names them, so that a reader of the pages knows what they stand for.
"""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
import shutil
import tarfile
import unittest.mock
from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image

import tfdml
from tests.data.trees import write_tree
from tests.docs import examples, stand_ins
from tfdml.data.readers import official_archives


def write_named(text: str, folder: pathlib.Path, names: dict, kept: pathlib.Path) -> None:
    """Write every path that a text names; what takes long is made once, and copied.

    Args:
        text: The examples.
        folder: Where they run.
        names: The stand-ins.
        kept: A folder for what takes long.
    """
    for path, make in {**QUICK, **COSTLY}.items():
        if re.search(rf"(?<![\w/]){re.escape(path)}\b", text) is None:
            continue
        place = (kept if path in COSTLY else folder) / path
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            make(place, names)
        if path in COSTLY:
            (shutil.copytree if place.is_dir() else shutil.copy)(place, folder / path)


def examples_of(module: str) -> str:
    """The lines of a module that are examples."""
    path = examples.ROOT / f"{module.replace('.', '/')}.py"
    lines = path.read_text().splitlines()
    return "\n".join(line for line in lines if line.lstrip().startswith((">>>", "...")))


@contextlib.contextmanager
def as_many_images() -> Iterator[None]:
    """Within it the published data sets have an image of each class, as their small layouts
    here."""
    with unittest.mock.patch.dict(official_archives.NUM_IMAGES, official_archives.NUM_CLASSES):
        yield


def write_photos(path, names=None, classes=("bus", "coupe", "truck", "van"), images=3) -> None:
    """`photos/<class>/<n>.jpg` of the classes, and a list of them, `photos/list.csv`."""
    rng, rows = np.random.default_rng(0), ["path,label"]
    for name in classes:
        (path / name).mkdir(parents=True)
        for number in range(images):
            pixels = rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path / name / f"{number}.jpg")
            rows.append(f"{name}/{number}.jpg,{name}")
    (path / "list.csv").write_text("\n".join(rows) + "\n")


def write_photo(path: pathlib.Path, names: dict | None = None) -> None:
    """`car.jpg`."""
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(
        path
    )


def write_run(path: pathlib.Path, names: dict | None = None) -> None:
    """A run of one tiny training."""
    tfdml.training.train(stand_ins.experiment(str(path)))


def write_retriever(path: pathlib.Path, names: dict) -> None:
    """A retriever of the photos, with items called coupe/0.jpg, coupe/1.jpg ..."""
    photos = path.parent / "photos of the retriever"
    write_photos(photos)
    tfdml.export.Retriever.build(
        names["embedder"], tfdml.data.load("folder", photos, "all"), path, directory=photos
    )
    shutil.rmtree(photos)


def write_embeddings(path: pathlib.Path, names: dict) -> None:
    """`embeddings` of the data set `test`, as tfdml embed writes them."""
    from tests.embeddings.folders import write_folder
    from tfdml.embeddings.files import ImageTable

    write_folder(path, {"model": "random"}, ImageTable.of([names["test"]]), names["embeddings"])


def _write_archive(path: pathlib.Path, names: dict) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name in ("attributes.txt", "CUB_200_2011/images.txt", "CUB_200_2011/classes.txt"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())


def _write_models(path: pathlib.Path, names: dict) -> None:
    options = tfdml.export.ExportOptions(formats=["all"])
    with stand_ins.untrained_exports():
        tfdml.export.export_model(names["embedder"], path, names["test"], names["train"], options)


def _write_versions(path: pathlib.Path, names: dict) -> None:
    write_retriever(path, names)
    for version in range(2, 6):
        shutil.copytree(path / "1", path / str(version))


def _tree(name: str, *sizes: int) -> Callable[[pathlib.Path, dict], None]:
    return lambda path, names: write_tree(name, path, *sizes)


# Each is made by itself, whatever others an example names.
QUICK = {
    "CUB_200_2011.tgz": _write_archive,
    "car.jpg": write_photo,
    "data/CUB_200_2011": _tree("cub200", 100, 100, 1),
    "data/Stanford_Online_Products": _tree("sop", 1, 11_316, 1),
    "data/cars196": _tree("cars196", 98, 98, 1),
    "data/inshop": _tree("inshop", 1, 3985, 2),
    "data/omniglot": _tree("omniglot", 1, 659, 1),
    "embeddings/cars": write_embeddings,
    "photos": write_photos,
}
COSTLY = {
    "models/cars_jrd": _write_models,
    "models/cars_retriever": _write_versions,
    "runs/cars_jrd": write_run,
}
