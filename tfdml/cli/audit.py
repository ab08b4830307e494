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
from collections.abc import Callable
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

_IMAGES = either(needs("model"), needs("dataset"))
_EMBEDDED = Effect(lambda values: not values["embeddings"], "images to embed, not --embeddings")
_PICTURES = Effect(
    lambda values: bool(values["dataset"] or (values["data_dir"] if values["embeddings"] else not values["features"])),
    "images",
)
_VECTORS = Effect(lambda values: not _PICTURES.holds(values), "--features, or --embeddings without --data_dir")
_NETWORK = Effect(lambda values: not (values["model"] or values["embeddings"]), "no --model and no --embeddings")

FLAGS = Flags()
model_flags.define_model_flags(FLAGS, embeds=_EMBEDDED)
model_flags.define_data_flags(FLAGS)
FLAGS.effects.update(truncate_dim=needs("model"), features=needs("model"), dataset_options=_IMAGES, bad_images=_IMAGES)
FLAGS.define("embeddings", "", "In place of --model: a folder of tfdml embed, or a Parquet, .npz or .npy file.")
_BACKBONE = "Without --model: as in tfdml train; no projection follows."
FLAGS.define("backbone", "mobilenetv2", _BACKBONE, effect=_NETWORK)
_WEIGHTS = "Without --model: as in tfdml train; empty: a preset's own, or imagenet (downloaded)."
FLAGS.define("weights", "", _WEIGHTS, effect=_NETWORK)
_SIZE = "Without --model: side of its images in pixels."
FLAGS.define("image_size", 224, _SIZE, lower_bound=1, effect=_NETWORK)
FLAGS.define("resize", 0, "Without --model: as in tfdml train; 0: as --image_size.", lower_bound=0, effect=_NETWORK)
FLAGS.define("resize_mode", "shorter", "Without --model: as in tfdml train.", MODES, effect=_NETWORK)
FLAGS.define("pad_color", "black", "Without --model: as in tfdml train.", effect=_NETWORK)
FLAGS.define("pick", 0, "How many images to choose that are worth labeling next (k-center).", lower_bound=0)
_CORRELATION = "Of the pixels of duplicates, after alignment."
FLAGS.define("min_correlation", 0.8, _CORRELATION, lower_bound=0.0, upper_bound=1.0, effect=_PICTURES)
_DISTANCE = "Without images: largest cosine distance of duplicates."
FLAGS.define("max_distance", 0.01, _DISTANCE, lower_bound=0.0, effect=_VECTORS)
FLAGS.define("out", "", "Folder to write: new or empty.")

_Picture = Callable[[int], np.ndarray]


def run_audit(values: Flags) -> None:
    """Audit as the flags say."""
    values.require("out")
    require_local(values.out, "out")
    out = Path(values.out).expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out={values.out} exists already: name a new folder, or an empty one")
    if values.embeddings and values.model:
        raise UserError("--embeddings takes the place of --model: name one of them")
    name, vectors, table, picture = _data_of(values)
    limits = {"max_distance": values.max_distance, "min_correlation": values.min_correlation}
    result = audit(vectors, table, picture, pick=values.pick, **limits)
    out.parent.mkdir(parents=True, exist_ok=True)
    with partial_folder(out.parent) as folder:
        _write(folder, result, name, picture)
        os.replace(folder, out)
    counts, how = result.counts(), "" if result.by_pixels else ", by distance alone"
    across = f"{counts['across class']:,} across classes, {counts['across split']:,} across the split"
    print(
        f"{name}: {len(table):,} images of {len(result.classes):,} classes",
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
    stored = EmbeddingsToIndex.read(os.path.expanduser(values.embeddings)) if values.embeddings else None
    if stored and not values.dataset:
        return _named(stored, values)
    if not values.model:
        values.require("dataset")
    choice = model_flags.data_choice(values)
    size, embedder = values.image_size, None
    view = EvaluationTransform(values.resize or size, size, values.resize_mode, values.pad_color)
    if not (values.model or stored):
        weights = os.path.expanduser(values.weights or ("none" if values.backbone.startswith(PREFIX) else "imagenet"))
        embedder = Embedder(backbones.resolve(values.backbone, size, weights), embedding_dim=0, image_size=size)
    splits = choice.parts("all")
    table = ImageTable.of(splits, os.path.expanduser(choice.directory))
    if choice.features and read_embeddings(os.path.expanduser(choice.features)).labels is None:
        table = dataclasses.replace(table, labels=np.full(len(table), -1))
    if stored:
        if tuple(stored.names) != table.names:
            raise UserError(f"--embeddings={values.embeddings} is not of the training and test images of {choice.name}")
        vectors = stored.stored.embeddings
    elif embedder is None:
        source = model_flags.load_source(values)
        vectors = np.concatenate([source.embed(split, values.batch_size) for split in splits])
    else:
        batches = [evaluation_batches(split, view, values.batch_size) for split in splits]
        vectors = np.concatenate([embed(embedder, each) for each in batches])
    places = [(split.images, row) for split in splits for row in range(len(split))]

    def picture(row: int) -> np.ndarray:
        images, place = places[row]
        return images.picture(place)

    return choice.name, vectors, table, None if choice.features else picture


def _named(read: EmbeddingsToIndex, values: Flags) -> tuple[str, np.ndarray, ImageTable, _Picture | None]:
    """Return the same of stored embeddings, whose names count from `--data_dir`."""
    stored, base = read.stored, os.path.expanduser(values.data_dir)
    labels = np.full(len(read), -1) if stored.labels is None else stored.labels
    roles = np.full(len(read), "test") if stored.roles is None else stored.roles
    table = ImageTable(tuple(read.names), labels, roles, stored.class_names)
    images = FileImages(tuple(os.path.join(base, name) for name in read.names))
    name = os.path.basename(os.path.normpath(values.embeddings))
    return name, stored.embeddings, table, images.picture if base else None


def _write(folder: Path, result: Audit, name: str, picture: _Picture | None) -> None:
    table = result.table
    write_table(folder / "audit.csv", result.columns())
    if result.of("pick"):
        write_table(folder / "picks.csv", result.columns("pick"))
    images: dict[str, Any] = {
        "image": table.names,
        "role": table.roles,
        "class": [result.class_name(label) for label in table.labels],
        "label_confidence": [f"{value:.4f}" for value in result.confidences],
        "suggested_class": [result.class_name(label) for label in result.suggestions],
        "outlier_factor": [f"{value:.4f}" for value in result.outliers],
        "nearest_image": [table.names[near[0]] if len(near) else "" for near in result.neighbors],
    }
    write_table(folder / "images.csv", images)
    classes: dict[str, Any] = {
        "class": [result.class_name(label) for label in result.classes],
        "images": np.unique(table.labels[table.labels >= 0], return_counts=True)[1],
        "coherence": [f"{share:.4f}" for share in result.coherence],
    }
    write_table(folder / "classes.csv", classes)
    write_audit(folder / "audit.html", result, name, picture)


COMMAND = Command("audit", run_audit, FLAGS, __doc__)
