import numpy as np
import pytest

from tests.mathematics import degenerate_batches, random_batch
from tests.mining.given_pairs import given_pairs, masks
from tfdml import losses, pairwise
from tfdml.mining import BatchEasyHardMiner, BatchHardMiner, EasyPositiveMiner
from tfdml.pairs import Pairs

PAIRS = [
    (positives, negatives)
    for positives in ("easy", "hard", "semi_hard", "all")
    for negatives in ("easy", "hard", "semi_hard", "all")
    if "semi_hard" not in (positives, negatives) or {positives, negatives} & {"easy", "hard"}
]


def chosen(d, a, near, far, positives, negatives):
    """What an anchor keeps, in the words of the strategies."""
    by_distance = d[a].__getitem__
    easy = {"easy": lambda: min(near, key=by_distance), "hard": lambda: max(near, key=by_distance)}
    hard = {"easy": lambda: max(far, key=by_distance), "hard": lambda: min(far, key=by_distance)}
    if positives == "all" or negatives == "all":
        kept = near if positives == "all" else [easy[positives]()] if near else []
        return kept, far if negatives == "all" else [hard[negatives]()] if far else []
    if not near or not far:
        return [], []
    if positives == "semi_hard":
        n = hard[negatives]()
        within = [p for p in near if d[a][p] < d[a][n]]
        return ([max(within, key=by_distance)], [n]) if within else ([], [])
    p = easy[positives]()
    if negatives == "semi_hard":
        beyond = [n for n in far if d[a][n] > d[a][p]]
        return ([p], [min(beyond, key=by_distance)]) if beyond else ([], [])
    return [p], [hard[negatives]()]


@pytest.mark.parametrize(("positives", "negatives"), PAIRS)
def test_keeps_what_the_strategies_say(positives, negatives):
    dropped = 0
    for seed, (size, classes) in enumerate([(14, 4), (9, 8), (6, 1), (1, 1)]):
        labels, x = random_batch(seed, size, classes, 2)
        distances = np.asarray(pairwise.distances(x))
        kept = masks(BatchEasyHardMiner(positives, negatives)(given_pairs(distances, labels)))
        for a in range(size):
            near = [j for j in range(size) if labels[j] == labels[a] and j != a]
            far = [j for j in range(size) if labels[j] != labels[a]]
            expected = chosen(distances, a, near, far, positives, negatives)
            assert [np.flatnonzero(mask[a]).tolist() for mask in kept] == [sorted(part) for part in expected]
            dropped += not expected[0]
    assert dropped


def test_every_degenerate_batch_gives_pairs_of_the_batch():
    for labels, x in degenerate_batches().values():
        pairs = Pairs.of_batch(x, labels)
        for miner in (BatchEasyHardMiner(), BatchHardMiner(), BatchEasyHardMiner("semi_hard", "hard")):
            for mask, pair in zip(masks(miner(pairs)), masks(pairs), strict=True):
                assert not np.any(mask & ~pair)
                assert np.max(np.sum(mask, axis=1)) <= 1


def test_losses_know_miners_by_name():
    labels, x = random_batch(4, 12, 4, 5)
    by_name = losses.NTXentLoss(mining="easy_positive")
    assert repr(by_name.mining) == "EasyPositiveMiner(negatives='semi_hard')"
    np.testing.assert_array_equal(by_name(labels, x), losses.NTXentLoss(mining=EasyPositiveMiner())(labels, x))
    # The loss's own name for the same pairs comes first.
    assert losses.TripletLoss(mining="hard").mining == "hard"
    own, object_ = losses.TripletLoss(mining="hard"), losses.TripletLoss(mining="batch_hard")
    np.testing.assert_allclose(own(labels, x), object_(labels, x), rtol=1e-6)
    with pytest.raises(ValueError, match=r"or the name of a miner \(angular, batch_easy_hard, .*\), not 'batch_soft'"):
        losses.TripletLoss(mining="batch_soft")


def test_named_ones_are_their_strategies():
    assert (BatchHardMiner().positives, BatchHardMiner().negatives) == ("hard", "hard")
    assert (EasyPositiveMiner().positives, EasyPositiveMiner("all").negatives) == ("easy", "all")
    assert EasyPositiveMiner("hard").get_config() == {"negatives": "hard"}
    assert BatchHardMiner().get_config() == {}


@pytest.mark.parametrize("pair", [("semi_hard", "semi_hard"), ("all", "semi_hard"), ("semi_hard", "all")])
def test_what_gives_no_bound_does_not_go_with_semi_hard(pair):
    with pytest.raises(ValueError, match="do not go together"):
        BatchEasyHardMiner(*pair)
    with pytest.raises(ValueError, match="negatives must be 'easy', 'semi_hard', 'hard' or 'all', not 'near'"):
        EasyPositiveMiner("near")
