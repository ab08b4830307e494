"""Losses with distances, miners and relations of their own."""

import dataclasses
import json

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.mathematics import (
    assert_close,
    finite_differences,
    random_batch,
    value_and_gradients,
)
from tfdml import losses, mining, objectives


@keras.saving.register_keras_serializable("tests.composing")
class Stretched(mining.Distance):
    """Squared distances with a weight for each coordinate."""

    def __init__(self, slope=0.1):
        self.slope = slope

    def __call__(self, a, b):
        weights = 1.0 + self.slope * ops.arange(a.shape[1], dtype="float32")
        return ops.sum(weights * ops.square(a[:, None] - b[None]), axis=2)


@keras.saving.register_keras_serializable("tests.composing")
class HalfDot(mining.Distance):
    """A similarity."""

    larger_is_closer = True

    def __call__(self, a, b):
        return 0.5 * ops.matmul(a, ops.transpose(b))


@keras.saving.register_keras_serializable("tests.composing")
def taxicab(a, b):
    """A function in the place of an object."""
    return ops.sum(ops.abs(a[:, None] - b[None]), axis=2)


@keras.saving.register_keras_serializable("tests.composing")
class Between(mining.Miner):
    """Positives that are apart, and negatives that are near."""

    def __init__(self, least=0.3, most=1.1):
        self.least, self.most = least, most

    def __call__(self, pairs):
        distances = pairs.distances()
        return pairs.keep(distances > self.least, distances < self.most)


DISTANCES = {
    "stretched": (
        Stretched(0.2),
        lambda a, b: float(np.sum((1 + 0.2 * np.arange(len(a))) * (a - b) ** 2)),
    ),
    "half dot": (HalfDot(), lambda a, b: -0.5 * float(a @ b)),
    "taxicab": (taxicab, lambda a, b: float(np.abs(a - b).sum())),
    "sqeuclidean": ("sqeuclidean", lambda a, b: float(np.sum((a - b) ** 2))),
}
RANGE = {
    "stretched": (0.8, 3.1),
    "half dot": (-0.3, 0.11),
    "taxicab": (1.0, 3.0),
    "sqeuclidean": (0.8, 2.4),
}


def cosine(a, b):
    return float(a @ b) / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-30)


def composed():
    """Each loss with a miner, and a distance where it has one: (loss, distance, range of the
    miner)."""
    for name, (distance, measure) in DISTANCES.items():
        both = {"distance": distance, "mining": Between(*RANGE[name])}
        yield f"contrastive {name}", losses.ContrastiveLoss(2.0, **both), measure, RANGE[name]
        yield f"triplet {name}", losses.TripletLoss(0.4, **both), measure, RANGE[name]
        yield f"quadruplet {name}", losses.QuadrupletLoss(0.4, 0.2, **both), measure, RANGE[name]
    on_cosines = (lambda a, b: 1 - cosine(a, b)), (0.3, 1.1)
    miner = Between()
    yield "cosine_contrastive", losses.CosineContrastiveLoss(0.2, mining=miner), *on_cosines
    yield "binomial", losses.BinomialDevianceLoss(2.0, 0.5, 5.0, mining=miner), *on_cosines
    yield "multi_similarity", losses.MultiSimilarityLoss(beta=10.0, mining=miner), *on_cosines
    yield "circle", losses.CircleLoss(0.4, 3.0, mining=miner), *on_cosines
    lifted = losses.LiftedStructureLoss(mining=Between(0.6, 1.4))
    yield "lifted", lifted, (lambda a, b: float(np.linalg.norm(a - b))), (0.6, 1.4)


COMPOSED = {name: case for name, *case in composed()}
every_loss = pytest.mark.parametrize(("loss", "measure", "limits"), COMPOSED.values(), ids=COMPOSED)


@every_loss
@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_value_and_gradient_are_those_of_the_pairs_that_the_miner_keeps(
    loss, measure, limits, mode
):
    """The loss of these pairs alone, given one by one, is tested against its formula."""
    y, x = random_batch(3, 9, 3, 4)
    least, most = limits
    pairs = [
        (i, j) for i in range(9) for j in range(i) if measure(x[i], x[j]) > least or y[i] != y[j]
    ]
    pairs = [(i, j) for i, j in pairs if measure(x[i], x[j]) < most or y[i] == y[j]]
    given = [(i, j, y[i] == y[j]) for i, j in pairs]
    for same in (True, False):
        every = sum((y[i] == y[j]) == same for i in range(9) for j in range(i))
        assert 0 < sum(similar == same for *_, similar in given) < every
    alone = type(loss).from_config(
        {**loss.get_config(), "mining": "all", "positives": mining.GivenPairs(given)}
    )
    expected, (slope,) = value_and_gradients(lambda e: alone(np.arange(9), e), x)
    value, (gradient,) = value_and_gradients(lambda e: loss(y, e), x, mode=mode)
    assert_close(value, expected)
    assert np.any(slope)
    assert_close(gradient, slope)


