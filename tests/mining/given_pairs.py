"""Pairs with given distances, for tests of what miners choose by them."""

import numpy as np
import tensorflow as tf

from tfdml.pairs import Pairs


def given_pairs(distances, labels):
    """The pairs of a batch of these labels (N,), whose `distances()` are (N, N)."""
    matrix = tf.convert_to_tensor(distances, tf.float32)
    return Pairs.of_batch(np.zeros((len(labels), 1), "float32"), np.asarray(labels)).using(lambda a, b: matrix)


def masks(pairs):
    """The positives and the negatives as NumPy arrays."""
    return np.asarray(pairs.positives), np.asarray(pairs.negatives)
