"""Every measure of generalisation that the embeddings at hand allow, as one flat dict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation.disjoint_parts import part_protocol
from tfdml.evaluation.generalisation.density import class_density
from tfdml.evaluation.generalisation.divergence import evaluate_divergence
from tfdml.evaluation.generalisation.overlap import evaluate_overlap
from tfdml.evaluation.generalisation.scattering import evaluate_scattering
from tfdml.evaluation.retrieval import check_labels, evaluate_retrieval
from tfdml.evaluation.search.exact import check_embeddings

GENERALISATION_MEASURES = ("recall", "overlap", "density", "divergence", "scattering")
# Of which each needs two images of every class.
_PARTS = 10


def evaluate_generalisation(
    test_embeddings: Any,
    test_labels: Any,
    train_embeddings: Any = None,
    train_labels: Any = None,
    *,
    embedder: Any = None,
    test_batches: Iterable[Any] | None = None,
    measures: Sequence[str] = GENERALISATION_MEASURES,
    distance: str = "euclidean",
    num_pairs: int | None = None,
    repeats: int = 10,
    share: float = 1 / 6,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> dict[str, float | int | bool]:
    """Measure how far an embedding that was trained on some classes carries over to others.

    Of the test (unseen) classes, and of the training (seen) classes too where their embeddings are given:

    - `recall`: Recall@1 all-to-all, whose difference is the generalisation gap (DML-DA's figure 1d); and, where every
      class has 20 images or more, its mean over ten disjoint parts with the 95 % interval (JRD's table 3);
    - `overlap`: of the distances of pairs of one class and of different classes (`evaluate_overlap`);
    - `density`: of classes, and how far their means lie apart (`class_density`).

    Of both together: `divergence`, lambda and the H-divergence (`evaluate_divergence`). With the embedder and the test
    images: `scattering` of deep features (`evaluate_scattering`). What cannot be measured on the classes given, for
    want of a second class or of a second image of any class, is left out.

    Args:
        test_embeddings: (N, d), of classes not trained on.
        test_labels: (N,) integer class ids.
        train_embeddings: (M, d), of the classes trained on; None: what needs them is left out.
        train_labels: (M,) integer class ids, given exactly if `train_embeddings` are.
        embedder: A `tfdml.models.Embedder`, for `scattering`; None leaves it out.
        test_batches: The test images in the order of `test_labels`, given exactly if `embedder` is.
        measures: Which of `GENERALISATION_MEASURES`.
        distance: Of `recall`, `overlap`, `divergence` and `scattering`, as `nearest_neighbours`.
        num_pairs: Of `evaluate_overlap`: how many pairs to draw; None: all.
        repeats: Of `evaluate_divergence`: how many splits.
        share: Of `evaluate_scattering`: of the positions.
        seed: Of whatever is drawn.
        progress: Of `evaluate_scattering`.

    Returns:
        Numbers by name, suited to JSON: those of `evaluate_divergence` and `evaluate_scattering` as they are;
        `unseen_` and `seen_` before `recall@1`, `recall@1_parts`, `recall@1_parts_ci95` and those of
        `evaluate_overlap` and `ClassDensity.summary`. Their
        meanings are the pages' of those functions; distances are not fractions, and lambda may exceed 1.

    Raises:
        UserError: Embeddings or labels that do not go together, an unknown measure, or an argument out of range.

    Example:
        >>> figures = evaluate_generalisation([[0.0], [0.1], [5.0], [5.1]], [3, 3, 8, 8])
        >>> figures["unseen_recall@1"], figures["unseen_overlap"]
        (1.0, 0.0)
    """
    unknown = [name for name in measures if name not in GENERALISATION_MEASURES]
    if unknown or not measures:
        raise UserError(f"unknown measures {unknown}; choose from {', '.join(GENERALISATION_MEASURES)}")
    if (train_embeddings is None) != (train_labels is None):
        raise UserError("train_embeddings and train_labels go together: give both or none")
    if (embedder is None) != (test_batches is None):
        raise UserError("embedder and test_batches go together: give both or none")
    sides = {"unseen": _checked(test_embeddings, test_labels, "test")}
    if train_embeddings is not None:
        sides["seen"] = _checked(train_embeddings, train_labels, "train")
    result: dict[str, float | int | bool] = {}
    for side, (embeddings, labels) in sides.items():
        counts = np.unique(labels, return_counts=True)[1]
        found: dict[str, float | int | bool] = {}
        if "recall" in measures and counts.max() > 1:
            found |= _recall(embeddings, labels, int(counts.min()), distance, seed)
        if len(counts) > 1 and counts.max() > 1:
            if "overlap" in measures:
                found |= evaluate_overlap(embeddings, labels, distance=distance, num_pairs=num_pairs, seed=seed)
            if "density" in measures:
                found |= class_density(embeddings, labels).summary()
        result |= {f"{side}_{name}": value for name, value in found.items()}
    paired = all(np.unique(labels, return_counts=True)[1].max() > 1 for _, labels in sides.values())
    if "divergence" in measures and len(sides) == 2 and paired:
        result |= evaluate_divergence(*sides["seen"], *sides["unseen"], distance=distance, repeats=repeats, seed=seed)
    if "scattering" in measures and embedder is not None and test_batches is not None:
        labels = sides["unseen"][1]
        result |= evaluate_scattering(
            embedder, test_batches, labels, share=share, distance=distance, seed=seed, progress=progress
        )
    return result


def _recall(
    embeddings: np.ndarray, labels: np.ndarray, smallest: int, distance: str, seed: int
) -> dict[str, float | int | bool]:
    options: dict[str, Any] = {"ks": (1,), "metrics": ("recall",), "distance": distance}
    result: dict[str, float | int | bool] = {"recall@1": evaluate_retrieval(embeddings, labels, **options)["recall@1"]}
    if smallest >= 2 * _PARTS:
        interval = part_protocol(embeddings, labels, parts=_PARTS, seed=seed, **options)["recall@1"]
        result |= {"recall@1_parts": interval.mean, "recall@1_parts_ci95": (interval.high - interval.low) / 2}
    return result


def _checked(embeddings: Any, labels: Any, side: str) -> tuple[np.ndarray, np.ndarray]:
    embeddings = check_embeddings(embeddings, f"{side}_embeddings")
    return embeddings, check_labels(labels, len(embeddings), f"{side}_labels")
