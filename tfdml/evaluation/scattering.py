"""How far deep features scatter: embeddings from a part of the feature map's positions (HORDE's figure 1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfdml.errors import UserError
from tfdml.evaluation.per_query import check_labels
from tfdml.evaluation.retrieval import evaluate_retrieval

# Of the positions of the feature map, as in the figure.
SIXTH = 1 / 6


@dataclasses.dataclass(frozen=True)
class PartialEmbeddings:
    """Embeddings from parts of the feature map, and how the positions scatter.

    Args:
        whole: (N, d) float32, from all positions: the embedder's own.
        parts: For each share, (N, d) float32 from so many positions.
        shares: The shares asked for.
        positions: How many positions each share is.
        map_positions: How many positions the feature map has.
        local_cosine: (N,) float32, the mean cosine between an image's embedding and those of its single positions.
        feature_scatter: (N,) float32, the part of the deep features' mean square that lies off their mean,
            1 - |mean of x|^2 / mean of |x|^2: 0 where all positions agree, towards 1 where they cancel.
    """

    whole: np.ndarray
    parts: list[np.ndarray]
    shares: list[float]
    positions: list[int]
    map_positions: int
    local_cosine: np.ndarray
    feature_scatter: np.ndarray

    def cosines(self, index: int = 0) -> np.ndarray:
        """(N,) the cosine between each image's embedding from the share `index` and that from all positions."""
        return np.einsum("nd,nd->n", self.parts[index], self.whole)


