"""The flags by which commands name a model and the images that it embeds; what a gallery is."""

import dataclasses
import functools
import os
from pathlib import Path

from tfdml import data
from tfdml.cli.command_line import Flags
from tfdml.data.dataset import ImageDataset, check
from tfdml.effects import Effect
from tfdml.embeddings.backends import EmbeddingBackend, epochs_missing, load_backend
from tfdml.embeddings.files import holds_embeddings
from tfdml.errors import UserError
from tfdml.expressions import parse_arguments
from tfdml.retrieval import is_gallery
from tfdml.training import RunFolder, workers
from tfdml.training.images import vector_splits

_MODEL = (
    "What embeds: a run folder or a .keras file; a SavedModel, or a folder of its versions, of which the newest is "
    "taken; or a .tflite or .onnx file, whose view is in its export's model_card.json."
)

DISTANCES = ["euclidean", "sqeuclidean", "cosine", "dot"]
UNFINISHED = "Take the best embedder so far of a run that has not ended."


def define_model_flags(values: Flags, model: Effect | None = None, embeds: Effect | None = None) -> None:
    """Define --model, with its effect, and the flags that say how it embeds images, with theirs."""
    values.define("model", "", _MODEL, effect=model)
    values.define("unfinished", False, UNFINISHED)
    values.define("batch_size", 100, "Images per batch.", lower_bound=1, effect=embeds)
    text = "Keep the first N dimensions, scaled to length 1; 0: all."
    values.define("truncate_dim", 0, text, lower_bound=0, effect=embeds)


def define_distance(values: Flags, effect: Effect | None = None) -> None:
    """Define --distance."""
    values.define("distance", "euclidean", "What near means.", DISTANCES, effect=effect)


def define_data_flags(values: Flags, dataset: Effect | None = None, images: Effect | None = None) -> None:
    """Define --dataset and --features, with their effect, and the flags that say how images are read, with theirs."""
    values.define("dataset", "", "Data set, as in tfdml train; for a run folder, its own.", effect=dataset)
    text = "Stored embeddings, for a head; without roles, all are of the test split."
    values.define("features", "", text, effect=dataset)
    values.define("data_dir", "", "Where the unpacked data set lies.", effect=images)
    values.define("dataset_options", "", "Options of the data set, as in tfdml train.", effect=images)
    text = "Images that cannot be decoded: skip decodes all first."
    values.define("bad_images", "error", text, ["error", "skip"], effect=images)


@dataclasses.dataclass(frozen=True)
class DataChoice:
    """Which data set the flags mean.

    Args:
        name: Its name.
        directory: Where it lies; empty: nowhere.
        options: As in `--dataset_options`.
        bad_images: `error`, or `skip` to leave out the images that cannot be decoded, of which each is tried.
        features: Stored embeddings in the place of images.
        trained_on: Whether a head was trained on them, and they have the splits of its training.
    """

    name: str
    directory: str
    options: str
    bad_images: str = "error"
    features: str = ""
    trained_on: bool = False

    @functools.cached_property
    def _vectors(self) -> dict[str, ImageDataset]:
        arguments = parse_arguments(self.options, "--dataset_options")
        return vector_splits(
            self.features, self.directory, **({} if self.trained_on else {"test_fraction": None}) | arguments
        )

    def parts(self, split: str) -> list[ImageDataset]:
        """Return a split or, of all images, those for training and for testing."""
        if split != "all":
            return [self.load(split)]
        return list(self._vectors.values()) if self.features else [self.load("train"), self.load("test")]

    def load(self, split: str) -> ImageDataset:
        """One split."""
        if self.features:
            side = self._vectors.get("train" if split == "train" else "test")
            if side is None:
                raise UserError(f"--features={self.features} has no {split} images: name another --split")
            return side if split in ("train", "test") else side.queries if split == "query" else side.gallery
        arguments = parse_arguments(self.options, "--dataset_options")
        dataset = data.load(self.name, self.directory or None, split, **arguments)
        return check(dataset, self.bad_images, "decode" if self.bad_images == "skip" else "headers")


def data_choice(values: Flags, model: str | None = None) -> DataChoice:
    """Return the data set of the flags, or that of a run folder.

    Args:
        values: The flags.
        model: The run folder, or what else embeds; None: that of `--model`.

    Raises:
        UserError: Neither names one, or there is no such model.
    """
    model = values.model if model is None else model
    _check_model(model, values.unfinished)
    if values.dataset and values.features:
        raise UserError("--dataset names images and --features stored embeddings: name one of them")
    if values.dataset:
        return DataChoice(values.dataset, values.data_dir, values.dataset_options, values.bad_images)

    stored = RunFolder(model).load_experiment() if (Path(model) / "flags.txt").is_file() else None
    features = values.features or (stored.features if stored else "")
    # By name, as the file of its training may have moved: to take its training classes for new ones would be worse.
    if features and (stored is None or not stored.features or Path(features).stem != stored.data_name):
        return DataChoice(Path(features).stem, values.data_dir, values.dataset_options, features=features)
    if stored is None:
        raise UserError("--dataset or --features is missing: only a run folder knows its own")
    directory, options = values.data_dir or stored.data_dir, values.dataset_options or stored.dataset_options
    return DataChoice(stored.data_name, directory, options, values.bad_images, features, trained_on=True)


def _check_model(model: str, unfinished: bool) -> None:
    if "://" not in model and not os.path.exists(os.path.expanduser(model or ".")):
        raise UserError(f"--model={model}: there is no such file or folder")
    check_ended(model, unfinished)


def check_ended(run: str, unfinished: bool) -> None:
    """Refuse a run that has not ended, unless `unfinished`."""
    if run and not unfinished and (missing := epochs_missing(run)):
        raise UserError(
            f"{run} has not ended: it has trained {missing}; resume it (tfdml train --run_dir={run} --resume), end it "
            "here (add --finish to that), or take its best embedder so far (--unfinished)"
        )


def load_source(values: Flags, model: str | None = None) -> EmbeddingBackend:
    """Return the model of the flags, or another one, loaded."""
    model = values.model if model is None else model
    _check_model(model, values.unfinished)
    if Path(model).suffix == ".keras" or (Path(model) / "embedder.keras").is_file():
        # So that a pass that was stopped and continued gives the bits of an uninterrupted one.
        workers.one_operation_at_a_time()
    return load_backend(model, truncate_dim=values.truncate_dim)


def kind_of_gallery(gallery: str) -> str:
    """Return what a gallery is: a `database`, stored `embeddings`, or a `retriever`."""
    if is_gallery(gallery):
        return "database"
    gallery = os.path.expanduser(gallery)
    return "retriever" if os.path.isdir(gallery) and not holds_embeddings(gallery) else "embeddings"
