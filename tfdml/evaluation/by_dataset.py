"""The protocol that a data set asks for: all-to-all, or its queries against its gallery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfdml.evaluation.neighbours import check_embeddings
from tfdml.evaluation.retrieval import evaluate_retrieval

if TYPE_CHECKING:
    from tfdml.data.dataset import ImageDataset


def evaluate_dataset(embeddings: Any, dataset: ImageDataset, **options: Any) -> dict[str, float | int]:
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
    if dataset.is_query is None:
        return evaluate_retrieval(embeddings, dataset.labels, **options)
    embeddings, query = check_embeddings(embeddings), dataset.is_query
    return evaluate_retrieval(
        embeddings[query],
        dataset.labels[query],
        gallery=embeddings[~query],
        gallery_labels=dataset.labels[~query],
        **options,
    )
