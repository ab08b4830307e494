import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist
from sklearn.metrics import adjusted_rand_score
from sklearn.metrics.cluster import pair_confusion_matrix

from tfdml import UserError
from tfdml.evaluation import average_linkage, cut_linkage, evaluate_groups, group
from tfdml.evaluation.clustering import PairRates


def clusters(seed, classes=30, images=12, noise=0.5, dim=16):
    """Unit-free vectors around class centers, and labels, in random order."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(classes), images))
    centers = rng.normal(size=(classes, dim))
    return centers[labels] + noise * rng.normal(size=(len(labels), dim)), labels


def same_partition(one, other):
    return adjusted_rand_score(one, other) == 1


@pytest.mark.parametrize(
    ("classes", "images", "dim", "noise"),
    [(2, 1, 3, 1), (3, 1, 2, 1), (13, 4, 2, 1), (10, 3, 8, 5), (3, 150, 8, 0.3), (1, 300, 3, 2)],
)
def test_average_linkage_is_that_of_scipy(classes, images, dim, noise):
    """Also of classes larger than the neighbors that are followed, and without classes, where
    clusters form long chains."""
    points, _ = clusters(0, classes, images, noise, dim)
    found = average_linkage(points)
    wanted = linkage(points, "average", "cosine")
    np.testing.assert_allclose(found[:, 2], wanted[:, 2], atol=1e-6)
    np.testing.assert_array_equal(np.sort(found[:, 3]), np.sort(wanted[:, 3]))
    for distance in np.quantile(wanted[:, 2], [0.2, 0.5, 0.9]) + 1e-5:
        clusters_of = fcluster(wanted, distance, "distance")
        assert same_partition(cut_linkage(found, distance), clusters_of)


def test_copies_merge_first_and_zero_vectors_last():
    points = np.concatenate([np.tile([[1.0, 2.0]], (500, 1)), np.tile([[2.0, -1.0]], (3, 1))])
    found = average_linkage(np.concatenate([points, np.zeros((2, 2))]))
    assert found[:501, 2].max() == pytest.approx(0, abs=1e-6)
    np.testing.assert_allclose(found[-2:, 2], 1, atol=1e-6)
    assert cut_linkage(found, 0.5)[[0, 499, 500, 502, 503]].tolist() == [0, 0, 1, 1, 2]


def test_rates_of_every_cut_are_those_of_its_pairs():
    points, labels = clusters(1, classes=6, images=5, noise=1)
    tree = average_linkage(points)
    rates = PairRates.of(tree, labels)
    for place in (0, 7, len(rates.distances) - 1):
        numbers = cut_linkage(tree, rates.distances[place])
        (apart, wrong), (missed, right) = pair_confusion_matrix(labels, numbers)
        assert rates.recalls[place] == pytest.approx(right / (right + missed))
        assert rates.false_rates[place] == pytest.approx(wrong / (wrong + apart))
        prior = (right + missed) / (right + missed + wrong + apart)
        assert rates.aris(prior)[place] == pytest.approx(adjusted_rand_score(labels, numbers))


def test_the_cut_is_for_the_prior_of_the_images():
    """Held-out images of few classes; those to group are of sixteen times as many."""
    held_out, labels = clusters(0, classes=12, images=40, noise=0.75)
    images, own = clusters(1, classes=200, images=6, noise=0.75)
    found = group(images, held_out, labels)
    prior = np.mean(pdist(own[:, None], "hamming") == 0)
    assert prior / 2 < found.prior < 2 * prior

    def ari(numbers):
        return adjusted_rand_score(own, numbers)

    tree = average_linkage(images)
    best = max(ari(cut_linkage(tree, distance)) for distance in np.linspace(0.05, 0.9, 30))
    rates = PairRates.of(average_linkage(held_out), labels)
    at_their_prior = rates.distances[rates.best(np.mean(pdist(labels[:, None], "hamming") == 0))]
    assert ari(found.numbers) > 0.9 * best > 1.2 * ari(cut_linkage(tree, at_their_prior))
    told = group(images, held_out, labels, expected_classes=200)
    assert told.prior == pytest.approx(prior)
    assert ari(told.numbers) > 0.9 * best


def test_purer_groups_are_asked_for_by_their_precision():
    held_out, labels = clusters(0, noise=0.8)
    images, own = clusters(1, noise=0.8)
    usual = group(images, held_out, labels)
    pure = group(images, held_out, labels, min_precision=0.95)
    rates = [evaluate_groups(own, each.numbers)["pair_precision"].mean for each in (usual, pure)]
    assert rates[0] < 0.9 < rates[1]
    assert pure.expected["pair_precision"] >= 0.95


def test_measures_are_those_of_pairs_with_the_jackknife_over_classes():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 9, 200)
    numbers = (3 * labels + rng.integers(0, 5, 200)) // 4
    found = evaluate_groups(labels, numbers)
    (_, wrong), (missed, right) = pair_confusion_matrix(labels, numbers)
    assert found["pair_precision"].mean == pytest.approx(right / (right + wrong))
    assert found["pair_recall"].mean == pytest.approx(right / (right + missed))
    assert found["ari"].mean == pytest.approx(adjusted_rand_score(labels, numbers))
    parts = [adjusted_rand_score(labels[labels != c], numbers[labels != c]) for c in range(9)]
    error = np.sqrt(8 * np.var(parts))
    assert found["ari"].standard_error == pytest.approx(error)


def test_what_cannot_be_grouped_is_refused():
    noise = np.random.default_rng(0).normal(size=(600, 8))
    labels = np.arange(600) % 20
    with pytest.raises(UserError, match=r"cannot be grouped so|hardly nearer"):
        group(noise[:300], noise[300:], labels[300:])
    with pytest.raises(UserError, match=r"reach an adjusted Rand index of 0\.0.*cannot be grouped"):
        group(noise[:300], noise[300:], labels[300:], expected_classes=20)
    points, own = clusters(0)
    for message, arguments in {
        "two classes or more": (points, points, np.zeros(len(points), int)),
        "class of its own": (points, points, np.arange(len(points))),
        "dimensions": (points, points[:, :3], own),
        "held-out embeddings.*NaN": (points, np.where(points > 2, np.nan, points), own),
        "at least two": (points[:1], points, own),
        "too few to estimate": (points, points[:4], [0, 0, 1, 1]),
    }.items():
        with pytest.raises(UserError, match=message):
            group(*arguments)
    with pytest.raises(UserError, match="expected_classes=360"):
        group(points, points, own, expected_classes=360)
