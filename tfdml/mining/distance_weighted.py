"""Distance-weighted negatives: every distance is equally likely to be drawn, whatever the dimension of the sphere."""

from __future__ import annotations

import keras
from keras import ops

from tfdml import pairwise


def negative_probabilities(pairs, cutoff=0.5, nonzero_loss_cutoff=1.4):
    """Computes the probability with which each anchor draws each image as its negative: (b, B).

    Proportional to 1/q(D), with D the distance of the L2-normalised embeddings and q its density between uniform
    points of the unit sphere in d dimensions:

        log w = (2 - d) ln D - ((d - 3) / 2) ln(1 - D^2 / 4),   D clamped to at least `cutoff`.

    Candidates are the negatives with D < `nonzero_loss_cutoff`; an anchor without any draws uniformly from all its
    negatives. Weights are scaled by each row's own maximum: with one maximum for the batch, rows far below it
    underflow to no candidate at all. Rows sum to 1, or to 0 where there is no negative. No gradient flows through.

    Args:
        pairs: `tfdml.pairs.Pairs`.
        cutoff: Nearer negatives weigh as much as those at this distance, to bound the variance.
        nonzero_loss_cutoff: Negatives at this distance or beyond are not drawn; below 2.

    Raises:
        ValueError: Not 0 < cutoff < nonzero_loss_cutoff < 2.

    Example:
        >>> pairs = tfdml.pairs.Pairs.of_batch([[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0]], labels=[0, 1, 2])
        >>> np.array(negative_probabilities(pairs))[0]  # only the second is near
        array([0., 1., 0.], dtype=float32)

    Source: Wu et al., "Sampling Matters in Deep Embedding Learning", ICCV 2017, sec. 4.
    """
    if not 0 < cutoff < nonzero_loss_cutoff < 2:
        raise ValueError(f"0 < cutoff < nonzero_loss_cutoff < 2 does not hold for {cutoff} and {nonzero_loss_cutoff}")
    # Not the static shape, which is unknown after a gather from replicas of unequal size.
    dim = ops.cast(ops.shape(pairs.anchors)[-1], "float32")
    negatives = pairs.negatives
    distances = pairs.without_gradient().map(pairwise.l2_normalize).distances("euclidean")
    near = ops.logical_and(negatives, distances < nonzero_loss_cutoff)
    # Clamped above as well, so that the logarithm is finite at the pairs that are masked out.
    clamped = ops.clip(distances, cutoff, nonzero_loss_cutoff)
    log_weights = (2.0 - dim) * ops.log(clamped) - 0.5 * (dim - 3.0) * ops.log(1.0 - 0.25 * ops.square(clamped))
    has_near = ops.any(near, axis=1, keepdims=True)
    candidates = ops.where(has_near, near, negatives)
    log_weights = ops.where(ops.logical_and(has_near, near), log_weights, 0.0)
    row_maximum = ops.max(ops.where(candidates, log_weights, -1e30), axis=1, keepdims=True, initial=-1e30)
    weights = ops.where(candidates, ops.exp(ops.minimum(log_weights - row_maximum, 0.0)), 0.0)
    return weights / ops.maximum(ops.sum(weights, axis=1, keepdims=True), 1.0)


def sample_negatives(probabilities, count=1, seed=None):
    """Draws `count` different negatives for each anchor: (b, B) -> indices (b, count) and whether each is one.

    Gumbel-top-k: the largest of log p + Gumbel noise are a draw without replacement.

    Args:
        probabilities: (b, B), as `negative_probabilities` gives them; rows need not sum to 1.
        count: Draws per anchor, at most B.
        seed: An integer, or a `keras.random.SeedGenerator` for fresh draws at every call.

    Returns:
        Integers (b, count), and booleans (b, count) that are false where an anchor has fewer candidates than `count`.

    Example:
        >>> drawn, exists = sample_negatives([[0.0, 1.0], [1.0, 0.0]], seed=0)
        >>> np.array(drawn).tolist(), np.array(exists).tolist()
        ([[1], [0]], [[True], [True]])
    """
    probabilities = ops.convert_to_tensor(probabilities)
    possible = probabilities > 0
    uniform = keras.random.uniform(ops.shape(probabilities), minval=1e-20, maxval=1.0, seed=seed)
    noisy = ops.log(ops.where(possible, probabilities, 1.0)) - ops.log(-ops.log(uniform))
    indices = ops.top_k(ops.where(possible, noisy, -1e30), count)[1]
    return indices, ops.take_along_axis(possible, indices, axis=1)
