import itertools

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from tfdml.evaluation import clustering_agreement, evaluate_clustering, kmeans, pairwise_f1

ids = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 4)), min_size=1, max_size=25)


def slow_f1(labels, clusters):
    pairs = list(itertools.combinations(range(len(labels)), 2))
    same_class = [labels[i] == labels[j] for i, j in pairs]
    same_cluster = [clusters[i] == clusters[j] for i, j in pairs]
    true_positive = sum(a and b for a, b in zip(same_class, same_cluster, strict=True))
    total = sum(same_class) + sum(same_cluster)
    return 2 * true_positive / total if total else 1.0


@settings(max_examples=100, deadline=None)
@given(ids)
def test_pairwise_f1_counts_pairs(points):
    labels, clusters = map(list, zip(*points, strict=True))
    assert pairwise_f1(labels, clusters) == slow_f1(labels, clusters)


@pytest.mark.parametrize(("images", "classes"), [(700, 30), (3000, 700), (60, 60), (5, 2), (1, 1)])
def test_ami_and_nmi_are_those_of_scikit_learn(images, classes):
    rng = np.random.default_rng(images)
    labels = np.r_[np.arange(classes), rng.integers(0, classes, images - classes)] * 2**40 - 5
    clusters = np.where(rng.random(images) < 0.5, labels, rng.integers(0, classes, images))
    found = clustering_agreement(labels, clusters, ["nmi", "ami"])
    assert found["ami"] == pytest.approx(sk.adjusted_mutual_info_score(labels, clusters), abs=1e-10)
    assert found["nmi"] == pytest.approx(
        sk.normalized_mutual_info_score(labels, clusters), abs=1e-10
    )


def blobs(classes=6, per_class=15, noise=0.05):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(classes) * 2**40 - 7, per_class)
    centers = rng.normal(size=(classes, 4))
    return np.repeat(centers, per_class, axis=0) + noise * rng.normal(size=(len(labels), 4)), labels


@pytest.mark.parametrize("duplicates", [False, True])
def test_clusters_are_those_of_faiss(duplicates):
    """Also where clusters run empty and are split, as among copies."""
    rng = np.random.default_rng(2)
    points = rng.integers(-1, 2, size=(200, 3)) if duplicates else rng.normal(size=(200, 5))
    clusters = kmeans(points, 24, iterations=7, seed=3)
    scaled = np.asarray(points, np.float32) - points.mean(axis=0).astype(np.float32)
    scaled /= np.abs(scaled).max()
    model = faiss.Kmeans(
        points.shape[1], 24, niter=7, seed=3, min_points_per_centroid=1, max_points_per_centroid=200
    )
    model.train(scaled)
    np.testing.assert_array_equal(clusters, model.index.search(scaled, 1)[1][:, 0])


@pytest.mark.parametrize("points", [np.ones((8, 3)), np.zeros((8, 3)), np.arange(8.0)[:, None]])
def test_degenerate_embeddings_still_cluster(points):
    result = evaluate_clustering(points, np.arange(8) % 4)
    assert all(np.isfinite(v) for v in result.values())
    assert kmeans(points, 8).shape == (8,)
    assert kmeans(points, 1).tolist() == [0] * 8
