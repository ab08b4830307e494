r"""Find what is wrong with a data set: near-duplicates, wrong labels, and outliers.

  tfdml audit --dataset=folder --data_dir=photos --out=audits/photos
  tfdml audit --model=runs/cars_jrd --out=audits/cars
  tfdml audit --dataset=cars196 --data_dir=/data/cars196 --weights=mnv2_100.weights.h5 \
      --out=audits/cars
  tfdml audit --embeddings=embeddings/photos --data_dir=photos --out=audits/photos
  tfdml train --dataset=folder --data_dir=photos --drop=audits/photos/audit.csv \
      --run_dir=runs/photos

Images are embedded by --model, or by an ImageNet network (--backbone, --weights). With --embeddings
they are embedded already; --data_dir is then where their names count from. Without images, as with
a head and its --features, duplicates are a matter of distance alone. An image is marked drop only
if it is itself a near-duplicate of one that stays, and check where it is less alike.

--out gets audit.html; audit.csv, a row for each finding with a suggested action; and images.csv,
with the scores of all. Change the column action as you like: tfdml train --drop=audit.csv leaves
out the images whose action is drop.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tfdml import backbones
from tfdml.audit import audit, write_table
from tfdml.backbones.hub import PREFIX
from tfdml.cli.command_line import Command, Flags
from tfdml.cli.model_flags import DataFlags, data_choice, load_source
from tfdml.data.images import FileImages
from tfdml.data.pipeline import evaluation_batches
from tfdml.data.transforms import MODES, EvaluationTransform, as_color
from tfdml.embeddings import embed
from tfdml.embeddings.files import ImageTable, read_embeddings
from tfdml.errors import UserError
from tfdml.flags import Effect, both, either, needs
from tfdml.io.files import local_copy, partial_folder, require_local
from tfdml.models import Embedder
from tfdml.report import write_audit
from tfdml.training.settings import choice, not_negative, positive

_IMAGES = either(needs("model"), needs("dataset"))
_EMBEDDED = Effect(lambda values: not values["embeddings"], "images to embed, not --embeddings")
_PICTURES = Effect(
    lambda values: bool(values["data_dir"] if values["embeddings"] else not values["features"]),
    "images",
)
_VECTORS = Effect(
    lambda values: not _PICTURES.holds(values), "--features, or --embeddings without --data_dir"
)
_NETWORK = Effect(
    lambda values: not (values["model"] or values["embeddings"]), "no --model and no --embeddings"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditFlags(DataFlags):
    """What is audited, how, and where the findings are written.

    Args:
        embeddings: In place of --model: a folder of tfdml embed, or a Parquet, .npz or .npy file.
        backbone: Without --model: as in tfdml train; no projection follows.
        weights: Without --model: as in tfdml train; empty: a preset's own, or imagenet
            (downloaded).
        image_size: Without --model: side of its images in pixels.
        resize: Without --model: as in tfdml train; 0: as --image_size.
        resize_mode: Without --model: as in tfdml train.
        pad_color: Without --model: as in tfdml train.
        min_correlation: Of the pixels of duplicates, after alignment.
        max_distance: Without images: largest cosine distance of duplicates.
        out: Folder to write: new or empty.
    """

    embeddings: str = ""
    backbone: str = choice("mobilenetv2", effect=_NETWORK)
    weights: str = choice("", effect=_NETWORK)
    image_size: int = choice(224, check=positive, effect=_NETWORK)
    resize: int = choice(0, check=not_negative, effect=_NETWORK)
    resize_mode: str = choice("shorter", choices=MODES, effect=_NETWORK)
    pad_color: str = choice("black", effect=_NETWORK)
    min_correlation: float = choice(0.8, check=lambda value: 0 <= value <= 1, effect=_PICTURES)
    max_distance: float = choice(0.01, check=not_negative, effect=_VECTORS)
    out: str


FLAGS = Flags(
    AuditFlags,
    effects={
        **dict.fromkeys(("batch_size", "truncate_dim", "dataset"), _EMBEDDED),
        **dict.fromkeys(("dataset_options", "bad_images"), both(_IMAGES, _EMBEDDED)),
        "features": needs("model"),
    },
)
_Picture = Callable[[int], np.ndarray]


def run_audit(values: Flags) -> None:
    """Audit as the flags say."""
    flags = values.settings(AuditFlags)
    require_local(flags.out, "out")
    out = Path(flags.out).expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out={flags.out} exists already: name a new folder, or an empty one")
    if flags.embeddings and flags.model:
        raise UserError("--embeddings takes the place of --model: name one of them")
    if not (flags.embeddings or flags.model or flags.dataset):
        raise UserError("--dataset is missing")
    name, vectors, table, picture = _stored(flags) if flags.embeddings else _embedded(flags)
    result = audit(
        vectors,
        table,
        picture,
        max_distance=flags.max_distance,
        min_correlation=flags.min_correlation,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with partial_folder(out.parent) as folder:
        for file, columns in result.tables().items():
            write_table(folder / f"{file}.csv", columns)
        write_audit(folder / "audit.html", result, name, picture)
        os.replace(folder, out)
    counts, how = result.counts(), "" if result.by_pixels else ", by distance alone"
    print(f"{name}: {len(table):,} images of {result.num_classes:,} classes")
    print(
        f"  {counts['group']:,} groups of near-duplicates, {counts['across class']:,} across "
        "classes, ",
        end="",
    )
    print(f"{counts['across split']:,} across the split{how}")
    print(f"  {counts['drop']:,} of their images to drop, {counts['check']:,} to check")
    print(
        f"  {counts['label']:,} labels that other images contradict, {counts['outlier']:,} outliers"
    )
    print(f"  {out / 'audit.html'}\n  {out / 'audit.csv'}")


def _embedded(flags: AuditFlags) -> tuple[str, np.ndarray, ImageTable, _Picture | None]:
    """Return what the images are called, their embeddings, their table, and the images where they
    are there."""
    selection = data_choice(flags)
    splits = selection.parts("all")
    table = ImageTable.of(splits, os.path.expanduser(selection.directory))
    if (
        selection.features
        and read_embeddings(os.path.expanduser(selection.features)).labels is None
    ):
        table = dataclasses.replace(table, labels=np.full(len(table), -1))
    if flags.model:
        source = load_source(flags)
        vectors = [source.embed(split, flags.batch_size) for split in splits]
    else:
        size = flags.image_size
        view = EvaluationTransform(
            flags.resize or size, size, flags.resize_mode, as_color(flags.pad_color)
        )
        weights = os.path.expanduser(
            flags.weights or ("none" if flags.backbone.startswith(PREFIX) else "imagenet")
        )
        embedder = Embedder(
            backbones.resolve(flags.backbone, size, local_copy(weights)),
            embedding_dim=0,
            image_size=size,
        )
        vectors = [
            embed(embedder, evaluation_batches(split, view, flags.batch_size)) for split in splits
        ]
    pictures = [
        functools.partial(split.images.picture, row)
        for split in splits
        for row in range(len(split))
    ]
    return (
        selection.name,
        np.concatenate(vectors),
        table,
        None if selection.features else lambda row: pictures[row](),
    )


def _stored(flags: AuditFlags) -> tuple[str, np.ndarray, ImageTable, _Picture | None]:
    """Return the same of stored embeddings, whose names count from `--data_dir`."""
    stored, base = (
        read_embeddings(os.path.expanduser(flags.embeddings)),
        os.path.expanduser(flags.data_dir),
    )
    labels = np.full(len(stored), -1) if stored.labels is None else stored.labels
    roles = np.full(len(stored), "test") if stored.roles is None else stored.roles
    table = ImageTable(stored.names, labels, roles, stored.class_names)
    images = FileImages(tuple(os.path.join(base, name) for name in stored.names))
    name = os.path.basename(os.path.normpath(flags.embeddings))
    return name, stored.embeddings, table, images.picture if base else None


COMMAND = Command("audit", run_audit, FLAGS, __doc__)
