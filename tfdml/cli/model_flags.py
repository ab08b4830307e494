"""The flags by which commands name a model and the images that it embeds; what a gallery is."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tfdml.cli.command_line import CommandFlags, load_tensorflow
from tfdml.errors import UserError
from tfdml.expressions import Arguments
from tfdml.io.files import read_json
from tfdml.options import option
from tfdml.run_folder import EMBEDDER_FILE, FLAGS_FILE
from tfdml.training import Experiment

if TYPE_CHECKING:
    from tfdml.data.dataset import ImageDataset
    from tfdml.embeddings.backends import EmbeddingBackend


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFlags(CommandFlags):
    """What embeds images."""

    title: ClassVar[str] = "What embeds images"

    model: str = option(
        "",
        help="What embeds: a run folder or a .keras file; a SavedModel, or a folder of its "
        "versions, of which the newest is taken; or a .tflite or .onnx file, whose view is in its "
        "export's model_card.json.",
    )
    unfinished: bool = option(
        False, help="Take the best embedder so far of a run that has not ended."
    )
    batch_size: int = option(100, at_least=1, requires="model", help="Images per batch.")
    truncate_dim: int = option(
        0,
        at_least=0,
        requires="model",
        help="Keep the first N dimensions, scaled to length 1; 0: all.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFlags(ModelFlags):
    """What embeds which images."""

    title: ClassVar[str] = "Which images"

    dataset: str = option("", help="Data set, as in tfdml train; for a run folder, its own.")
    features: str = option(
        "", help="Stored embeddings, for a head; without roles, all are of the test split."
    )
    data_dir: str = option("", help="Where the unpacked data set lies.")
    dataset_options: Arguments = option(
        Arguments(), help="Options of the data set, as in tfdml train."
    )
    bad_images: str = option(
        "error",
        words=("error", "skip"),
        help="Images that cannot be decoded: skip decodes all first.",
    )


@dataclasses.dataclass(frozen=True)
class DataChoice:
    """Which data set the flags mean.

    Args:
        name: Its name.
        directory: Where it lies; empty: nowhere.
        options: Those of the data set.
        bad_images: `error`, or `skip` to leave out the images that cannot be decoded, of which each
            is tried.
        features: Stored embeddings in the place of images.
        trained_on: Whether a head was trained on them, and they have the splits of its training.
    """

    name: str
    directory: str
    options: Mapping[str, Any]
    bad_images: str = "error"
    features: str = ""
    trained_on: bool = False

    @functools.cached_property
    def _vectors(self) -> dict[str, ImageDataset]:
        from tfdml.training.run_data import vector_splits

        options = {**self.options}
        if not self.trained_on:
            options.setdefault("test_fraction", None)
        return vector_splits(self.features, self.directory, **options)

    def parts(self, split: str) -> list[ImageDataset]:
        """Return a split or, of all images, those for training and for testing."""
        if split != "all":
            return [self.load(split)]
        if self.features:
            return list(self._vectors.values())
        return [self.load("train"), self.load("test")]

    def load(self, split: str) -> ImageDataset:
        """One split."""
        from tfdml import data
        from tfdml.data.faults import check

        if self.features:
            return self._stored(split)
        dataset = data.load(self.name, self.directory or None, split, **self.options)
        return check(dataset, self.bad_images, "decode" if self.bad_images == "skip" else "headers")

    def _stored(self, split: str) -> ImageDataset:
        """Return a split of the stored embeddings."""
        dataset = self._vectors.get("train" if split == "train" else "test")
        if dataset is None:
            raise UserError(f"has no {split} images: name another --split", features=self.features)
        if split == "query":
            return dataset.queries
        return dataset.gallery if split == "gallery" else dataset


def trained_names(model: str) -> set[str]:
    """Return the names of the classes that an exported model was trained on, by its card; of other
    models none."""
    from tfdml.embeddings.model_card import card_of, served_version

    path = Path(model).expanduser()
    card = card_of(served_version(path) or path) if model else None
    return set(read_json(card).get("trained_on") or []) if card else set()


def trained_classes(model: str, data: DataChoice, names: Iterable[str]) -> list[str]:
    """Return which classes of a data set a model was trained on, as far as its run or its card
    tell: all, where its run is final to the same data.

    Args:
        model: A run folder, or another model.
        data: The data set.
        names: The names of its classes.
    """
    if not (Path(model) / FLAGS_FILE).is_file():
        return sorted(trained_names(model).intersection(names))
    experiment = Experiment.of_run(model)
    trained = experiment.data_name, os.path.abspath(experiment.data_dir)
    if not experiment.final_of or trained != (data.name, os.path.abspath(data.directory)):
        return []
    return sorted(names)


def data_choice(flags: DataFlags) -> DataChoice:
    """Return the data set of the flags, or that of the run folder that they name.

    Raises:
        UserError: Neither names one, or there is no such model.
    """
    model = flags.model
    _check_model(model, flags.unfinished)
    if flags.dataset and flags.features:
        raise UserError("--dataset names images and --features stored embeddings: name one of them")
    if flags.dataset:
        return DataChoice(flags.dataset, flags.data_dir, flags.dataset_options, flags.bad_images)

    stored = Experiment.of_run(model) if (Path(model) / FLAGS_FILE).is_file() else None
    features = flags.features or (stored.features if stored else "")
    # By name, as the file of its training may have moved: to take its training classes for new ones
    # would be worse.
    if features and (
        stored is None or not stored.features or Path(features).stem != stored.data_name
    ):
        return DataChoice(
            Path(features).stem, flags.data_dir, flags.dataset_options, features=features
        )
    if stored is None:
        raise UserError("--dataset or --features is missing: only a run folder knows its own")
    directory, options = (
        flags.data_dir or stored.data_dir,
        flags.dataset_options or stored.dataset_options,
    )
    return DataChoice(
        stored.data_name, directory, options, flags.bad_images, features, trained_on=True
    )


def _check_model(model: str, unfinished: bool) -> None:
    if "://" not in model and not os.path.exists(os.path.expanduser(model or ".")):
        raise UserError("there is no such file or folder", model=model)
    check_ended(model, unfinished)


def check_ended(run: str, unfinished: bool) -> None:
    """Refuse a run that has not ended, unless `unfinished`."""
    from tfdml.embeddings.backends import epochs_missing

    if run and not unfinished and (missing := epochs_missing(run)):
        raise UserError(
            f"{run} has not ended: it has trained {missing}; resume it (tfdml train "
            f"--run_dir={run} --resume), end it "
            "here (add --finish to that), or take its best embedder so far (--unfinished)"
        )


def load_source(flags: ModelFlags) -> EmbeddingBackend:
    """Return the model of the flags, loaded."""
    from tfdml.embeddings.backends import load_backend
    from tfdml.training import workers

    if not flags.model:
        raise UserError("--model is missing")
    load_tensorflow()
    model = os.path.expanduser(flags.model)
    _check_model(model, flags.unfinished)
    if Path(model).suffix == ".keras" or (Path(model) / EMBEDDER_FILE).is_file():
        # So that a pass that was stopped and continued gives the bits of an uninterrupted one.
        workers.one_operation_at_a_time()
    return load_backend(model, truncate_dim=flags.truncate_dim)


def kind_of_gallery(gallery: str | None) -> str:
    """Return what a flag names, as `tfdml.retrieval.kind_of_gallery`, which needs NumPy."""
    from tfdml import retrieval

    return retrieval.kind_of_gallery(gallery or "")