def partial_embeddings(
    embedder: Any,
    batches: Iterable[Any],
    shares: Sequence[float] = (SIXTH,),
    *,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> PartialEmbeddings:
    """Embed every image from a random part of the positions of its feature map.

        positions S drawn from the map -> pooling over S -> dense -> L2

    as the embedder does from all of them. The paper takes a sixth of the deep features; it does not say whether the
    same positions of every image. Here they are drawn for each image, without replacement, by the seed and the
    image's place in the order, whatever the batches: as queries and as gallery images alike. Larger shares contain
    smaller ones.

    For a `tfdml.models.Embedder` or `AttentionEnsemble` (all heads lose the same positions), or a model that has the
    same `represent`, `representation_shapes`, `pool`, `dense` and `normalize`: a feature map, global pooling, one dense
    layer. Others, such as an exported model or `MomentEmbedder`, offer no map to take a part of. A position of the map
    has seen much of the image, as far as its receptive field goes: this drops features, it does not hide pixels.

    Args:
        embedder: The embedder; it runs in inference mode.
        batches: As `tfdml.evaluation.embed`.
        shares: Shares of the positions, above 0 and at most 1; rounded to whole positions, at least one.
        seed: Of the positions.
        progress: Called after every batch with the number of images done.

    Raises:
        UserError: The embedder has no feature map, there is no image, or a share is out of range.

    Example:
        >>> backbone = tfdml.backbones.resolve("conv4", image_size=64, width=8)
        >>> embedder = tfdml.models.Embedder(backbone, embedding_dim=16, image_size=64, resize=64)
        >>> batches = evaluation_batches(test, EvaluationTransform.of(embedder), 100)
        >>> result = partial_embeddings(embedder, batches, [1 / 6, 1 / 2])
        >>> result.positions, result.map_positions
        ([3, 8], 16)

    Source: Jacob et al., "Metric Learning With HORDE: High-Order Regularizer for Deep Embeddings", ICCV 2019, fig. 1.
    """
    lacking = [
        name
        for name in ("represent", "representation_shapes", "pool", "dense", "normalize")
        if getattr(embedder, name, None) is None
    ]
    if lacking:
        raise UserError(
            f"{type(embedder).__name__} has no {', '.join(lacking)}: only an Embedder, which pools a feature map and "
            "projects it, can be given a part of the positions"
        )
    shares = [float(share) for share in shares]
    if not shares or not all(0 < share <= 1 for share in shares):
        raise UserError(f"shares must be above 0 and at most 1; got {shares}")
    model: _PartsModel | None = None
    shape: tuple[int, ...] = ()
    rows: list[np.ndarray] = []
    done = 0
    for batch in batches:
        images = np.asarray(batch[0] if isinstance(batch, tuple | list) else batch)
        if model is None:
            shape = images.shape[1:]
            height, width = embedder.representation_shapes(images.shape)["feature_map"][1:3]
            model = _PartsModel(embedder, int(height * width), shares)
        if images.shape[1:] != shape:
            raise UserError(f"images must be of one size; here {shape}, then {images.shape[1:]}")
        if len(images):
            rows.append(model.predict_on_batch([images, model.orders(range(done, done + len(images)), seed)]))
            done += len(images)
            if progress is not None:
                progress(done)
    if model is None or not rows:
        raise UserError("there is no image to embed")
    columns = np.concatenate(rows)
    statistics = columns[:, -2:]
    whole, *of_shares = np.split(columns[:, :-2], 1 + len(shares), axis=1)
    return PartialEmbeddings(
        whole=whole,
        parts=of_shares,
        shares=shares,
        positions=model.positions,
        map_positions=model.map_positions,
        local_cosine=statistics[:, 0],
        feature_scatter=statistics[:, 1],
    )


def evaluate_scattering(
    embedder: Any,
    batches: Iterable[Any],
    labels: Any,
    *,
    share: float = SIXTH,
    distance: str = "euclidean",
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> dict[str, float | int]:
    """How much of Recall@1 is left when embeddings are made from a part of the deep features, a sixth by default.

    The paper shows the effect by a map of representations (figure 1b and 1c) and gives no figure; the loss of Recall@1,
    all-to-all and with queries and gallery embedded from parts alike, and the cosines are those chosen here.

    Args:
        embedder: As `partial_embeddings`.
        batches: As `partial_embeddings`.
        labels: (N,) integer class ids, in the order of the images.
        share: Of the positions.
        distance: As `evaluate_retrieval`.
        seed: Of the positions.
        progress: As `partial_embeddings`.

    Returns:
        `whole_recall@1` and `part_recall@1`, from all positions and from `part_positions` of `map_positions`;
        `part_cosine`, the mean cosine between the two embeddings of an image; `local_cosine`, the mean cosine between
        an image's embedding and those of its single positions; `feature_scatter`, the mean part of the deep features'
        mean square that lies off their mean.

    Raises:
        UserError: As `partial_embeddings` and `evaluate_retrieval`.

    Example:
        >>> backbone = tfdml.backbones.resolve("conv4", image_size=64, width=8)
        >>> embedder = tfdml.models.Embedder(backbone, embedding_dim=16, image_size=64, resize=64)
        >>> batches = evaluation_batches(test, EvaluationTransform.of(embedder), 100)
        >>> evaluate_scattering(embedder, batches, test.labels)["part_positions"]
        3

    Source: as `partial_embeddings`.
    """
    parts = partial_embeddings(embedder, batches, [share], seed=seed, progress=progress)
    labels = check_labels(labels, len(parts.whole))
    return {
        "whole_recall@1": _recall(parts.whole, labels, distance),
        "part_recall@1": _recall(parts.parts[0], labels, distance),
        "part_positions": parts.positions[0],
        "map_positions": parts.map_positions,
        "part_cosine": float(parts.cosines().mean(dtype=np.float64)),
        "local_cosine": float(parts.local_cosine.mean(dtype=np.float64)),
        "feature_scatter": float(parts.feature_scatter.mean(dtype=np.float64)),
    }


def scattering_curve(parts: PartialEmbeddings, labels: Any, *, distance: str = "euclidean") -> list[dict[str, float]]:
    """Recall@1 by the share of positions that embeddings are made from.

    Args:
        parts: What `partial_embeddings` gave, for several shares.
        labels: (N,) integer class ids, in the order of the images.
        distance: As `evaluate_retrieval`.

    Returns:
        For each number of positions, ascending, and for all of them last: `positions`, `share` (that of the positions
        themselves), `recall@1` and `cosine` (the mean one with the embedding from all positions).

    Raises:
        UserError: As `evaluate_retrieval`.

    Example:
        >>> backbone = tfdml.backbones.resolve("conv4", image_size=64, width=8)
        >>> embedder = tfdml.models.Embedder(backbone, embedding_dim=16, image_size=64, resize=64)
        >>> batches = evaluation_batches(test, EvaluationTransform.of(embedder), 100)
        >>> parts = partial_embeddings(embedder, batches, [0.1, 1 / 6, 0.25, 0.5])
        >>> [point["positions"] for point in scattering_curve(parts, test.labels)]
        [2, 3, 4, 8, 16]
    """
    labels = check_labels(labels, len(parts.whole))
    vectors = {count: (parts.parts[i], parts.cosines(i)) for i, count in enumerate(parts.positions)}
    vectors[parts.map_positions] = (parts.whole, np.ones(1))
    return [
        {
            "positions": count,
            "share": count / parts.map_positions,
            "recall@1": _recall(embeddings, labels, distance),
            "cosine": float(cosines.mean(dtype=np.float64)),
        }
        for count, (embeddings, cosines) in sorted(vectors.items())
    ]


def _recall(embeddings: np.ndarray, labels: np.ndarray, distance: str) -> float:
    return evaluate_retrieval(embeddings, labels, ks=(1,), metrics=("recall",), distance=distance)["recall@1"]


class _PartsModel(keras.Model):
    """(images, order of positions) to their embedding, those from each share of positions, and two statistics.

    The statistics are the `local_cosine` and the `feature_scatter` of each image.
    """

    def __init__(self, embedder: Any, map_positions: int, shares: Sequence[float]):
        # Pixels are cast where the embedder does it.
        super().__init__(name="parts_of_map", autocast=False)
        self.embedder = embedder
        self.map_positions = map_positions
        self.positions = [max(1, int(share * map_positions + 0.5)) for share in shares]

    def orders(self, places: Iterable[int], seed: int) -> np.ndarray:
        """(B, positions) int32: each image's positions at random, by the seed and its place; a share is the first."""
        drawn = [np.random.default_rng([seed, place]).permutation(self.map_positions) for place in places]
        return np.asarray(drawn, np.int32)

    def build(self, input_shape):
        """Create the embedder's weights, if it has none yet."""
        if not self.embedder.built:
            self.embedder.build(input_shape[0])

    def call(self, inputs):
        """(B, H, W, 3), (B, P) -> (B, (1 + shares) d + 2) float32."""
        images, order = inputs
        representations = self.embedder.represent(images, training=False)
        feature_map, whole = representations["feature_map"], representations["embedding"]
        positions, channels = order.shape[1], feature_map.shape[-1]
        features = ops.reshape(feature_map, (-1, positions, channels))
        columns = [whole]
        for count in self.positions:
            index = ops.broadcast_to(order[:, :count, None], (ops.shape(order)[0], count, channels))
            columns.append(self._embedding(ops.take_along_axis(features, index, axis=1)))
        local = ops.reshape(self._embedding(ops.reshape(features, (-1, 1, channels))), (-1, positions, whole.shape[-1]))
        cosine = ops.mean(ops.sum(local * whole[:, None], axis=-1), axis=1)
        features = ops.cast(features, "float32")
        of_mean = ops.sum(ops.square(ops.mean(features, axis=1)), axis=-1)
        mean = ops.mean(ops.sum(ops.square(features), axis=-1), axis=1)
        scatter = 1 - of_mean / ops.maximum(mean, 1e-30)
        return ops.concatenate([*columns, ops.stack([cosine, scatter], axis=1)], axis=1)

    def _embedding(self, features):
        """(B, P', C) -> (B, d), as the embedder makes it of all positions."""
        heads = getattr(self.embedder, "heads", 1)  # the maps of an ensemble's heads lie side by side
        pooled = self.embedder.pool(features[:, :, None])
        projection = self.embedder.dense(ops.reshape(pooled, (-1, pooled.shape[-1] // heads)))
        vectors = self.embedder.normalize(projection) / heads**0.5
        return ops.reshape(vectors, (-1, heads * vectors.shape[-1]))
