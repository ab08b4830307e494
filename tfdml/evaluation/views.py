"""Measures across two views: texts search images and images texts; classes by texts of their
names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation.classification import warn_of_indistinct
from tfdml.evaluation.metrics import find_metric, ks_within, metric_names
from tfdml.evaluation.relevance import Relevance
from tfdml.evaluation.retrieval import evaluate_retrieval
from tfdml.labels import integer_labels
from tfdml.names import CLASS, TEXT, clean
from tfdml.retrieval.exact import check_embeddings, unit_rows

if TYPE_CHECKING:
    from scipy import sparse

    from tfdml.data.dataset import ImageDataset

#: The K of Recall@K across views, where there are as many images and texts.
VIEW_KS = (1, 5, 10)
# The components of a mean of unit vectors below which it is no more than their rounding.
_ROUNDING = 1e-6
_NAMES = ("image_labels", "text_labels")


@dataclasses.dataclass(frozen=True)
class ViewItems:
    """The images and the texts of a data set, each once, and their labels.

    Args:
        rows: (N,) a row of the data set for each image.
        texts: M texts, sorted; of a data set of stored vectors, those of the texts.
        image_labels: The labels of each image.
        text_labels: The labels of each text.
    """

    rows: np.ndarray
    texts: list[Any]
    image_labels: list[np.ndarray]
    text_labels: list[np.ndarray]

    @classmethod
    def of(cls, dataset: ImageDataset) -> ViewItems:
        """Return those of a data set, whose images go by name; without texts, the text is the name
        of the class.

        Example:
            >>> test = tfdml.data.load("glyphs", split="test", texts=True, images_per_class=2)
            >>> items = ViewItems.of(test)
            >>> len(items.rows), len(items.texts), items.texts[0]
            (292, 146, 'CYRILLIC CAPITAL LETTER GHE WITH MIDDLE HOOK')
        """
        dataset = dataset.with_class_names()
        rows, labels = [], []
        for column in (np.array(dataset.names, object), dataset.text_numbers):
            _, first, item = np.unique(column, return_index=True, return_inverse=True)
            pairs = np.unique(np.stack([item, dataset.labels], axis=1), axis=0)
            rows.append(first)
            labels.append(np.split(pairs[:, 1], np.flatnonzero(np.diff(pairs[:, 0])) + 1))
        texts: Any = dataset.tokens if dataset.texts is None else dataset.texts
        return cls(rows[0], list(texts[rows[1]]), *labels)

    def connected(self) -> list[np.ndarray]:
        """Return one label for each image and text, which two have in common where labels connect
        them."""
        sizes = [len(self.rows), len(self.texts)]
        return connected_labels(*_label_sets([self.image_labels, self.text_labels], _NAMES, sizes))


def evaluate_views(
    images: Any,
    texts: Any,
    image_labels: Sequence[Any],
    text_labels: Sequence[Any],
    *,
    ks: Sequence[int] | None = None,
    metrics: Sequence[str] = ("recall", "map"),
    distance: str = "euclidean",
    intervals: str | None = "classes",
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """Measures retrieval across two views: each text searches the images, and each image searches
    the texts.

    An image and a text are right for each other where they have a label in common. A query may have
    several right answers. Every image and every text is given once. A text of images of several
    classes has several labels.

    Args:
        images: (N, d) embeddings of the images.
        texts: (M, d) embeddings of the texts, or of any other view.
        image_labels: N labels, integers, or of each image a sequence of them.
        text_labels: The same M.
        ks: The K of Recall@K; by default those of 1, 5 and 10 that images and texts suffice for.
        metrics: As `evaluate_retrieval`.
        distance: As `evaluate_retrieval`.
        intervals: As `evaluate_retrieval`. Of `"classes"`, images and texts that are connected by
            labels are one class: where each class has one text, the interval of either direction is
            over texts.
        **options: As `evaluate_retrieval`.

    Returns:
        `text_to_image` and `image_to_text`, each as `evaluate_retrieval` returns it, with `chance`:
        each Recall@K of a random order.

    Raises:
        UserError: As `evaluate_retrieval`; not one label or sequence for each image and text; every
            text is right for every image.

    Example:
        >>> images, texts = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), np.eye(2)
        >>> result = evaluate_views(images, texts, [3, 3, 8], [3, 8], ks=[1])
        >>> result["text_to_image"]["recall@1"], result["text_to_image"]["chance"]["recall@1"]
        (1.0, 0.5)
    """
    from scipy.stats import hypergeom

    views = [
        check_embeddings(images, "image embeddings"),
        check_embeddings(texts, "text embeddings"),
    ]
    sets = _label_sets([image_labels, text_labels], _NAMES, [len(view) for view in views])
    connected = connected_labels(*sets)
    result = {}
    for name, query, found in (("text_to_image", 1, 0), ("image_to_text", 0, 1)):
        size, relevance = len(views[found]), Relevance.sets(sets[query], sets[found])
        if (relevance.matches == size).all():
            raise UserError(
                "every text is right for every image: give images and texts of several classes"
            )
        fitting = ks_within(VIEW_KS, size) if ks is None else ks
        measures = evaluate_retrieval(
            views[query],
            connected[query],
            views[found],
            ks=fitting,
            metrics=metrics,
            distance=distance,
            relevance=relevance,
            intervals=intervals,
            **options,
        )
        matches = relevance.matches[relevance.matches > 0]
        depths = [
            find_metric(key)[1]
            for key in metric_names(metrics, fitting)
            if key.startswith("recall@")
        ]
        chance = {
            f"recall@{k}": float(1 - hypergeom.pmf(0, size, matches, k).mean()) for k in depths
        }
        result[name] = measures | {"chance": chance}
    return result


def _label_sets(
    sides: Sequence[Any], names: Sequence[str], sizes: Sequence[int]
) -> list[sparse.csr_array]:
    """Return of each side (N, C) 1 where an item has one of the C labels of all sides."""
    from scipy import sparse

    rows, labels = [], []
    for side, name, size in zip(sides, names, sizes, strict=True):
        lists = [np.atleast_1d(np.asarray(label)) for label in side]
        if len(lists) != size or any(len(of_item) == 0 for of_item in lists):
            raise UserError(
                f"{name} must be {size} labels, or sequences of at least one; got {len(lists)}"
            )
        rows.append(np.repeat(np.arange(size), [len(of_item) for of_item in lists]))
        labels.append(integer_labels(np.concatenate(lists), name))
    values, columns = np.unique(np.concatenate(labels), return_inverse=True)
    parts = np.split(columns, [len(rows[0])])
    matrices = []
    for row, column, size in zip(rows, parts, sizes, strict=True):
        ones = np.ones(len(row), np.int32)
        matrices.append(sparse.csr_array((ones, (row, column)), shape=(size, len(values))))
    return matrices


def connected_labels(images: sparse.csr_array, texts: sparse.csr_array) -> list[np.ndarray]:
    """Return one label for each image and text, which two have in common where labels connect them.

    Args:
        images: (N, C) 1 where an image has a label.
        texts: (M, C) the same of the texts.
    """
    from scipy import sparse

    items = sparse.vstack([images, texts])
    graph = sparse.block_array([[None, items], [items.T, None]])
    labels = sparse.csgraph.connected_components(graph, directed=False)[1]
    return np.split(labels[: items.shape[0]], [images.shape[0]])


def class_embeddings(
    embed_texts: Callable[[list[str]], Any],
    class_names: Sequence[str],
    templates: Sequence[str] = ("{}",),
) -> np.ndarray:
    """Return the vector of each class: the mean of the normalized embeddings of texts with its
    name, normalized.

    Args:
        embed_texts: From a list of texts to their embeddings (T, d).
        class_names: The name of each class.
        templates: Texts with `{}` in the place of the name, such as `"a photo of a {}"` (Radford et
            al., 2021, CLIP).

    Returns:
        (C, d) float32 of length 1; of length 0 where the texts of a class cancel one another.

    Raises:
        UserError: There is no class or no template, a name is empty, or a template has no place for
            it.

    Example:
        >>> def embed_texts(texts):
        ...     return [[1.0, len(text)] for text in texts]
        >>> class_embeddings(embed_texts, ["cat", "zebra"], ["a {}", "a photo of a {}"]).shape
        (2, 2)
    """
    class_names = clean(class_names, CLASS, "class_names")
    templates = clean(templates, TEXT, "templates")
    if not class_names:
        raise UserError("zero-shot classification needs the name of each class")
    if not templates or not all("{}" in template for template in templates):
        raise UserError(
            "a template needs {} in the place of the class's name, such as 'a photo of a {}'"
        )
    texts: list[str] = []
    for name in class_names:
        texts.extend(template.replace("{}", name) for template in templates)
    vectors = unit_rows(check_embeddings(embed_texts(texts), "text embeddings"))
    means = vectors.reshape(len(class_names), len(templates), -1).mean(axis=1)
    # What is left of templates that cancel is rounding, and no direction.
    means[np.abs(means).max(axis=1) < _ROUNDING] = 0.0
    return unit_rows(means)


def evaluate_zero_shot(
    images: Any,
    labels: Any,
    classes: Any,
    *,
    class_names: Sequence[str] | None = None,
    ks: Sequence[int] = (1, 5),
    intervals: str | None = "classes",
) -> dict[str, Any]:
    """Measures classification of images by the nearest text of a class, without training on the
    classes.

    Classes with one vector, and those with a vector of length 0, are counted in a warning.

    Args:
        images: (N, d) embeddings of the images.
        labels: (N,) the row of each image's class in `classes`.
        classes: (C, d) the vector of each class, as `class_embeddings` returns them.
        class_names: The name of each class, for the warnings; by default its row.
        ks: The K of top-K accuracy.
        intervals: As `evaluate_retrieval`.

    Returns:
        `accuracy@K` of each K that there are classes for, `num_images` and `num_classes`, and with
        intervals `intervals`.

    Raises:
        UserError: As `evaluate_retrieval`; a label is no row of `classes`.

    Example:
        >>> evaluate_zero_shot([[1.0, 0.1], [0.2, 1.0]], [0, 1], np.eye(2),
        ...     intervals=None)["accuracy@1"]
        1.0
    """
    classes, labels = check_embeddings(classes, "class embeddings"), integer_labels(labels)
    if labels.size and not (labels.min() >= 0 and labels.max() < len(classes)):
        ends = f"{labels.min()} to {labels.max()}"
        raise UserError(f"labels must be rows of classes, 0 to {len(classes) - 1}; got {ends}")
    rows = list(range(len(classes)))
    # Made distinct, as two classes may have one name.
    names = clean(class_names or (), CLASS, "class_names")
    titles = [f"{name} (row {row})" for row, name in enumerate(names)]
    warn_of_indistinct(classes, np.asarray(titles or rows), "cosine")
    depths = ks_within(ks, len(classes))
    options: dict[str, Any] = {
        "ks": depths,
        "metrics": ["recall"],
        "distance": "cosine",
        "intervals": intervals,
    }
    result = evaluate_retrieval(images, labels, classes, rows, **options)
    renamed = {f"accuracy@{k}": result[f"recall@{k}"] for k in depths}
    if intervals:
        renamed["intervals"] = {f"accuracy@{k}": result["intervals"][f"recall@{k}"] for k in depths}
    return renamed | {"num_images": len(labels), "num_classes": len(classes)}
