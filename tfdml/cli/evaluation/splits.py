"""A split of a data set with its embeddings."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdml.cli.evaluation.flags import EvaluateFlags
from tfdml.cli.model_flags import data_choice, kind_of_gallery, load_source, trained_classes
from tfdml.errors import UserError
from tfdml.io.files import printable

if TYPE_CHECKING:
    import numpy as np

    from tfdml.data.dataset import ImageDataset
    from tfdml.embeddings.backends import EmbeddingBackend
    from tfdml.embeddings.files import StoredEmbeddings


class Split:
    """A split of a data set, with its embeddings.

    Args:
        flags: The flags.

    Attributes:
        images: The images; or embeddings that have the labels, roles and groups.
        selection: The data set, from which other splits are read; None where only embeddings are
            there.
        stored: The stored embeddings, of all splits; None for a model.
        items: Of a model of images and texts: both, each once; None for images alone.
        old: The gallery of an older model that the images search; None: they search one another.
        name: The data set, or where the embeddings are.

    Raises:
        UserError: The flags do not go together, or the embeddings with the data set.
    """

    def __init__(self, flags: EvaluateFlags):
        from tfdml.embeddings.files import holds_embeddings, read_embeddings
        from tfdml.evaluation.views import ViewItems

        self.flags, self.items = flags, None
        self.old = _gallery(flags.gallery) if flags.gallery else None
        self.stored = read_embeddings(flags.model) if holds_embeddings(flags.model) else None
        if self.stored and flags.report and not flags.dataset:
            raise UserError(
                "--report shows images: name their --dataset and --data_dir next to the embeddings"
            )
        needs_dataset = bool(flags.dataset) or self.stored is None
        self.selection = data_choice(flags) if needs_dataset else None
        self.images: Any = self.selection.load(flags.split) if self.selection else None
        self.name = self.selection.name if self.selection else Path(flags.model).name
        if self.stored is not None:
            part = self.part = self.stored.split(flags.split)
            if self.images is not None:
                _check_same_images(part, self.images)
            elif part.labels is None:
                raise UserError(
                    f"{flags.model} has no labels: add the class of each embedding, or name a "
                    "--dataset"
                )
            self.images = part if self.images is None else self.images
            self.name = part.manifest.get("dataset", {}).get("name") or self.name
        elif self.images is not None and self.source.embeds_texts:
            self.items = ViewItems.of(self.images)
            self.images = self.images.take(self.items.rows)
            for flag in ("generalization", "report"):
                if getattr(flags, flag):
                    raise UserError(
                        f"--{flag} measures images alone, and {flags.model} is a model of images "
                        "and texts"
                    )

    @functools.cached_property
    def source(self) -> EmbeddingBackend:
        """The model."""
        return load_source(self.flags)

    @property
    def names(self) -> tuple[str, ...]:
        """What each image is called, as `tfdml embed` calls it."""
        from tfdml.embeddings.files import ImageTable

        if self.stored is not None:
            return self.part.names
        assert self.selection is not None  # there are no stored embeddings
        return ImageTable.of([self.images], os.path.expanduser(self.selection.directory)).names

    @property
    def model(self) -> str:
        """The fingerprint of the model; empty where it is not known."""
        return self.source.fingerprint() if self.stored is None else self.stored.model

    def trained_classes(self) -> int:
        """Return how many of the classes the model was trained on, as far as its run, its card or
        the stored embeddings tell."""
        if self.flags.split == "train":
            return 0
        labels = self.images.labels
        names = {self.images.class_names.get(label, str(label)) for label in set(labels.tolist())}
        if self.stored is not None:
            return len(names.intersection(self.stored.manifest.get("trained_on", ())))
        assert self.selection is not None  # there are no stored embeddings
        return len(trained_classes(self.flags.model, self.selection, names))

    @functools.cached_property
    def embeddings(self) -> np.ndarray:
        """(N, d) those of the images."""
        if self.stored is not None:
            return self.part.embeddings
        return self.source.embed(self.images, self.flags.batch_size)

    @functools.cached_property
    def texts(self) -> np.ndarray:
        """(M, d) those of the texts."""
        assert self.items is not None
        return self.source.embed_texts(self.items.texts)


def _gallery(path: str) -> StoredEmbeddings:
    """Return the stored embeddings that a flag names as the gallery of an older model."""
    from tfdml.embeddings.files import read_embeddings

    path = os.path.expanduser(path)
    if kind_of_gallery(path) != "embeddings":
        raise UserError(
            "holds no stored embeddings: name those of the older model; another gallery goes with "
            "--task=classification, --strangers and --target",
            gallery=printable(path),
        )
    return read_embeddings(path)


def same_classes(labels: np.ndarray, others: np.ndarray) -> bool:
    """Whether the same images belong together, by class ids that may be numbered in two ways."""
    import numpy as np

    pairs = np.unique(np.stack([labels, others]), axis=1).shape[1]
    return pairs == len(np.unique(labels)) == len(np.unique(others))


def _check_same_images(part: StoredEmbeddings, dataset: ImageDataset) -> None:
    """Refuse embeddings of another number of images or, as far as labels show it, of others."""
    what = f"{dataset.name} ({dataset.split})"
    if len(part) != len(dataset):
        raise UserError(
            f"{part.source} holds {len(part):,} embeddings, but {what} has {len(dataset):,} images"
        )
    labels = dataset.labels if part.labels is None else part.labels
    if not same_classes(labels, dataset.labels):
        raise UserError(
            f"{part.source} holds embeddings of other classes than {what}, or of its images in "
            "other order"
        )
