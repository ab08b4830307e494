"""How far deep features scatter: embeddings from a part of the feature map's positions (HORDE's figure 1)."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from tfdml.errors import UserError
from tfdml.evaluation.per_query import check_labels
from tfdml.evaluation.retrieval import evaluate_retrieval
from tfdml.models.inference import compiled

# Of the positions of the feature map, as in the figure.
SIXTH = 1 / 6


class PartialEmbeddings(NamedTuple):
    """Embeddings from a part of the feature map, and how the positions scatter.

    Attributes:
        whole: (N, d) float32, from all positions: the embedder's own.
        part: (N, d) float32, from the share.
        local_cosine: (N,) float32, the mean cosine between an image's embedding and those of its single positions.
        feature_scatter: (N,) float32, the part of the deep features' mean square that lies off their mean,
            1 - |mean of x|^2 / mean of |x|^2: 0 where all positions agree, towards 1 where they cancel.
        positions: How many positions the share is.
        map_positions: How many positions the feature map has.
    """

    whole: np.ndarray
    part: np.ndarray
    local_cosine: np.ndarray
    feature_scatter: np.ndarray
    positions: int
    map_positions: int


def partial_embeddings(
    embedder: Any,
    batches: Iterable[Any],
    share: float = SIXTH,
    *,
    seed: int = 0,
) -> PartialEmbeddings:
    """Embed every image from a random part of the positions of its feature map.

        positions S drawn from the map -> pooling over S -> dense -> L2

    as the embedder does from all of them. The paper takes a sixth of the deep features; it does not say whether the
    same positions of every image. Here they are drawn for each image, without replacement, by the seed and the
    image's place in the order, whatever the batches: as queries and as gallery images alike. Larger shares contain
    smaller ones.

    For a `tfdml.models.Embedder` or `AttentionEnsemble` (all heads lose the same positions), or a model that has the
    same `represent`, `pool`, `dense` and `normalize`: a feature map, global pooling, one dense
    layer. Others, such as an exported model or `MomentEmbedder`, offer no map to take a part of. A position of the map
    has seen much of the image, as far as its receptive field goes: this drops features, it does not hide pixels.

    Args:
        embedder: The embedder; it runs in inference mode.
        batches: As `tfdml.evaluation.embed`.
        share: Of the positions, above 0 and at most 1; rounded to whole positions, at least one.
        seed: Of the positions.

    Raises:
        UserError: The embedder has no feature map, there is no image, or the share is out of range.

    Example:
        >>> backbone = tfdml.backbones.resolve("conv4", image_size=64, width=8)
        >>> embedder = tfdml.models.Embedder(backbone, embedding_dim=16, image_size=64, resize=64)
        >>> batches = evaluation_batches(test, EvaluationTransform.of(embedder), 100)
        >>> result = partial_embeddings(embedder, batches)
        >>> result.positions, result.map_positions
        (3, 16)

    Source: Jacob et al., "Metric Learning With HORDE: High-Order Regularizer for Deep Embeddings", ICCV 2019, fig. 1.
    """
    lacking = [name for name in ("represent", "pool", "dense", "normalize") if getattr(embedder, name, None) is None]
    if lacking:
        raise UserError(f"{type(embedder).__name__} has no {', '.join(lacking)}: give an Embedder, with a feature map")
    if not 0 < share <= 1:
        raise UserError(f"share must be above 0 and at most 1; got {share}")
    parts: list[PartialEmbeddings] = []
    run: Any = None
    shape: Any = None
    done = 0
    for batch in batches:
        images = np.asarray(batch[0] if isinstance(batch, tuple | list) else batch)
        if run is None:
            shape = images.shape[1:]
            if not embedder.built:
                embedder.build(images.shape)
            run = compiled(embedder, lambda images: embedder.represent(images, training=False))
        if images.shape[1:] != shape:
            raise UserError(f"images must be of one size; here {shape}, then {images.shape[1:]}")
        if len(images):
            places = range(done, done + len(images))
            generators = [np.random.default_rng([seed, place]) for place in places]
            parts.append(_parts_of_batch(embedder, run(images), share, generators))
            done += len(images)
    if not parts:
        raise UserError("there is no image to embed")
    whole, part, cosine, scatter = (np.concatenate([one[i] for one in parts]) for i in range(4))
    return PartialEmbeddings(whole, part, cosine, scatter, parts[0].positions, parts[0].map_positions)


def evaluate_scattering(
    embedder: Any,
    batches: Iterable[Any],
    labels: Any,
    *,
    share: float = SIXTH,
    distance: str = "euclidean",
    seed: int = 0,
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
    parts = partial_embeddings(embedder, batches, share, seed=seed)
    labels = check_labels(labels, len(parts.whole))
    options: dict[str, Any] = {"ks": (1,), "metrics": ("recall",), "distance": distance}
    recall, recall_of_part = (evaluate_retrieval(x, labels, **options)["recall@1"] for x in (parts.whole, parts.part))
    return {
        "whole_recall@1": recall,
        "part_recall@1": recall_of_part,
        "part_positions": parts.positions,
        "map_positions": parts.map_positions,
        "part_cosine": float(np.einsum("nd,nd->n", parts.part, parts.whole).mean(dtype=np.float64)),
        "local_cosine": float(parts.local_cosine.mean(dtype=np.float64)),
        "feature_scatter": float(parts.feature_scatter.mean(dtype=np.float64)),
    }


def _parts_of_batch(embedder: Any, representations: Any, share: float, generators: Any) -> PartialEmbeddings:
    feature_map = ops.convert_to_numpy(representations["feature_map"])
    whole = ops.convert_to_numpy(representations["embedding"]).astype(np.float32)
    features = feature_map.reshape(len(feature_map), -1, feature_map.shape[-1])
    positions = features.shape[1]
    kept = max(1, int(share * positions + 0.5))
    order = np.stack([generator.permutation(positions)[:kept] for generator in generators])
    part = _embedding(embedder, np.take_along_axis(features, order[:, :, None], axis=1))
    local = _embedding(embedder, features.reshape(-1, 1, features.shape[-1])).reshape(len(features), positions, -1)
    cosine = (local * whole[:, None]).sum(axis=-1).mean(axis=1)
    features = features.astype(np.float32)
    mean = np.square(features).sum(axis=-1).mean(axis=1)
    scatter = 1 - np.square(features.mean(axis=1)).sum(axis=-1) / np.maximum(mean, 1e-30)
    return PartialEmbeddings(whole, part, cosine, scatter, kept, positions)


def _embedding(embedder: Any, features: np.ndarray) -> np.ndarray:
    """(B, P', C) -> (B, d), as the embedder makes it of all positions."""
    heads = getattr(embedder, "heads", 1)  # the maps of an ensemble's heads lie side by side
    pooled = embedder.pool(ops.convert_to_tensor(features[:, :, None]))
    projection = embedder.dense(ops.reshape(pooled, (-1, pooled.shape[-1] // heads)))
    vectors = ops.convert_to_numpy(embedder.normalize(projection)).astype(np.float32) / heads**0.5
    return vectors.reshape(len(features), -1)
