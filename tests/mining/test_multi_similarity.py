import numpy as np
import pytest
import tensorflow as tf

from tests.mathematics import degenerate_batches, random_batch
from tfdml import pairwise
from tfdml.mining import multi_similarity_pairs


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
    masks = tf.function(
        lambda s: multi_similarity_pairs(s, labels, epsilon), jit_compile=mode == "xla", autograph=False
    )(similarities)
    expected = expected_masks(similarities, labels, np.float32(epsilon))
    assert expected.any()
    np.testing.assert_array_equal(masks[0], expected[0])
    np.testing.assert_array_equal(masks[1], expected[1])


@pytest.mark.parametrize("batch", ["no positive", "no negative", "one image", "two images of two classes"])
def test_an_anchor_without_both_kinds_keeps_nothing(batch):
    labels, x = degenerate_batches()[batch]
    for mask in multi_similarity_pairs(pairwise.cosine_similarities(x), labels):
        assert not np.any(mask)


def test_worked_example_of_the_docstring():
    similarities = np.tile(np.array([1.0, 0.8, 0.75, 0.1], "float32"), (4, 1))
    positives, negatives = multi_similarity_pairs(similarities, [0, 0, 1, 2], epsilon=0.1)
    np.testing.assert_array_equal(positives[0], [False, True, False, False])
    np.testing.assert_array_equal(negatives[0], [False, False, True, False])
