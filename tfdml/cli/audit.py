"""`tfdml audit`: what is wrong with a data set, as a report and CSV files."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from tfdml import backbones
from tfdml.audit import FIELDS, Audit, audit, write_table
from tfdml.cli import model_flags
from tfdml.cli.command_line import Command, Flags
from tfdml.data.dataset import ImageDataset
from tfdml.data.images import FileImages
from tfdml.data.pipeline import evaluation_batches
from tfdml.data.transforms import EvaluationTransform
from tfdml.effects import Effect, either, needs
from tfdml.embeddings import embed
from tfdml.embeddings.reader import ImageTable
from tfdml.errors import UserError
from tfdml.io.files import require_local
from tfdml.io.folders import ResumableFolder
from tfdml.models import Embedder
from tfdml.report import write_audit
from tfdml.retrieval import EmbeddingsToIndex

USAGE = f"""
Find near-duplicates, wrong labels, outliers, classes that should be one, classes without a cluster, and images that are
worth labeling next.

  tfdml audit --dataset=folder --data_dir=photos --out=audits/photos
  tfdml audit --model=runs/cars_jrd --out=audits/cars
  tfdml audit --dataset=cars196 --data_dir=/data/cars196 --weights=mnv2_100.weights.h5 --out=audits/cars
  tfdml audit --embeddings=embeddings/photos --data_dir=photos --pick=100 --out=audits/photos
  tfdml train --dataset=folder --data_dir=photos --drop=audits/photos/audit.csv --run_dir=runs/photos

Images are embedded by --model, or by an ImageNet network (--backbone, --weights). With --embeddings they are embedded
already; --data_dir is then where their names count from. Without images, duplicates are a matter of distance alone.

--out gets audit.html; audit.csv, a row for each finding with a suggested action; images.csv and classes.csv, with the
scores of all; and picks.csv with --pick. Change the column action as you like: tfdml train --drop=audit.csv leaves out
the images whose action is drop.

