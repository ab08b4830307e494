"""The protocol that a data set asks for: all-to-all, or its queries against its gallery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation.retrieval import evaluate_retrieval
from tfdml.evaluation.search.exact import check_embeddings

if TYPE_CHECKING:
    from tfdml.data.dataset import ImageDataset


def dataset_roles(dataset: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Which images are queries, and which are searched.

    Args:
        dataset: What has `labels` (N,), and `is_query` (N,) bool or None.

    Returns:
        The rows of the queries and those of the gallery; without roles all rows, and None: each against all others.

    Example:
        >>> dataset_roles(dataset)[1] is None
        True
    """
    if dataset.is_query is None:
        return np.arange(len(dataset.labels)), None
    return np.flatnonzero(dataset.is_query), np.flatnonzero(~dataset.is_query)


def dataset_protocol(embeddings: Any, dataset: ImageDataset) -> dict[str, Any]:
    """The arguments by which `evaluate_retrieval` and `retrieval_per_query` measure a data set.

    Args:
        embeddings: (N, d), one row per image of `dataset`, in its order.
        dataset: With query and gallery roles (In-Shop) queries are searched in the gallery, else all in all.

    Returns:
        `embeddings` and `labels`, and with roles `gallery` and `gallery_labels`.

    Raises:
        UserError: Embeddings that are empty or not finite; not as many as images.

    Example:
        >>> retrieval_per_query(**dataset_protocol(embeddings, dataset), metrics=["map@r"])  # doctest: +SKIP
    """
    queries, gallery = dataset_roles(dataset)
    if gallery is None:
        return {"embeddings": embeddings, "labels": dataset.labels}
    embeddings = check_embeddings(embeddings)
    if len(embeddings) != len(dataset.labels):
        raise UserError(f"{len(embeddings)} embeddings for the {len(dataset.labels)} images of {dataset.name}")
    return {
        "embeddings": embeddings[queries],
        "labels": dataset.labels[queries],
        "gallery": embeddings[gallery],
        "gallery_labels": dataset.labels[gallery],
    }


def evaluate_dataset(embeddings: Any, dataset: ImageDataset, **options: Any) -> dict[str, Any]:
    """Measure the embeddings of a data set by its own protocol.

    Args:
        embeddings: (N, d), one row per image of `dataset`, in its order.
        dataset: With query and gallery roles (In-Shop) queries are searched in the gallery, else all in all.
        **options: Further arguments of `evaluate_retrieval`.

    Raises:
        UserError: As `evaluate_retrieval`.

    Example:
        >>> evaluate_dataset(embeddings, dataset, ks=(1, 10))["recall@1"]  # doctest: +SKIP
    """
    return evaluate_retrieval(**dataset_protocol(embeddings, dataset), **options)
