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

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tfdml.cli.command_line import Command, Flags
from tfdml.cli.model_flags import DataFlags, data_choice, load_source
from tfdml.errors import UserError, counted
from tfdml.expressions import HUB, Arguments
from tfdml.io.files import local_copy, partial_folder, require_local
from tfdml.names import warn
from tfdml.options import Color, changed, condition, option

if TYPE_CHECKING:
    import numpy as np

    from tfdml.audit import Audit
    from tfdml.embeddings.files import ImageTable

_NETWORK = "no model and no embeddings"
_EMBEDDED = "no embeddings"


def _of_network(default: Any, **rules: Any) -> Any:
    return option(default, requires=_NETWORK, **rules)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditFlags(DataFlags):
    """What is audited, how, and where the findings are written."""

    title: ClassVar[str] = "What is audited, how, and where the findings are written"

    batch_size: int = changed(DataFlags, "batch_size", requires=_EMBEDDED)
    truncate_dim: int = changed(DataFlags, "truncate_dim", requires=_EMBEDDED)
    dataset: str = changed(DataFlags, "dataset", requires=_EMBEDDED)
    features: str = changed(DataFlags, "features", requires="model")
    dataset_options: Arguments = changed(
        DataFlags, "dataset_options", requires=f"model or dataset and {_EMBEDDED}"
    )
    bad_images: str = changed(DataFlags, "bad_images", requires=f"model or dataset and {_EMBEDDED}")
    embeddings: str = option(
        "",
        help="In place of --model: a folder of tfdml embed, or a Parquet, .npz or .npy file.",
    )
    backbone: str = _of_network(
        "mobilenetv2", help="Without --model: as in tfdml train; no projection follows."
    )
    weights: str = _of_network(
        "",
        help="Without --model: as in tfdml train; empty: a preset's own, or imagenet (downloaded).",
    )
    image_size: int = _of_network(
        224, at_least=1, help="Without --model: side of its images in pixels."
    )
    resize: int = _of_network(
        0, at_least=0, help="Without --model: as in tfdml train; 0: as --image_size."
    )
    resize_mode: str = _of_network(
        "shorter",
        words=("shorter", "squash", "pad"),
        help="Without --model: as in tfdml train.",
    )
    pad_color: Color = _of_network(
        Color.parse("black", "pad_color"), help="Without --model: as in tfdml train."
    )
    min_correlation: float = option(
        0.8,
        at_least=0,
        at_most=1,
        requires="has_pictures",
        help="Of the pixels of duplicates, after alignment.",
    )
    max_distance: float = option(
        0.01,
        at_least=0,
        requires="has_vectors",
        help="Without images: largest cosine distance of duplicates.",
    )
    out: str = option(help="Folder to write: new or empty.")

    @condition("images")
    def has_pictures(self) -> bool:
        """Whether there are images."""
        return bool(self.data_dir) if self.embeddings else not self.features

    @condition("--features, or --embeddings without --data_dir")
    def has_vectors(self) -> bool:
        """Whether there are embeddings alone."""
        return not self.has_pictures


def run_audit(flags: AuditFlags) -> None:
    """Audit as the flags say."""
    from tfdml.audit import audit, write_table
    from tfdml.report import write_audit

    out = _new_folder(flags.out)
    if flags.embeddings and flags.model:
        raise UserError("takes the place of --model: name one of them", embeddings=...)
    if not (flags.embeddings or flags.model or flags.dataset):
        raise UserError("is missing", dataset=...)
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
    print(f"{name}: {counted(len(table), 'image')} of {result.num_classes:,} classes")
    print("\n".join(_findings(result)))
    print(f"  {out / 'audit.html'}\n  {out / 'audit.csv'}")


def _new_folder(path: str) -> Path:
    """Return the folder to write; it is new or empty."""
    require_local(path, "out")
    folder = Path(path).expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError("exists already: name a new folder, or an empty one", out=path)
    return folder


def _findings(result: Audit) -> Iterator[str]:
    """Yield a line for each kind of finding."""
    counts = result.counts()
    groups = f"{counted(counts['group'], 'group')} of near-duplicates"
    classes = f"{counts['across class']:,} across classes"
    splits = f"{counts['across split']:,} across the split"
    how = "" if result.by_pixels else ", by distance alone"
    yield f"  {groups}, {classes}, {splits}{how}"
    yield f"  {counts['drop']:,} of their images to drop, {counts['check']:,} to check"
    labels = f"{counted(counts['label'], 'label')} that other images contradict"
    yield f"  {labels}, {counted(counts['outlier'], 'outlier')}"


def _embedded(
    flags: AuditFlags,
) -> tuple[str, np.ndarray, ImageTable, Callable[[int], np.ndarray] | None]:
    """Return what the images are called, their embeddings, their table, and the images where they
    are there."""
    import keras
    import numpy as np

    from tfdml import backbones
    from tfdml.data.pipeline import evaluation_batches
    from tfdml.data.transforms import EvaluationTransform
    from tfdml.embeddings import embed
    from tfdml.embeddings.files import ImageTable, read_embeddings
    from tfdml.models import Embedder

    selection = data_choice(flags)
    splits = selection.parts("all")
    table = ImageTable.of(splits, os.path.expanduser(selection.directory))
    if selection.features:
        stored = read_embeddings(os.path.expanduser(selection.features))
        if stored.labels is None:
            table = dataclasses.replace(table, labels=np.full(len(table), -1))
    if flags.model:
        source = load_source(flags)
        vectors = [source.embed(split, flags.batch_size) for split in splits]
    else:
        size = flags.image_size
        view = EvaluationTransform(flags.resize or size, size, flags.resize_mode, flags.pad_color)
        usual = "none" if flags.backbone.startswith(HUB) else "imagenet"
        weights = local_copy(os.path.expanduser(flags.weights or usual))
        if weights == "none" and not flags.backbone.startswith(HUB):
            warn("--weights=none: the network is random, so that only near-duplicates mean much")
            keras.utils.set_random_seed(0)
        backbone = backbones.resolve(flags.backbone, size, weights)
        embedder = Embedder(backbone, embedding_dim=0, image_size=size)
        batches = [evaluation_batches(split, view, flags.batch_size) for split in splits]
        vectors = [embed(embedder, images) for images in batches]
    pictures: list[Callable[[], np.ndarray]] = []
    for split in splits:
        pictures += [functools.partial(split.images.picture, row) for row in range(len(split))]
    picture = None if selection.features else lambda row: pictures[row]()
    return selection.name, np.concatenate(vectors), table, picture


def _stored(
    flags: AuditFlags,
) -> tuple[str, np.ndarray, ImageTable, Callable[[int], np.ndarray] | None]:
    """Return the same of stored embeddings, whose names count from `--data_dir`."""
    import numpy as np

    from tfdml.data.images import FileImages
    from tfdml.embeddings.files import ImageTable, read_embeddings

    stored = read_embeddings(os.path.expanduser(flags.embeddings))
    base = os.path.expanduser(flags.data_dir)
    labels = np.full(len(stored), -1) if stored.labels is None else stored.labels
    roles = np.full(len(stored), "test") if stored.roles is None else stored.roles
    table = ImageTable(stored.names, labels, roles, stored.class_names)
    images = FileImages(tuple(os.path.join(base, name) for name in stored.names))
    name = os.path.basename(os.path.normpath(flags.embeddings))
    return name, stored.embeddings, table, images.picture if base else None


COMMAND = Command("audit", run_audit, Flags(AuditFlags), __doc__)
