"""What a run with RankMI has besides its embedder: the statistics network, and what it makes of the distances."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from absl import logging
from keras import ops

from tfdml.evaluation.generalisation import PairHistogram, count_pair_distances
from tfdml.evaluation.search.scoring import unit_rows
from tfdml.layers import StatisticsNetwork
from tfdml.models import MetricLearner
from tfdml.objectives import RankMI

# Distances at which the curves are told: embeddings of length 1 are 0 to 2 apart.
_POINTS = 201
_BINS = 80


def rank_mi_of(learner: MetricLearner) -> RankMI | None:
    """The learner's RankMI; None without exactly one."""
    found = [objective for objective in learner.objectives if isinstance(objective, RankMI)]
    if len(found) > 1:
        logging.warning("no statistics network is saved: there are %d", len(found))
    return found[0] if len(found) == 1 else None


def statistics_model(objective: RankMI) -> keras.Model:
    """The objective's V as a model of its own: distances (N,) -> V (N,), which Keras saves and loads."""
    network = StatisticsNetwork.from_config(objective.network.get_config())
    distances = keras.Input(shape=(), name="distance")
    model = keras.Model(distances, network(distances), name="statistics_network")
    network.set_weights(objective.network.get_weights())
    return model


def describe_statistics(
    objective: RankMI, splits: Mapping[str, tuple[np.ndarray, np.ndarray]], epoch: int
) -> dict[str, Any]:
    """What RankMI's figure 3 shows, as numbers.

    The loss of a pair at distance d is softplus(-V(d)) - ln 2 if it is a positive, softplus(V(d)) - ln 2 if it is a
    negative: `divergence_loss` is the sum of the two means.

    Args:
        objective: RankMI, trained.
        splits: By name, embeddings (N, d) by the embedder that was trained with it, and labels (N,).
        epoch: After which this is.

    Returns:
        `objective`, `epoch`, `margin`; `beta`, V's root, and `has_root`, false where V has none and beta is that of an
        earlier step; `distances`, 0 to 2, and there `v`, `positive_loss` and `negative_loss`; and under `pairs`, for
        each split, `edges` of equal bins of distance, in each bin the number of pairs of one class, `positive`, and of
        different classes, `negative`, `mean_positive` and `mean_negative`, the mean distances, and three means over
        pairs: `statistics_loss`, the loss of V, over all; `jsd`, minus half of it, the lower bound on the
        Jensen-Shannon divergence in nats; and `embedder_loss`, that of the embedder, over the positives beyond
        beta - margin and the negatives within beta + margin, all of them, where training may draw among the negatives.

    Source: Kemertas et al., "RankMI: A Mutual Information Maximizing Ranking Loss", CVPR 2020, sec. 3.3, figure 3.
    """
    beta, has_root = (ops.convert_to_numpy(value).item() for value in objective.network.find_root(objective.beta))
    distances = np.linspace(0.0, 2.0, _POINTS)
    values = _values(objective, distances)
    pairs = {}
    for name, (embeddings, labels) in splits.items():
        counts = np.unique(labels, return_counts=True)[1]
        if len(counts) > 1 and counts.max() > 1:
            pairs[name] = _pairs(objective, count_pair_distances(unit_rows(embeddings), labels), beta)
    return {
        "objective": objective.name,
        "epoch": epoch,
        "margin": objective.margin,
        "beta": beta,
        "has_root": bool(has_root),
        "distances": distances.tolist(),
        "v": values.tolist(),
        "positive_loss": _cost(-values).tolist(),
        "negative_loss": _cost(values).tolist(),
        "pairs": pairs,
    }


def _values(objective: RankMI, distances: np.ndarray) -> np.ndarray:
    return ops.convert_to_numpy(objective.network(distances.astype(np.float32), frozen=True)).astype(np.float64)


def _cost(values: np.ndarray) -> np.ndarray:
    """Softplus - ln 2, in float64."""
    return np.logaddexp(0.0, values) - np.log(2.0)


def _pairs(objective: RankMI, histogram: PairHistogram, beta: float) -> dict[str, Any]:
    # The fine bins, 16,384 of them, are as good as the distances themselves.
    centres = (histogram.edges[:-1] + histogram.edges[1:]) / 2
    values = _values(objective, centres)
    positive, negative = histogram.positive, histogram.negative
    loss = _mean(_cost(-values), positive) + _mean(_cost(values), negative)
    hard_positive = np.where(centres > beta - objective.margin, positive, 0)
    hard_negative = np.where(centres < beta + objective.margin, negative, 0)
    shown = histogram.rebinned(_BINS)
    return {
        "edges": shown.edges.tolist(),
        "positive": shown.positive.tolist(),
        "negative": shown.negative.tolist(),
        "mean_positive": float(histogram.mean_positive),
        "mean_negative": float(histogram.mean_negative),
        "statistics_loss": loss,
        "jsd": -loss / 2,
        "embedder_loss": _mean(_cost(-values), hard_positive) + _mean(_cost(values), hard_negative),
    }


def _mean(values: np.ndarray, counts: np.ndarray) -> float:
    return float(np.sum(values * counts) / max(int(counts.sum()), 1))
