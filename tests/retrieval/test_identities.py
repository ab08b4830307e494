"""Classes of several images: the three rules, compared with a slow reference."""

import numpy as np
import pytest

from tests.retrieval.identities import (
    distance_between,
    distances_by_hand,
    made,
    references_by_hand,
)
from tfdml.errors import UserError
from tfdml.evaluation import set_distances, verify_pairs
from tfdml.registry import DISTANCES, PER_CLASS
from tfdml.retrieval import Identities, nearest_neighbors
from tfdml.retrieval.identities import references_of

RULES = PER_CLASS[1:]


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("rule", RULES)
def test_classes_and_distances_are_those_by_hand(rule, distance):
    images, labels, groups = made(unit=distance != "cosine")
    queries = made(1)[0][:8].astype(np.float64)
    identities = Identities(images, labels, rule, distance, groups)
    classes, distances = identities.search(queries, 4)
    for query, near, far in zip(queries, classes, distances, strict=True):
        expected = distances_by_hand(query, images, labels, groups, rule, distance)
        assert near.tolist() == np.argsort(expected)[:4].tolist()
        np.testing.assert_allclose(far, np.sort(expected)[:4], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("rule", RULES)
def test_an_image_of_the_gallery_is_searched_as_if_it_were_not_in_it(rule, distance):
    images, labels, groups = made()
    # A class of a single image, which is not found by it.
    images = np.concatenate([images, images[:1] + 1])
    labels, groups = np.append(labels, 6), np.append(groups, 0)
    rows = np.array([0, 3, 30, 11])
    identities = Identities(images, labels, rule, distance, groups)
    classes, distances = identities.search(images[rows], 7, own_rows=rows)
    for row, near, far in zip(rows, classes, distances, strict=True):
        expected = distances_by_hand(
            images[row].astype(np.float64), images, labels, groups, rule, distance, row
        )
        order = np.argsort(expected)[: np.isfinite(expected).sum()]
        assert near[: len(order)].tolist() == order.tolist()
        assert set(near[len(order) :]) <= {-1}
        np.testing.assert_allclose(far[: len(order)], expected[order], rtol=1e-5, atol=1e-6)


def test_clusters_of_a_class_are_found_without_groups():
    """Three tight clusters of three are three of the ceil(sqrt(9)) means, in any order of rows."""
    rng = np.random.default_rng(0)
    centers = np.array([[0.0, 0.0], [5.0, 0.0], [0.0, 5.0]])
    images = np.repeat(centers, 3, axis=0) + 0.1 * rng.normal(size=(9, 2))
    expected = images.reshape(3, 3, 2).mean(axis=1)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(9)
        means = references_of(images[order], None, "max_of_means", "euclidean")
        np.testing.assert_allclose(np.sort(means, axis=0), np.sort(expected, axis=0))
    assert len(references_of(images[:1], None, "max_of_means", "cosine")) == 1
    # Of equal images nothing is left to tell apart.
    same = references_of(np.ones((4, 2)), None, "max_of_means", "euclidean")
    assert np.unique(same, axis=0).tolist() == [[1.0, 1.0]]


def test_left_out_of_clusters_is_the_gallery_without_the_image():
    images, labels, _ = made(per_class=7)
    identities = Identities(images, labels, "max_of_means", "cosine")
    classes, distances = identities.search(images, 6, own_rows=np.arange(len(images)))
    for row in (0, 9, 20):
        kept = np.arange(len(images)) != row
        without = Identities(images[kept], labels[kept], "max_of_means", "cosine")
        again = without.search(images[row, None], 6)
        assert classes[row].tolist() == again[0][0].tolist()
        np.testing.assert_array_equal(distances[row], again[1][0])


@pytest.mark.parametrize("distance", DISTANCES)
def test_one_image_a_class_makes_all_rules_equal_and_nearest_is_the_search_of_images(distance):
    images, labels, _ = made(unit=False)
    queries = made(1, unit=False)[0]
    near, far = nearest_neighbors(queries, images, k=9, distance=distance)
    classes, distances = Identities(images, labels, "nearest", distance).search(queries, 9)
    np.testing.assert_array_equal(classes, labels[near])
    np.testing.assert_array_equal(distances, far)
    alone = np.arange(len(images))
    near, far = nearest_neighbors(queries, images, k=5, distance=distance)
    for rule in PER_CLASS:
        classes, distances = Identities(images, alone, rule, distance).search(queries, 5)
        np.testing.assert_array_equal(classes, near)
        np.testing.assert_array_equal(distances, far)


@pytest.mark.parametrize("rule", PER_CLASS)
def test_sets_are_as_far_apart_as_their_nearest_references(rule):
    images, sets, groups = made(classes=8)
    pairs = np.array([[a, b] for a in range(8) for b in range(a)])
    given = {} if rule == "nearest" else {"groups": [f"video {group}" for group in groups]}
    distances = set_distances(images, sets, pairs, per_class=rule, distance="cosine", **given)
    for (first, second), far in zip(pairs, distances, strict=True):
        sides = [
            references_by_hand(images[sets == name], groups[sets == name], rule, "cosine")
            for name in (first, second)
        ]
        expected = min(distance_between(a, b, "cosine") for a in sides[0] for b in sides[1])
        assert far == pytest.approx(expected, abs=1e-6)


def test_templates_are_those_of_ijb():
    """The unit mean of the means of a template's media, as insightface's script makes it; its
    score of a pair is their product."""
    images, templates, media = made(classes=4)
    features = images.astype(np.float64)
    vectors = []
    for name in np.unique(templates):
        mine = features[templates == name]
        of = media[templates == name]
        total = sum(mine[of == medium].mean(axis=0) for medium in np.unique(of))
        vectors.append(total / np.linalg.norm(total))
    pairs = [(0, 1), (0, 2), (2, 3), (1, 3)]
    distances = set_distances(images, templates, pairs, distance="cosine", groups=media)
    scores = [vectors[one] @ vectors[other] for one, other in pairs]
    np.testing.assert_allclose(1 - distances, scores, atol=1e-6)
    assert verify_pairs(distances, [True, False, True, False], folds=2)["auc"] >= 0


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Identities([[0.0]], np.array([0]), "median"), "per_class=median: unknown"),
        (lambda: Identities([[0.0]], np.array([0]), groups=np.array([0])), "per_class='mean'"),
        (lambda: set_distances([[0.0]], ["a"], [["a", "b"]]), "1 set has no image"),
        (lambda: set_distances([[0.0]], ["a"], ["a"]), "pairs of two sets"),
        (lambda: set_distances([[0.0]], ["a"], [["a", "a"]], groups=[1, 2]), "one for each"),
        (lambda: set_distances([[0.0]], ["a"], [["a", "a"]], groups=[None]), "have none"),
    ],
)
def test_what_makes_no_sense_is_refused(act, message):
    with pytest.raises(UserError, match=message):
        act()
