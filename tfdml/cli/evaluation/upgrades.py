"""An upgrade: queries of a new model in the gallery of an old one, next to each by itself."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tfdml.cli.evaluation.splits import Split, same_classes
from tfdml.errors import UserError, counted

if TYPE_CHECKING:
    import numpy as np

    from tfdml.embeddings.files import StoredEmbeddings

OLD = "old-old"
ACROSS = "new-old"
NEW = "new-new"
#: What each search is, in words.
SEARCHES = {
    OLD: "old queries in the old gallery",
    ACROSS: "new queries in the old gallery",
    NEW: "new queries in a new gallery",
}


@dataclasses.dataclass(frozen=True)
class Upgrade:
    """The searches of the same queries by an old and by a new model.

    The queries are the images of the new model that the old gallery has, by name. Each leaves out
    its own image, but where the images are divided into queries and gallery.

    Args:
        labels: (N,) class ids of the queries.
        searches: The arguments of `evaluate_retrieval` and `calibrate` for each of `SEARCHES`;
            without `NEW` where the new model lacks images of the gallery.
        relevance: Further arguments of `evaluate_retrieval`.
        left_out: How many images of the new model the gallery does not have.
        trained: How many of the classes the old model was trained on.
    """

    labels: np.ndarray
    searches: dict[str, dict[str, Any]]
    relevance: dict[str, Any]
    left_out: int
    trained: int

    @classmethod
    def of(cls, split: Split) -> Upgrade:
        """Return the searches of a split, the new one, in the gallery of its flags.

        Raises:
            UserError: The images have no names, or none in common; the gallery has no classes, or
                other ones; the models differ in their dimensions; or a query has more right
                answers than its class.
        """
        import numpy as np

        assert split.old is not None
        old = split.old.split(split.flags.split)
        _require_classes(old, split)
        new_rows = _rows_in(split, old)
        is_there = new_rows >= 0
        queries = gallery = np.arange(len(old))
        if old.is_query is not None:
            queries = np.flatnonzero(old.is_query)
            gallery = np.flatnonzero(~old.is_query)
        queries = queries[is_there[queries]]
        if not len(queries):
            raise UserError("has none of its queries in --model", gallery=split.flags.gallery)
        searched = old.embeddings if old.is_query is None else old.embeddings[gallery]
        vectors = {OLD: (old.embeddings[queries], searched)}
        vectors[ACROSS] = split.embeddings[new_rows[queries]], searched
        if is_there[gallery].all():
            vectors[NEW] = vectors[ACROSS][0], split.embeddings[new_rows[gallery]]
        labels = old.labels[queries]
        # Without roles the gallery is all images in their order.
        own_rows = queries if old.is_query is None else None
        sides = {"labels": labels, "gallery_labels": old.labels[gallery], "own_rows": own_rows}
        searches = {}
        for name, pair in vectors.items():
            searches[name] = {"embeddings": pair[0], "gallery": pair[1], **sides}
        relevance = _relevance(old, queries, gallery)
        left_out = len(split.images) - int(np.count_nonzero(is_there))
        return cls(labels, searches, relevance, left_out, _trained_classes(old, labels))

    def sizes(self) -> str:
        """Return how many queries search how many images, and what is left out."""
        search = self.searches[ACROSS]
        text = f"{counted(len(self.labels), 'query')} in {counted(len(search['gallery']), 'image')}"
        if search["own_rows"] is not None:
            text += ", each without its own"
        if self.left_out:
            text += f"; left out: {counted(self.left_out, 'image')} of --model, not in --gallery"
        if NEW not in self.searches:
            text += f"; no {NEW}: --model lacks images of --gallery"
        return text


def _require_classes(old: StoredEmbeddings, split: Split) -> None:
    """Refuse a gallery that the images of a split cannot be compared with."""
    flags = split.flags
    if old.labels is None:
        raise UserError("has no classes: add the class of each embedding", gallery=flags.gallery)
    if split.items:
        raise UserError(
            "measures images and texts: embed the images alone, and name these embeddings",
            model=flags.model,
        )
    for name in ("protocol", "label_rows", "pairs"):
        if getattr(split.images, name, None) is not None:
            raise UserError(
                "measures images with right answers of their own, which a gallery of classes does "
                "not have",
                model=flags.model,
            )
    if split.images.groups is not None and old.groups is None:
        raise UserError(
            "has no column group, which the images of --model have", gallery=flags.gallery
        )


def _rows_by_name(names: tuple[str, ...], argument: str) -> dict[str, int]:
    """Return the row of each image."""
    if names == tuple(map(str, range(len(names)))):
        raise UserError(
            "has no names of images, by which both are compared: add the column path",
            **{argument: ...},
        )
    rows = {name: row for row, name in enumerate(names)}
    if len(rows) < len(names):
        raise UserError(
            f"has {counted(len(names) - len(rows), 'image')} whose names are there already",
            **{argument: ...},
        )
    return rows


def _rows_in(split: Split, old: StoredEmbeddings) -> np.ndarray:
    """Return the row of each image of a gallery in a split, -1 where it is not there.

    Raises:
        UserError: None is there, their classes are others, or their vectors of another dimension.
    """
    import numpy as np

    path = split.flags.gallery
    _rows_by_name(old.names, "gallery")
    row_of = _rows_by_name(split.names, "model")
    rows = np.array([row_of.get(name, -1) for name in old.names])
    is_present = rows >= 0
    if not is_present.any():
        names = f"such as {split.names[0]}, and has others, such as {old.names[0]}"
        raise UserError(f"has none of the images of --model by name, {names}", gallery=path)
    assert old.labels is not None
    if not same_classes(old.labels[is_present], split.images.labels[rows[is_present]]):
        raise UserError("has the same images in other classes than --model", gallery=path)
    sizes = old.embeddings.shape[1], split.embeddings.shape[1]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"has {sizes[0]} dimensions, and --model {sizes[1]}: embed by one of as many",
            gallery=path,
        )
    return rows


def _trained_classes(old: StoredEmbeddings, labels: np.ndarray) -> int:
    """Return how many of the classes the model of a gallery was trained on, as far as it tells."""
    from tfdml.embeddings.files import class_of_each

    names = set(class_of_each(labels, old.class_names).tolist())
    return len(names.intersection(old.manifest.get("trained_on", ())))


def _relevance(old: StoredEmbeddings, queries: np.ndarray, gallery: np.ndarray) -> dict[str, Any]:
    """Return what `evaluate_retrieval` takes of groups, whose images are ignored."""
    from tfdml.evaluation import Relevance

    if old.groups is None:
        return {}
    relevance = Relevance.classes(
        old.labels[queries],
        old.labels[gallery],
        not_same=old.groups[queries],
        gallery_not_same=old.groups[gallery],
    )
    return {"relevance": relevance}
