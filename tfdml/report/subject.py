"""What a page is about: the images of a data set by their roles, and embeddings that go with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation.per_query import dataset_roles
from tfdml.evaluation.retrieval import dataset_protocol
from tfdml.report.thumbnails import Pictures
from tfdml.retrieval.exact import check_embeddings

if TYPE_CHECKING:  # tfdml.data needs TensorFlow, which measuring does not
    from tfdml.data.dataset import ImageDataset


class Subject:
    """A data set as pages show it.

    Args:
        dataset: The images; with query and gallery roles queries are searched in the gallery, else all in all.

    Attributes:
        pictures: All images.
        queries: Those that are asked for.
        gallery: Those that are searched; without roles the same.
    """

    def __init__(self, dataset: ImageDataset):
        self.dataset = dataset
        self.pictures = self.queries = self.gallery = Pictures(dataset)
        queries, gallery = dataset_roles(dataset)
        if gallery is not None:
            self.queries, self.gallery = (Pictures(dataset, rows) for rows in (queries, gallery))

    def checked(self, embeddings: Any, what: str = "embeddings") -> np.ndarray:
        """(N, d) embeddings, one row per image.

        Raises:
            UserError: They are empty or not finite, or not as many as images; `what` says which.
        """
        embeddings = check_embeddings(embeddings, what)
        if len(embeddings) != len(self.dataset):
            raise UserError(f"{what}: {len(embeddings)} rows for the {len(self.dataset)} images of {self.dataset.name}")
        return embeddings

    def protocol(self, embeddings: np.ndarray) -> dict[str, Any]:
        """Embeddings and labels as `retrieve` and `rank_queries` take them."""
        return dataset_protocol(embeddings, self.dataset)
