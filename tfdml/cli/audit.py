"""Find what is wrong with a data set: near-duplicates, wrong labels, outliers, and classes without a cluster.

It also finds classes that should be one, and images that are worth labeling next.

  tfdml audit --dataset=folder --data_dir=photos --out=audits/photos
  tfdml audit --model=runs/cars_jrd --out=audits/cars
  tfdml audit --dataset=cars196 --data_dir=/data/cars196 --weights=mnv2_100.weights.h5 --out=audits/cars
  tfdml audit --embeddings=embeddings/photos --data_dir=photos --pick=100 --out=audits/photos
  tfdml train --dataset=folder --data_dir=photos --drop=audits/photos/audit.csv --run_dir=runs/photos

Images are embedded by --model, or by an ImageNet network (--backbone, --weights). With --embeddings they are embedded
already; --data_dir is then where their names count from. Without images, as with a head and its --features, duplicates
are a matter of distance alone. An image is marked drop only if it is itself a near-duplicate of one that stays, and
check where it is less alike.

--out gets audit.html; audit.csv, a row for each finding with a suggested action; images.csv and classes.csv, with the
scores of all; and picks.csv with --pick. Change the column action as you like: tfdml train --drop=audit.csv leaves out
the images whose action is drop.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfdml import backbones
from tfdml.audit import Audit, audit, write_table
from tfdml.backbones.hub import PREFIX
from tfdml.cli import model_flags
from tfdml.cli.command_line import Command, Flags
from tfdml.data.images import FileImages
from tfdml.data.pipeline import evaluation_batches
from tfdml.data.transforms import MODES, EvaluationTransform
from tfdml.effects import Effect, either, needs
from tfdml.embeddings import embed
from tfdml.embeddings.files import ImageTable, read_embeddings
from tfdml.errors import UserError
from tfdml.io.files import partial_folder, require_local
from tfdml.models import Embedder
from tfdml.report import write_audit
from tfdml.retrieval import EmbeddingsToIndex

FLAGS = Flags()
model_flags.define_model_flags(FLAGS)
model_flags.define_data_flags(FLAGS)
FLAGS.define("embeddings", "", "In place of --model: a folder of tfdml embed, or a Parquet, .npz or .npy file.")
FLAGS.define("backbone", "mobilenetv2", "Without --model: as in tfdml train; no projection follows.")
FLAGS.define("weights", "", "Without --model: as in tfdml train; empty: a preset's own, or imagenet (downloaded).")
FLAGS.define("image_size", 224, "Without --model: side of its images in pixels.", lower_bound=1)
FLAGS.define("resize", 0, "Without --model: as in tfdml train; 0: as --image_size.", lower_bound=0)
FLAGS.define("resize_mode", "shorter", "Without --model: as in tfdml train.", MODES)
FLAGS.define("pad_color", "black", "Without --model: as in tfdml train.")
FLAGS.define("pick", 0, "How many images to choose that are worth labeling next (k-center).", lower_bound=0)
FLAGS.define("min_correlation", 0.8, "Of the pixels of duplicates, after alignment.", lower_bound=0.0, upper_bound=1.0)
FLAGS.define("max_distance", 0.01, "Without images: largest cosine distance of duplicates.", lower_bound=0.0)
FLAGS.define("out", "", "Folder to write: new or empty.")

_Picture = Callable[[int], np.ndarray]


def run_audit(values: Flags) -> None:
    """Audit as the flags say."""
    values.require("out")
    if values.embeddings and values.model:
        raise UserError("--embeddings takes the place of --model: name one of them")
    require_local(values.out, "out")
    out = Path(values.out).expanduser()
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"`out={out}` holds files already; name a new or an empty folder")
    name, vectors, table, picture = _data_of(values)
    limits = {"max_distance": values.max_distance, "min_correlation": values.min_correlation}
    found = audit(vectors, table, picture, pick=values.pick, **limits)
    out.parent.mkdir(parents=True, exist_ok=True)
    with partial_folder(out.parent) as hidden:
        _write(hidden, found, name, picture)
        hidden.rename(out)
    counts, how = found.counts(), "" if found.compared else ", by distance alone"
    across = f"{counts['across class']:,} across classes, {counts['across split']:,} across the split"
    print(
        f"{name}: {len(table):,} images of {len(found.classes):,} classes",
        f"{counts['group']:,} groups of near-duplicates, {across}{how}",
        f"{counts['drop']:,} of their images to drop, {counts['check']:,} to check",
        f"{counts['label']:,} labels that other images contradict, {counts['outlier']:,} outliers",
        f"{counts['same class']:,} pairs of classes that overlap, {counts['scattered class']:,} scattered classes",
        f"{counts['pick']:,} images to label next",
        out / "audit.html",
        out / "audit.csv",
        sep="\n  ",
    )


def _data_of(values: Flags) -> tuple[str, np.ndarray, ImageTable, _Picture | None]:
    """Return what the images are called, their embeddings, their table, and the images where they are there."""
    read = EmbeddingsToIndex.read(os.path.expanduser(values.embeddings)) if values.embeddings else None
    if read and not values.dataset:
        return _named(read, values)
    view = None
    if not values.model:
        values.require("dataset")
    if not (values.model or read):
        weights = os.path.expanduser(values.weights or ("none" if values.backbone.startswith(PREFIX) else "imagenet"))
        backbones.check(values.backbone, weights)
        size = values.image_size
        view = EvaluationTransform(values.resize or size, size, values.resize_mode, values.pad_color)
    choice = model_flags.chosen_data(values)
    splits = choice.parts("all")
    table = ImageTable.of(splits, os.path.expanduser(choice.directory))
    if choice.features and read_embeddings(os.path.expanduser(choice.features)).labels is None:
        table = dataclasses.replace(table, labels=np.full(len(table), -1))
    if read:
        if tuple(read.names) != table.names:
            raise UserError(f"--embeddings={values.embeddings} is not of the training and test images of {choice.name}")
        vectors = read.stored.embeddings
    elif view is None:
        source = model_flags.chosen_source(values)
        vectors = np.concatenate([source.embed(split, values.batch_size) for split in splits])
    else:
        embedder = Embedder(backbones.resolve(values.backbone, size, weights), embedding_dim=0, image_size=size)
        vectors = np.concatenate(
            [embed(embedder, evaluation_batches(part, view, values.batch_size)) for part in splits]
        )
    places = [(split.images, row) for split in splits for row in range(len(split))]

    def picture(row: int) -> np.ndarray:
        images, place = places[row]
        return images.picture(place)

    return choice.name, vectors, table, None if choice.features else picture


def _named(read: EmbeddingsToIndex, values: Flags) -> tuple[str, np.ndarray, ImageTable, _Picture | None]:
    """Return the same of stored embeddings, whose names count from `--data_dir`."""
    stored, names = read.stored, tuple(read.names)
    labels = np.full(len(read), -1) if stored.labels is None else stored.labels
    roles = np.full(len(read), "test") if stored.roles is None else stored.roles
    base = os.path.expanduser(values.data_dir)
    images = FileImages(tuple(os.path.join(base, name) for name in names))
    name = os.path.basename(os.path.normpath(values.embeddings))
    return (
        name,
        stored.embeddings,
        ImageTable(names, labels, roles, stored.class_names),
        images.picture if base else None,
    )


def _write(folder: Path, found: Audit, name: str, picture: _Picture | None) -> None:
    """Write the files."""
    table = found.table
    files: dict[str, Mapping[str, Iterable[Any]]] = {
        "audit.csv": found.columns(),
        "images.csv": {
            "image": table.names,
            "role": table.roles,
            "class": [found.class_name(label) for label in table.labels],
            "label_confidence": [f"{value:.4f}" for value in found.confidences],
            "suggested_class": [found.class_name(label) for label in found.suggested],
            "outlier_factor": [f"{value:.4f}" for value in found.outliers],
            "nearest_image": [table.names[near[0]] if len(near) else "" for near in found.neighbors],
        },
        "classes.csv": {
            "class": [found.class_name(label) for label in found.classes],
            "images": np.unique(table.labels[table.labels >= 0], return_counts=True)[1],
            "coherence": [f"{share:.4f}" for share in found.coherence],
        },
        **({"picks.csv": found.columns("pick")} if found.of("pick") else {}),
    }
    for file, columns in files.items():
        write_table(folder / file, columns)
    write_audit(folder / "audit.html", found, name, picture)


_IMAGES = either(needs("model"), needs("dataset"))
_NETWORK = Effect(lambda given: not (given["model"] or given["embeddings"]), "no --model and no --embeddings")


def _has_pictures(given: Mapping[str, Any]) -> bool:
    return bool(given["dataset"] or (given["data_dir"] if given["embeddings"] else not given["features"]))


FLAGS.effects.update(
    {
        **dict.fromkeys(("dataset_options", "bad_images"), _IMAGES),
        "batch_size": Effect(lambda given: not given["embeddings"], "images to embed"),
        **dict.fromkeys(("truncate_dim", "features"), needs("model")),
        **dict.fromkeys(("backbone", "weights", "image_size", "resize", "resize_mode"), _NETWORK),
        "pad_color": needs("resize_mode", "pad"),
        "min_correlation": Effect(_has_pictures, "images"),
        "max_distance": Effect(
            lambda given: not _has_pictures(given), "--features, or --embeddings without --data_dir"
        ),
    }
)
COMMAND = Command(
    "audit",
    run_audit,
    FLAGS,
    __doc__,
)
