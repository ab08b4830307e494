import numpy as np

from tests.report.pages import embedded
from tfdml.evaluation import sample_pair_distances


def test_pair_distances_are_of_the_right_pairs():
    embeddings, labels = embedded(4, classes=5, per_class=4)
    labels[-1] = 999  # a class of one image has no positive pair
    gaps = np.linalg.norm(embeddings[:, None] - embeddings[None], axis=-1)
    same = labels[:, None] == labels[None]
    positive, negative = sample_pair_distances(embeddings, labels, num_pairs=40_000)
    wanted = gaps[same & ~np.eye(len(labels), dtype=bool)]
    np.testing.assert_allclose(np.unique(positive), np.unique(wanted.astype(np.float32)), rtol=1e-5)
    np.testing.assert_allclose(positive.mean(), wanted.mean(), rtol=0.02)  # pairs are equally likely
    np.testing.assert_allclose(negative.mean(), gaps[~same].mean(), rtol=0.02)
    assert len(np.unique(negative)) == (~same).sum() / 2
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    cosine = sample_pair_distances(embeddings, labels, distance="cosine", num_pairs=500)[1]
    assert np.isin(np.round(cosine, 4), np.round((1 - unit @ unit.T).astype(np.float32), 4)).mean() > 0.98
