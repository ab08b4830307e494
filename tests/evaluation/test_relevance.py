"""Relevance: every metric against slow definitions, with ties, ignored images and queries without
an answer."""

import dataclasses

import numpy as np
import pytest

from tests.evaluation.rankings import METRICS, check, slow
from tfdml.data import ImageDataset, PairList
from tfdml.data.dataset import Protocol
from tfdml.errors import UserError
from tfdml.evaluation import (
    Relevance,
    dataset_protocol,
    evaluate_dataset,
    evaluate_retrieval,
    retrieval_per_query,
)
from tfdml.evaluation import retrieval as module


def made(seed, count=60, side=3):
    """Points of a coarse grid, so that most distances are tied; classes, of which some have one
    image; groups."""
    rng = np.random.default_rng(seed)
    return (
        rng.integers(0, side, size=(count, 2)),
        rng.integers(0, 20, count),
        rng.integers(0, 3, count),
    )


@pytest.mark.parametrize("counted", [0, 64])
@pytest.mark.parametrize("budget", [1, 2**28])
def test_same_class_and_group_is_ignored_all_to_all(counted, budget, monkeypatch):
    monkeypatch.setattr(module, "_COUNTED", counted)
    points, labels, cameras = made(0)
    junk = np.arange(60) % 11 == 3
    relevance = Relevance.classes(labels, not_same=cameras, junk=junk)
    found = retrieval_per_query(points, relevance=relevance, metrics=METRICS, memory_budget=budget)
    expected = slow(
        points,
        points,
        lambda query, row: labels[row] == labels[query],
        lambda query, row: (
            junk[row] or (labels[row] == labels[query] and cameras[row] == cameras[query])
        ),
        lambda query: query,
    )
    check(found, expected)
    assert 0 < np.isnan(expected["map"]).sum() < 30


@pytest.mark.parametrize("own", [False, True])
def test_lists_of_each_query(own):
    """As Revisited Oxford has them; with `own_rows` the query is in the gallery, and perhaps in its
    own lists."""
    rng = np.random.default_rng(2)
    gallery = rng.integers(0, 4, size=(50, 2))
    rows = rng.permutation(50)[:20]
    points = gallery[rows] if own else rng.integers(0, 4, size=(20, 2))
    drawn = [rng.permutation(50) for _ in range(20)]
    sizes = rng.integers(0, 7, 20)
    positives = [order[:size] for order, size in zip(drawn, sizes, strict=True)]
    ignored = [order[size : 2 * size + 3] for order, size in zip(drawn, sizes, strict=True)]
    if own:
        positives[0], ignored[0] = [rows[0]], []  # itself alone: nothing to find
    found = retrieval_per_query(
        points,
        gallery=gallery,
        relevance=Relevance.lists(positives, ignored),
        own_rows=rows if own else None,
        metrics=METRICS,
    )
    expected = slow(
        points,
        gallery,
        lambda query, row: row in positives[query],
        lambda query, row: row in ignored[query],
        lambda query: rows[query] if own else None,
    )
    check(found, expected)
    assert np.isnan(expected["map"]).any()


