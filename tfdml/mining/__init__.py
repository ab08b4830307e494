"""Miners, which choose the pairs that a loss learns from, and the base classes of your own.

A loss takes a `Miner` as `mining` and a `Distance` as `distance`. A `Relation` decides which images belong together
where labels are sets or hierarchies, or where pairs are given one by one. The functions compute masks, weights or
indices from `tfdml.pairs.Pairs`.
"""

from tfdml.mining.base import Distance, GivenPairs, Jaccard, Miner, Relation, SameLabel, shares_a_label
from tfdml.mining.miners import (
    AngularMiner,
    BatchEasyHardMiner,
    BatchHardMiner,
    EasyPositiveMiner,
    HardAwareMiner,
    multi_similarity_pairs,
    negative_probabilities,
    sample_negatives,
    semi_hard_negatives,
)

__all__ = [
    "AngularMiner",
    "BatchEasyHardMiner",
    "BatchHardMiner",
    "Distance",
    "EasyPositiveMiner",
    "GivenPairs",
    "HardAwareMiner",
    "Jaccard",
    "Miner",
    "Relation",
    "SameLabel",
    "multi_similarity_pairs",
    "negative_probabilities",
    "sample_negatives",
    "semi_hard_negatives",
    "shares_a_label",
]
