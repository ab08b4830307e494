"""Sums and means over the part of a batch that counts, for losses whose parts are not plain pairs."""

from __future__ import annotations

from keras import ops

from tfdml import pairwise, replicas


def masked_logsumexp(values, mask, axis):
    """Log of the sum of exp(values) where `mask` is true.

    Where it is true nowhere the result is about -1e30 and not -inf: its softplus is 0 with gradient 0, and sums and
    differences with it stay numbers.
    """
    return ops.logsumexp(ops.where(mask, values, -1e30), axis=axis)


def scale_to_mean(rows, counted):
    """Scale the sums of N anchors so that their mean is their total over `counted`, a scalar; (N,), () -> (N,).

    `counted` may be an expected number and lie below 1; where it is 0, so are the rows. Within `pairwise.only_rows` the
    anchors and what is counted are those of all replicas.
    """
    own = pairwise.present_rows()
    anchors = ops.shape(rows)[0] if own is None else own.total
    counted = replicas.summed(counted)
    return rows * (ops.cast(anchors, "float32") / ops.where(counted > 0, counted, 1.0))