@pytest.mark.parametrize("name", DISTANCES)
def test_a_distance_of_ones_own_is_that_of_the_loss(name):
    distance, measure = DISTANCES[name]
    y, x = random_batch(3, 9, 3, 4)
    loss = losses.ContrastiveLoss(2.0, distance, average="all")

    def reference(x):
        d = [[measure(a, b) for b in x] for a in x]
        pull = [d[i][j] for i in range(9) for j in range(9) if i != j and y[i] == y[j]]
        push = [max(2.0 - d[i][j], 0.0) for i in range(9) for j in range(9) if y[i] != y[j]]
        return np.mean(pull) + np.mean(push)

    value, (gradient,) = value_and_gradients(lambda e: loss(y, e), x)
    assert_close(value, reference(np.float64(x)))
    assert_close(gradient, finite_differences(reference, x)[0], 2e-5)


@every_loss
def test_a_composed_loss_is_saved_and_loaded(loss, measure, limits):
    term = objectives.MetricLoss(loss, weight=0.5, name="mine")
    stored = json.loads(json.dumps(keras.saving.serialize_keras_object(term)))
    again = keras.saving.deserialize_keras_object(stored)
    y, x = random_batch(4, 8, 3, 4)
    assert again.loss.get_config() == loss.get_config()
    np.testing.assert_array_equal(again.loss(y, x), loss(y, x))


def test_a_miner_cannot_make_pairs_and_gets_no_gradient():
    seen = []

    def everything(pairs):
        seen.append((pairs.distances().shape, pairs.positives.dtype, pairs.negatives.dtype))
        everyone = ops.ones_like(pairs.positives)
        return dataclasses.replace(pairs, positives=everyone, negatives=everyone)

    y, x = random_batch(1, 7, 3, 4)
    plain, mined = losses.ContrastiveLoss(), losses.ContrastiveLoss(mining=everything)
    np.testing.assert_array_equal(mined(y, x), plain(y, x))
    assert seen == [((7, 7), "bool", "bool")]


REFUSED = [
    ("distance", lambda: losses.ContrastiveLoss(distance=Stretched)),
    ("distance", lambda: losses.NTXentLoss(distance="dot")),
    ("matrix", lambda: losses.ContrastiveLoss(distance=lambda a, b: taxicab(a, b)[:1])),
    ("__call__", lambda: losses.ContrastiveLoss(distance=mining.Distance())),
    ("mining", lambda: losses.ContrastiveLoss(mining="hard")),
    ("mining", lambda: losses.ContrastiveLoss(mining=Between)),
    ("mining", lambda: losses.ContrastiveLoss(mining=lambda pairs: pairs.negatives)),
    ("__call__", lambda: losses.ContrastiveLoss(mining=mining.Miner())),
    ("semi-hard", lambda: mining.BatchEasyHardMiner("semi_hard", "semi_hard")),
    ("negatives", lambda: mining.EasyPositiveMiner("near")),
    ("pairs", lambda: mining.GivenPairs([])),
    ("pairs", lambda: mining.GivenPairs([(0, 1, np.nan)])),
    ("integers", lambda: mining.GivenPairs([(0, 2**31, 1)])),
    ("two similarities", lambda: mining.GivenPairs([(3, 4, 1), (4, 3, 0)])),
]


@pytest.mark.parametrize(("word", "make"), REFUSED)
def test_what_cannot_be_composed_is_refused(word, make):
    with pytest.raises((ValueError, TypeError), match=word):
        make()(*random_batch(1, 6, 3, 4))


def test_multi_similarity_of_all_pairs_is_that_without_its_mining():
    y, x = random_batch(1, 9, 3, 4)
    expected = losses.MultiSimilarityLoss(mining_epsilon=None)(y, x)
    np.testing.assert_array_equal(losses.MultiSimilarityLoss(mining="all")(y, x), expected)
    assert losses.MultiSimilarityLoss()(y, x) != expected


def test_given_pairs_are_looked_up_as_in_a_dictionary():
    rng = np.random.default_rng(0)
    ids = rng.choice(2**31 - 1, 40, replace=False)
    known = {}
    for _ in range(300):
        a, b = rng.choice(ids[:30], 2, replace=False)
        known.setdefault(frozenset((int(a), int(b))), float(rng.normal()))
    relation = mining.GivenPairs([(*pair, value) for pair, value in known.items()], threshold=0.0)
    a, b = ids[:35], rng.permutation(ids)[:17]
    expected = [[known.get(frozenset((int(i), int(j))), np.nan) for j in b] for i in a]
    np.testing.assert_array_equal(relation(a[:, None], b[:, None]), np.float32(expected))
    again = mining.GivenPairs.from_config(json.loads(json.dumps(relation.get_config())))
    np.testing.assert_array_equal(again(a[:, None], b[:, None]), np.float32(expected))
    assert again.threshold == 0.0