def test_every_level_of_a_hierarchy():
    rng = np.random.default_rng(6)
    points, fine = rng.normal(size=(80, 3)), rng.integers(0, 20, 80)
    levels = np.stack([fine, fine // 3, fine // 9], axis=1)
    relevance = Relevance.levels(levels)
    names = ("recall@1", "map@r", "map")
    values = retrieval_per_query(points, relevance=relevance, metrics=names)
    found = evaluate_retrieval(
        points, relevance=relevance, metrics=[*names, "nmi"], intervals="classes"
    )
    for level in range(3):
        alone = evaluate_retrieval(
            points, levels[:, level], metrics=[*names, "nmi"], intervals="classes"
        )
        for name in names:
            one_level = retrieval_per_query(points, levels[:, level], metrics=[name])[name]
            # Sums of more terms may round differently: the search of all levels goes as deep as the
            # coarsest needs.
            np.testing.assert_allclose(values[f"{name}/{level}"], one_level, rtol=1e-12)
            assert found["intervals"][f"{name}/{level}"] == pytest.approx(
                alone["intervals"][name], abs=1e-12
            )
        for name in (*names, "nmi", "queries_without_match"):
            assert found[f"{name}/{level}"] == pytest.approx(alone[name], abs=1e-12)
    every = np.arange(80)
    shared = (levels[every[:, None]] == levels[every[None, :]]).mean(axis=2)
    np.testing.assert_allclose(relevance.of(every, np.tile(every, (80, 1))), shared)
    assert relevance.matches.tolist() == (shared > 0).sum(axis=1).tolist()


POINTS, LABELS, CAMERAS = made(7)
SETS = (np.random.default_rng(0).random((60, 6)) < 0.25).astype(int)
LEVELS = np.stack([LABELS, LABELS // 3, LABELS // 9], axis=1)
NEXT = {row + 100: [(row + 1) % 60 + 100] for row in range(60)}
LAST = {row + 100: [(row + 59) % 60 + 100] for row in range(60)}


def neighbors_of(rows, among, step):
    """Of each of these rows, the place of the row after or before it, where it is searched."""
    return [
        [place for place in range(len(among)) if among[place] == (row + step) % 60] for row in rows
    ]


def sharing(rows, among):
    """Of each of these rows, the places of those that have a label in common."""
    return [np.flatnonzero((SETS[among] & SETS[row]).any(axis=1)) for row in rows]


# What a data set has beside its classes, and what is then relevant for queries among images.
PROTOCOLS = {
    "classes": ({}, lambda rows, among: Relevance.classes(LABELS[rows], LABELS[among])),
    "cameras": (
        {"groups": CAMERAS},
        lambda rows, among: Relevance.classes(
            LABELS[rows], LABELS[among], not_same=CAMERAS[rows], gallery_not_same=CAMERAS[among]
        ),
    ),
    "sets": ({"label_rows": SETS}, lambda rows, among: Relevance.lists(sharing(rows, among))),
    "levels": (
        {"protocol": Protocol(("map",), levels=LEVELS)},
        lambda rows, among: Relevance.levels(LEVELS[rows], LEVELS[among]),
    ),
    "lists": (
        {"protocol": Protocol(("map",), ids=np.arange(60) + 100, lists=(NEXT, LAST))},
        lambda rows, among: Relevance.lists(
            neighbors_of(rows, among, 1), neighbors_of(rows, among, 59)
        ),
    ),
}


@pytest.mark.parametrize("roles", [False, True])
@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_data_set_is_measured_by_its_protocol(name, roles):
    fields, relevance = PROTOCOLS[name]
    is_query = np.arange(60) % 3 == 0
    dataset = ImageDataset("made", "test", np.zeros((60, 4, 4, 3), np.uint8), LABELS, **fields)
    dataset = dataclasses.replace(dataset, is_query=is_query if roles else None)
    rows, among = (
        (np.flatnonzero(is_query), np.flatnonzero(~is_query))
        if roles
        else (np.arange(60), np.arange(60))
    )
    sides = {
        "gallery": POINTS[among],
        "relevance": relevance(rows, among),
        "own_rows": None if roles else rows,
    }
    metrics = ["recall@1", "map", "map@r", "ndcg"]
    expected = evaluate_retrieval(POINTS[rows], **sides, metrics=metrics)
    assert evaluate_dataset(POINTS, dataset, metrics=metrics) == pytest.approx(expected, rel=1e-12)
    if name != "levels":
        values = retrieval_per_query(**dataset_protocol(POINTS, dataset), metrics=["map"])["map"]
        np.testing.assert_allclose(np.nanmean(values), expected["map"], rtol=1e-12)


def test_a_part_of_a_data_set_keeps_its_protocol():
    fields = {"protocol": Protocol(("recall",), ids=np.arange(60) + 100, lists=(NEXT, LAST))}
    dataset = ImageDataset("made", "test", np.zeros((60, 4, 4, 3), np.uint8), LABELS, **fields)
    part = evaluate_dataset(np.array([[0.0], [1.0], [9.0]]), dataset.take([4, 5, 30]))
    assert (part["recall@1"], part["queries_without_match"]) == (1, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Relevance.lists([[0], [1]], [[0], [2]]), "relevant and ignored"),
        (lambda: Relevance.classes([0, 1], junk=[0, 1]), "junk"),
        (lambda: Relevance.levels([[0, 1], [0, 2]]), "level"),
        (lambda: Relevance.classes([0, 0, 1], [0, 1]), "2 gallery images"),
        (lambda: Relevance.lists([[1], [3], []]), "row 3"),
        (lambda: Relevance.classes([0, 0, 1], not_same=[5, 5, 5]), "no query"),
        (lambda: Relevance.levels([[0, 0], [1, 0], [2, 0]]), "level 0"),
    ],
)
def test_relevance_that_is_none_or_does_not_fit_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        evaluate_retrieval(np.eye(3), relevance=make(), ks=[1])


def test_given_pairs_of_a_data_set_are_measured_beside_retrieval():
    x, rows = (
        np.random.default_rng(0).normal(size=(6, 3)),
        np.array([[0, 1], [2, 3], [0, 4], [1, 5]]),
    )
    pairs = PairList(rows, np.array([1, 1, 0, 0]))
    dataset = ImageDataset(
        images=np.zeros((6, 2, 2, 3), np.uint8), labels=[0, 0, 1, 1, 2, 2], pairs=pairs
    )
    found = evaluate_dataset(x, dataset, metrics=["recall"], ks=[1])
    assert {"recall@1", "auc", "accuracy", "eer"} <= {*found}