{model_flags.SOURCES}
"""

FLAGS = Flags()
model_flags.define_model_flags(FLAGS)
model_flags.define_data_flags(FLAGS)
FLAGS.define("embeddings", "", "In place of --model: a folder of tfdml embed, or a Parquet, .npz or .npy file.")
FLAGS.define("backbone", "mobilenetv2", "Without --model: a network of tfdml.backbones, without a projection.")
FLAGS.define("weights", "imagenet", "Without --model: its weights, a file or imagenet, which is downloaded.")
FLAGS.define("image_size", 224, "Without --model: side of its images in pixels.", lower_bound=1)
FLAGS.define("pick", 0, "How many images to choose that are worth labeling next (k-center).", lower_bound=0)
FLAGS.define("min_correlation", 0.8, "Of the pixels of duplicates, after alignment.", lower_bound=0.0, upper_bound=1.0)
FLAGS.define("max_distance", 0.01, "Without images: largest cosine distance of duplicates.", lower_bound=0.0)
FLAGS.define("out", "", "Folder to write: new or empty.")

_Picture = Callable[[int], np.ndarray]


def run_audit(values: Flags) -> None:
    """Audit as the flags say."""
    values.require("out")
    require_local(values.out, "out")
    if values.embeddings and values.model:
        raise UserError("--embeddings takes the place of --model: name one of them")
    given = {name: values[name].value for name in values if name not in ("out", "batch_size", "timeout")}
    folder = ResumableFolder(os.path.expanduser(values.out), "out", "tfdml-audit", 1, given)
    folder.read()
    if folder.manifest:
        print(f"{folder.folder} is finished already: nothing to do")
        return
    name, vectors, table, picture = _stored(values) if values.embeddings else _embedded(values)
    found = audit(
        vectors,
        table,
        picture,
        pick=values.pick,
        max_distance=values.max_distance,
        min_correlation=values.min_correlation,
    )
    with folder.opened():
        folder.begin({})
        folder.finish({"files": _write(folder, found, name, picture)})
    print(f"{name}: {len(table):,} images of {len(found.classes):,} classes")
    for line in _summary(found):
        print(f"  {line}")
    print(f"  {folder.path('audit.html')}\n  {folder.path('audit.csv')}")


def _embedded(values: Flags) -> tuple[str, np.ndarray, ImageTable, _Picture]:
    """Return what the images are called, their embeddings, their table and the images, of a data set."""
    if values.model:
        choice = model_flags.chosen_data(values)
        source = model_flags.chosen_source(values)
        splits = [choice.load(split) for split in ("train", "test")]
        vectors = [source.embed(split, values.batch_size) for split in splits]
    else:
        values.require("dataset")
        choice = model_flags.DataChoice(values.dataset, values.data_dir, values.dataset_options, values.bad_images)
        splits = [choice.load(split) for split in ("train", "test")]
        network = backbones.resolve(values.backbone, values.image_size, os.path.expanduser(values.weights))
        embedder = Embedder(network, embedding_dim=0, image_size=values.image_size)
        view = EvaluationTransform.of(embedder)
        vectors = [embed(embedder, evaluation_batches(split, view, values.batch_size)) for split in splits]
    table = ImageTable.of(splits, os.path.expanduser(choice.directory))
    return choice.name, np.concatenate(vectors), table, _pictures(splits)


def _pictures(splits: list[ImageDataset]) -> _Picture:
    """Return the images of several splits by their rows in the whole."""
    ends = np.cumsum([len(split) for split in splits])

    def picture(row: int) -> np.ndarray:
        part = int(np.searchsorted(ends, row, "right"))
        return splits[part].images.picture(row - int(ends[part]) + len(splits[part]))

    return picture


def _stored(values: Flags) -> tuple[str, np.ndarray, ImageTable, _Picture | None]:
    """Return the same of stored embeddings; None for images that are not there."""
    read = EmbeddingsToIndex.read(os.path.expanduser(values.embeddings))
    stored = read.stored
    labels = np.full(len(read), -1) if stored.labels is None else stored.labels
    roles = np.full(len(read), "test") if stored.roles is None else stored.roles
    table = ImageTable(tuple(read.names), labels, roles)
    if values.dataset:
        choice = model_flags.DataChoice(values.dataset, values.data_dir, values.dataset_options, values.bad_images)
        splits = [choice.load(split) for split in ("train", "test")]
        known = ImageTable.of(splits, os.path.expanduser(choice.directory))
        if known.names != table.names:
            raise UserError(f"--embeddings={values.embeddings} is not of the training and test images of {choice.name}")
        return choice.name, stored.embeddings, known, _pictures(splits)
    name = os.path.basename(os.path.normpath(values.embeddings))
    if not values.data_dir:
        return name, stored.embeddings, table, None
    base = os.path.expanduser(values.data_dir)
    return name, stored.embeddings, table, FileImages(tuple(os.path.join(base, part) for part in read.names)).picture


def _summary(found: Audit) -> list[str]:
    groups = {finding.group: finding for finding in found.of("duplicate")}.values()
    across = [sum(kind in group.across for group in groups) for kind in ("class", "split")]
    how = "" if found.compared else ", by distance alone"
    return [
        f"{len(groups):,} groups of near-duplicates, {across[0]:,} across classes, {across[1]:,} across the split{how}",
        f"{len(found.of('label')):,} labels that other images contradict",
        f"{len(found.of('outlier')):,} outliers",
        f"{len(found.of('same class')):,} pairs of classes that overlap, {len(found.of('scattered class')):,} classes "
        "that are scattered",
        *([f"{len(picks):,} images to label next"] if (picks := found.of("pick")) else []),
    ]


def _write(folder: ResumableFolder, found: Audit, name: str, picture: _Picture | None) -> list[str]:
    """Write the files, and return their names."""
    table, rows = found.table, list(found.rows())
    write_table(folder.path("audit.csv"), FIELDS, rows)
    columns = {
        "image": table.names,
        "role": table.roles,
        "class": [found.class_name(label) for label in table.labels],
        "label_confidence": [f"{value:.4f}" for value in found.confidences],
        "suggested_class": [found.class_name(label) for label in found.suggested],
        "outlier_factor": [f"{value:.4f}" for value in found.outliers],
        "nearest_image": [table.names[near[0]] if len(near) else "" for near in found.neighbors],
    }
    images = (dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True))
    write_table(folder.path("images.csv"), list(columns), images)
    classes = [
        {"class": found.class_name(label), "images": int((table.labels == label).sum()), "coherence": f"{share:.4f}"}
        for label, share in zip(found.classes, found.coherence, strict=True)
    ]
    write_table(folder.path("classes.csv"), ["class", "images", "coherence"], classes)
    files = ["audit.csv", "images.csv", "classes.csv", "audit.html"]
    if picks := [row for row in rows if row["kind"] == "pick"]:
        write_table(folder.path("picks.csv"), FIELDS, picks)
        files.append("picks.csv")
    write_audit(folder.path("audit.html"), found, name, picture)
    return files


_MODEL = needs("model")
_IMAGES = either(needs("model"), needs("dataset"))
_NETWORK = Effect(lambda given: not (given["model"] or given["embeddings"]), "no --model and no --embeddings")
COMMAND = Command(
    "audit",
    run_audit,
    FLAGS,
    USAGE,
    effects={
        **model_flags.EFFECTS,
        **dict.fromkeys(("dataset_options", "bad_images"), _IMAGES),
        "batch_size": Effect(lambda given: not given["embeddings"], "images to embed"),
        **dict.fromkeys(("truncate_dim", "features"), _MODEL),
        **dict.fromkeys(("backbone", "weights", "image_size"), _NETWORK),
        "max_distance": Effect(
            lambda given: bool(given["embeddings"] and not (given["data_dir"] or given["dataset"])),
            "--embeddings without --data_dir",
        ),
        "min_correlation": Effect(
            lambda given: bool(given["data_dir"] or given["dataset"] or given["model"]), "images"
        ),
    },
)
