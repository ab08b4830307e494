"""Some embeddings after each epoch, for TensorBoard's projector."""

from __future__ import annotations

from pathlib import Path

from tfdml.data.dataset import ImageDataset
from tfdml.data.pipeline import evaluation_batches
from tfdml.data.transforms import EvaluationTransform
from tfdml.evaluation import embed
from tfdml.models import Embedder
from tfdml.training.watching.pictures import PROJECTOR_MOST, write_projector


class Projector:
    """Writes the embeddings of the same images whenever it is asked to, over those before.

    Args:
        images: What is drawn from: equally many of every class as far as there are.
        count: How many; at most 28,900, whose thumbnails fill the largest picture that TensorBoard takes.
        transform: The evaluation view.
        batch_size: Of embedding.
        folder: TensorBoard's folder of the run.
    """

    def __init__(self, images: ImageDataset, count: int, transform: EvaluationTransform, batch_size: int, folder: Path):
        self._images = images.take(images.balanced_rows(min(count, PROJECTOR_MOST)))
        self._batches = evaluation_batches(self._images, transform, batch_size)
        self._folder = folder

    def write(self, embedder: Embedder) -> None:
        """Embed the images and write what the projector shows."""
        embeddings, images = embed(embedder, self._batches), self._images
        write_projector(self._folder, embeddings, images.labels, images.class_names, images.images.picture)
