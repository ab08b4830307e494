"""The export of a finished run: its embedder, its data, and what the model card states of it."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from absl import logging

from tfdml.arguments import integer, number
from tfdml.data.dataset import ImageDataset
from tfdml.data.pipeline import evaluation_batches
from tfdml.data.transforms import EvaluationTransform
from tfdml.embeddings.backends import load_embedder
from tfdml.embeddings.compute import embed
from tfdml.errors import UserError
from tfdml.export.exporter import ExportOptions, export_model
from tfdml.io.files import is_remote
from tfdml.io.manifests import parse_flags, read_json
from tfdml.models import AnyEmbedder, WhitenedEmbedder, with_whitening
from tfdml.training import RunFolder
from tfdml.training.build.images import Splits, load_splits
from tfdml.training.experiment import Experiment
from tfdml.training.run.several import trained_on

# Of the training images that a whitening is fitted to.
_BATCH_SIZE = 100


def export_run(
    run_dir: str | os.PathLike,
    folder: str | os.PathLike,
    options: ExportOptions | None = None,
    moments: bool = False,
    data_dir: str = "",
    report: Callable[[str], None] = logging.info,
    whitening: Mapping[str, Any] | None = None,
) -> Path:
    """Export the embedder of a run; see `export_model`.

    Args:
        run_dir: The run's folder.
        folder: Where versions lie.
        options: The formats and tolerances.
        moments: Export `moments.keras`, which searches with all moments, in place of `embedder.keras`.
        data_dir: Where the run's data set lies now, if it has moved.
        report: Called with a line on each format.
        whitening: Arguments of `with_whitening` (`dim`, `power`, `shrinkage`), to export the embedder with a whitening
            behind it that is fitted to the run's training images; None: without.

    Returns:
        The path of the version.

    Raises:
        UserError: As `export_model`; or the folder is not that of a finished run, or its images are gone.

    Example:
        >>> export_run("runs/cars_jrd", "models/cars", ExportOptions(formats=["all"]))
        PosixPath('models/cars/1')
    """
    embedder, experiment = load_run(run_dir, moments, data_dir)
    splits = load_splits(trained_on(experiment), experiment.seed)
    about = about_run(run_dir, experiment, splits, moments)
    if whitening is not None:
        embedder = whitened(embedder, splits.train, whitening)
        # The run has measured the embedder without.
        about = {**about, "metrics": None, "whitening": dict(whitening)}
    return export_model(embedder, folder, splits.test, splits.train, options, about, report)


def whitened(embedder: AnyEmbedder, train: ImageDataset, arguments: Mapping[str, Any]) -> WhitenedEmbedder:
    """An embedder with a whitening behind it, fitted to training images.

    Raises:
        UserError: An argument is unknown or out of range, or there are too few images.
    """
    check_whitening(arguments)
    dim = arguments.get("dim") or embedder.embedding_dim
    if dim > embedder.embedding_dim or dim >= len(train):
        raise UserError(
            f"`whitening`: there are no {dim} components of {len(train):,} training images, {embedder.embedding_dim}-d"
        )
    batches = evaluation_batches(train, EvaluationTransform.of(embedder), _BATCH_SIZE)
    return with_whitening(embedder, embed(embedder, batches), **arguments)


def check_whitening(arguments: Mapping[str, Any]) -> None:
    """Raise a `UserError` where these are no arguments of `with_whitening`."""
    checks = {
        "dim": lambda value: integer("dim", value, at_least=0),
        "power": lambda value: number("power", value, at_least=0, at_most=1),
        "shrinkage": lambda value: number("shrinkage", value, at_least=0, at_most=1),
    }
    for name, value in arguments.items():
        if name not in checks:
            raise UserError(f"`whitening` has no argument {reprlib.repr(name)}; it has {', '.join(checks)}")
        try:
            checks[name](value)
        except ValueError as error:
            raise UserError(f"`whitening`: {error}") from error


def load_run(run_dir: str | os.PathLike, moments: bool = False, data_dir: str = "") -> tuple[AnyEmbedder, Experiment]:
    """The embedder and the settings of a run.

    Raises:
        UserError: There are none.
    """
    if data_dir and not is_remote(data_dir) and not os.path.exists(os.path.expanduser(data_dir)):
        raise UserError(f"`data_dir={data_dir}`: there is no such folder")
    run = RunFolder(run_dir)
    embedder = load_embedder(run.moments if moments else run.embedder)
    text = run.load_experiment().as_flags()
    changes = {"run_dir": str(run_dir), **({"data_dir": data_dir} if data_dir else {})}
    return embedder, Experiment.from_flags(text, **changes)


def about_run(
    run_dir: str | os.PathLike, experiment: Experiment, splits: Splits, moments: bool = False
) -> dict[str, Any]:
    """What the model card states of a run: data, flags, metrics."""
    stored = RunFolder(run_dir).result
    result = read_json(stored) if stored.exists() else {}
    if not result:
        logging.warning("%s has no result.json: the model card is without metrics", run_dir)
    parts = {"train": splits.train, "test": splits.test}
    flags = parse_flags(experiment.as_flags())
    return {
        "data": {
            "dataset": experiment.dataset,
            "options": experiment.dataset_options,
            **{name: {"images": len(part), "classes": part.num_classes} for name, part in parts.items()},
        },
        # Paths of the machine that trained stay private.
        "flags": {name: value for name, value in flags.items() if name not in ("data_dir", "run_dir", "start_from")},
        "metrics": result.get("metrics_moments" if moments else "metrics"),
        "protocol": result.get("protocol"),
        "selection": result.get("selection"),
    }
