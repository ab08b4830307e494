"""Sums over the triplets of a batch of a smooth function, in O(B^2) memory."""

from __future__ import annotations

import functools

from keras import ops

from tfdml import pairwise


def compare_with_positives(values, positives, weights, function, slope):
    """For each positive pair (i, j) sum_k w_ik f(v_ik - v_ij), and 0 elsewhere: three times (B, B) -> (B, B).

    Differentiable in the values, once: both ways run over one positive of every anchor after another, so that they take
    O(B^2) memory, and O(B^2 P) time for at most P positives of an anchor.

    Args:
        values: v.
        positives: Booleans.
        weights: w, without a gradient.
        function: f, of each element.
        slope: Its derivative.

    Example:
        >>> values, pairs = keras.ops.array([[0.0, 1.0, 3.0]]), keras.ops.array([[False, True, False]])
        >>> np.array(compare_with_positives(values, pairs, keras.ops.ones((1, 3)), keras.ops.square, lambda z: 2 * z))
        array([[0., 5., 0.]], dtype=float32)
    """

    @ops.custom_gradient
    def compared(values, marks, weights):
        # Cut off from any tape: an eager one would keep every turn's matrices although grad() never asks for them.
        values, marks, weights = (ops.stop_gradient(x) for x in (values, marks, weights))
        fold = functools.partial(pairwise.fold_over_positives, positives=marks > 0)

        def at(chosen, x):
            return ops.sum(ops.where(chosen, x, 0.0), axis=1, keepdims=True)

        def add(total, chosen):
            terms = weights * function(values - at(chosen, values))
            return total + ops.where(chosen, ops.sum(terms, axis=1, keepdims=True), 0.0)

        def grad(*args, upstream=None):
            if upstream is None:
                (upstream,) = args

            def add_slopes(total, chosen):
                slopes = at(chosen, upstream) * weights * slope(values - at(chosen, values))
                return total + slopes - ops.where(chosen, ops.sum(slopes, axis=1, keepdims=True), 0.0)

            return fold(add_slopes, ops.zeros_like(values)), ops.zeros_like(marks), ops.zeros_like(weights)

        return fold(add, ops.zeros_like(values)), grad

    return compared(values, ops.cast(positives, "float32"), ops.cast(weights, "float32"))
