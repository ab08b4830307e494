"""`Index`: images embedded by a Keras model, to search and to classify by."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfdml.embeddings.backends import load_keras_model
from tfdml.embeddings.compute import embed, slices
from tfdml.embeddings.files import (
    check_same_model,
    class_of_each,
    read_embeddings,
    table_of,
    write_file,
)
from tfdml.embeddings.model_card import fingerprint
from tfdml.errors import UserError, check_positive
from tfdml.evaluation.calibration import Calibration, calibrate, stored_calibration
from tfdml.evaluation.classification import KNNClassifier, Predictions
from tfdml.evaluation.relevance import ids_or_names, joined_labels
from tfdml.io.files import Kinds, partial_folder, read_json, write_json
from tfdml.names import ID, clean
from tfdml.results import RetrievalResults
from tfdml.retrieval.exact import check_embeddings
from tfdml.retrieval.galleries import Neighbors
from tfdml.retrieval.identities import Identities, check_rule

_EMBEDDINGS = "embeddings.parquet"
_MODEL = "model.keras"
_ABOUT = "index.json"


class Index:
    """Embeds images with a model, and finds and classifies others by them.

    The search is exact. For galleries that outgrow the memory, write embeddings with `tfdml embed`
    and put them into a database with `tfdml index`.

    Args:
        model: Any `keras.Model` or callable from images to (B, d) embeddings, such as a
            `tfdml.models.Embedder`.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`.
        batch_size: Images that are embedded at once.
        per_class: What stands for a class, in `search`, `calibrate` and `classify`: `nearest` (each
            image), `mean` or `max_of_means`, see `tfdml.retrieval.Identities`.

    Raises:
        UserError: There is no such rule, or the batch size is below 1.

    Example:
        >>> index = tfdml.Index(model)
        >>> index.add(train.images.pixels(), train.labels, class_names=train.class_names)
        >>> queries = test.images.pixels()[:2]
        >>> index.search(queries, k=3).column("rank").tolist()
        [1, 2, 3, 1, 2, 3]
        >>> index.classify(queries).labels.shape
        (2,)
        >>> index.save("index")
        >>> len(tfdml.Index.load("index")) == len(index)
        True
    """

    def __init__(
        self,
        model: Any,
        *,
        distance: str = "euclidean",
        batch_size: int = 100,
        per_class: str = "nearest",
    ):
        check_positive(batch_size=batch_size)
        check_rule(per_class)
        self.model = model
        self.per_class = per_class
        self.distance = distance
        self.batch_size = batch_size
        self.embeddings: np.ndarray | None = None
        self.labels: np.ndarray | None = None
        self.ids: list[str] = []
        self.calibration: Calibration | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def embed(self, x: Any) -> np.ndarray:
        """Return the embeddings (N, d) of images: an array (N, ...), or batches of them."""
        return embed(self.model, slices(x, self.batch_size) if hasattr(x, "shape") else x)

    def add(
        self,
        x: Any,
        y: Any = None,
        ids: Sequence[str] | None = None,
        *,
        class_names: Mapping[int, str] | None = None,
    ) -> None:
        """Add images, of known or of new classes.

        Args:
            x: (N, ...) images, or batches of them.
            y: (N,) names of classes, or class ids (integers), which mean the same in every call;
                with all images, or with none.
            ids: (N,) what the images are called; their numbers by default.
            class_names: Names of the class ids, such as those of a data set. The index keeps the
                names.

        Raises:
            UserError: The embeddings are not finite or of another dimension, or there is not one
                label and id for each.
        """
        embeddings = check_embeddings(self.embed(x))
        labels = None if y is None else ids_or_names(y, len(embeddings))
        if labels is not None and class_names is not None:
            named = class_of_each(labels, class_names)
            labels = ids_or_names(named, len(embeddings), "class_names")
        rows = range(len(self), len(self) + len(embeddings))
        ids = clean(rows if ids is None else ids, ID, "ids")
        if len(ids) != len(embeddings):
            raise UserError(
                f"must have one value for each of the {len(embeddings)} images; it has {len(ids)}",
                ids=...,
            )
        if len({*self.ids, *ids}) < len(self) + len(ids):
            raise UserError("must differ from one another and from those in the index", ids=...)
        if self.embeddings is not None:
            if (labels is None) != (self.labels is None):
                raise UserError("give y with all images of an index, or with none")
            if embeddings.shape[1] != self.embeddings.shape[1]:
                sizes = (
                    f"{embeddings.shape[1]} dimensions, the index has {self.embeddings.shape[1]}"
                )
                raise UserError(f"the model gives {sizes}")
            embeddings = np.concatenate([self.embeddings, embeddings])
            if labels is not None and self.labels is not None:
                labels = joined_labels(self.labels, labels)
        self.embeddings = embeddings
        self.labels = labels
        self.ids = [*self.ids, *ids]

    def search(self, x: Any, k: int = 10) -> RetrievalResults:
        """Return the k nearest images of each query, or by another rule than `nearest` the k
        nearest classes.

        Args:
            x: (Q, ...) images, or batches of them.
            k: How many; all, where there are fewer.

        Raises:
            UserError: The index is empty, or has no labels where classes are searched.
        """
        if self.per_class != "nearest":
            return self._search_classes(self.embed(x), k)
        gallery = self._filled()
        return RetrievalResults.search(
            self.embed(x),
            gallery=gallery,
            gallery_labels=self.labels,
            gallery_ids=self.ids,
            k=k,
            distance=self.distance,
        )

    def _search_classes(self, queries: np.ndarray, k: int) -> RetrievalResults:
        gallery, labels = self._labeled()
        classes, numbers = np.unique(labels, return_inverse=True)
        identities = Identities(gallery, numbers, self.per_class, self.distance)
        near, distances = identities.search(queries, min(k, len(classes)))
        names = np.array(list(map(str, classes)), object)[near]
        neighbors = Neighbors(names, distances, {"class": names})
        return RetrievalResults.of_neighbors(list(map(str, range(len(queries)))), neighbors)

    def calibrate(
        self, x: Any = None, y: Any = None, *, fpir: float = 0.01, unknown: Any = None
    ) -> Calibration:
        """Return the threshold within which at most a share of the queries of unknown classes finds
        anything.

        Set `calibration` to the result, and calibrate again when the index has grown.

        Args:
            x: (N, ...) images of known and of unknown classes that the model was not trained on;
                None: the images of the index, which must then be of such classes, and each of which
                searches it without its own class.
            y: (N,) their class ids or names, as those of the index.
            fpir: The share, see `tfdml.evaluation.calibrate`.
            unknown: (N,) bool, which of them stand for unknown classes; None: those of classes that
                the index does not have.

        Raises:
            UserError: The index is empty or has no labels, or the images cannot show the rate.
        """
        gallery, labels = self._labeled()
        model = fingerprint(self.model) if isinstance(self.model, keras.Model) else ""
        rule: dict[str, Any] = {"distance": self.distance, "per_class": self.per_class}
        if x is None:
            calibration = calibrate(gallery, labels, fpir=fpir, **rule)
        else:
            calibration = calibrate(
                self.embed(x),
                y,
                fpir=fpir,
                gallery=gallery,
                gallery_labels=labels,
                unknown=unknown,
                **rule,
            )
        return calibration.measured_on(model=model)

    def classify(self, x: Any, k: int = 5) -> Predictions:
        """Return the class of each image by a vote of its k nearest; "unknown" beyond the
        calibrated threshold.

        Args:
            x: (Q, ...) images, or batches of them.
            k: How many images vote; by the means it is the nearest class.

        Raises:
            UserError: The index is empty or has no labels, or the threshold is of another rule.
        """
        classifier = KNNClassifier(
            *self._labeled(),
            k=k,
            distance=self.distance,
            per_class=self.per_class,
            threshold=self.calibration,
        )
        return classifier.classify(self.embed(x))

    def _filled(self) -> np.ndarray:
        if self.embeddings is None:
            raise UserError("the index is empty: add images first")
        return self.embeddings

    def _labeled(self) -> tuple[np.ndarray, np.ndarray]:
        gallery = self._filled()
        if self.labels is None:
            raise UserError("the images of this index have no labels: give y to add")
        return gallery, self.labels

    def save(self, folder: str | os.PathLike) -> None:
        """Write the index, and its model if it is a `keras.Model`, into a new folder, atomically.

        `embeddings.parquet` in it is read by `tfdml evaluate` and `tfdml index`, too.

        Raises:
            UserError: The folder exists, or the index is empty.
        """
        gallery, folder = self._filled(), Path(folder)
        if folder.exists():
            raise UserError(f"{folder} exists: choose another folder, or remove it")
        folder.parent.mkdir(parents=True, exist_ok=True)
        images: dict[str, Any] = {"id": range(len(self)), "path": self.ids, "label": self.labels}
        if self.labels is not None and self.labels.dtype.kind not in "iu":
            images["class"] = self.labels.tolist()
            images["label"] = np.unique(images["class"], return_inverse=True)[1]
        about = {
            "distance": self.distance,
            "batch_size": self.batch_size,
            "per_class": self.per_class,
        }
        about["model"] = fingerprint(self.model) if isinstance(self.model, keras.Model) else ""
        with partial_folder(folder.parent) as partial:
            write_file(partial / _EMBEDDINGS, table_of(images, gallery))
            if isinstance(self.model, keras.Model):
                self.model.save(partial / _MODEL)
            write_json(
                partial / _ABOUT,
                about | {"calibration": self.calibration and self.calibration.to_dict()},
            )
            os.rename(partial, folder)

    @classmethod
    def load(cls, folder: str | os.PathLike, model: Any = None) -> Index:
        """Read an index that `save` wrote.

        Args:
            folder: Its folder.
            model: Embeds further images; by default the model that was saved with the index.

        Raises:
            UserError: The folder holds no index, neither it nor you give a model, or the model is
                another one.
        """
        folder = Path(folder)
        kinds: Kinds = {"distance": str, "batch_size": int, "per_class": str, "model": str}
        about = read_json(folder / _ABOUT, kinds)
        if model is None:
            if not (folder / _MODEL).is_file():
                raise UserError(f"{folder} holds no model: give the one that embedded its images")
            model = load_keras_model(folder / _MODEL)
        check_same_model(
            about["model"],
            fingerprint(model) if isinstance(model, keras.Model) else "",
            f"{folder} and model",
        )
        index = cls(
            model,
            distance=about["distance"],
            batch_size=about["batch_size"],
            per_class=about["per_class"],
        )
        stored = read_embeddings(folder / _EMBEDDINGS)
        index.embeddings, index.ids = stored.embeddings, list(stored.names)
        index.labels = stored.labels
        if stored.classes is not None and stored.class_names:
            index.labels = stored.classes
        index.calibration = stored_calibration(about, folder / _ABOUT)
        return index
