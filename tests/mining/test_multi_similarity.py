import numpy as np
import pytest
import tensorflow as tf

from tests.mathematics import degenerate_batches, random_batch
from tests.mining.given_pairs import masks
from tfdml import pairwise
from tfdml.mining import multi_similarity_pairs
from tfdml.pairs import Pairs


def expected_masks(similarities, labels, epsilon):
    size = len(labels)
    masks = np.zeros((2, size, size), bool)
    for i in range(size):
        near = [j for j in range(size) if j != i and labels[j] == labels[i]]
        far = [j for j in range(size) if labels[j] != labels[i]]
        if near and far:
            for j in near:
                masks[0, i, j] = similarities[i, j] - epsilon < max(similarities[i, far])
            for j in far:
                masks[1, i, j] = similarities[i, j] + epsilon > min(similarities[i, near])
    return masks


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_keeps_the_violating_pairs(epsilon, mode):
    labels, x = random_batch(3, 12, 4, 5)
    similarities = np.asarray(pairwise.cosine_similarities(x))

    def kept(x):
        pairs = multi_similarity_pairs(Pairs.of_batch(x, labels), epsilon)
        return pairs.positives, pairs.negatives

    found = tf.function(kept, jit_compile=mode == "xla", autograph=False)(x)
    expected = expected_masks(similarities, labels, np.float32(epsilon))
    assert expected.any()
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize("batch", ["no positive", "no negative", "one image", "two images of two classes"])
def test_an_anchor_without_both_kinds_keeps_nothing(batch):
    labels, x = degenerate_batches()[batch]
    for mask in masks(multi_similarity_pairs(Pairs.of_batch(x, labels))):
        assert not np.any(mask)
