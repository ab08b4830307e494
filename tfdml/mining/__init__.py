"""Miners, which choose the pairs that a loss learns from, and the base classes of your own.

A loss takes a `Miner` as `mining` and a `Distance` as `distance`. A `Relation` decides which images belong together
where labels are sets or hierarchies. The functions compute masks, weights or indices from `tfdml.pairs.Pairs`.
"""

from tfdml.mining.angular import AngularMiner
from tfdml.mining.batch_easy_hard import BatchEasyHardMiner, BatchHardMiner, EasyPositiveMiner
from tfdml.mining.composing import Distance, Miner
from tfdml.mining.distance_weighted import negative_probabilities, sample_negatives
from tfdml.mining.multi_similarity import multi_similarity_pairs
from tfdml.mining.of_the_batch import HardAwareMiner, UniformHistogramMiner
from tfdml.mining.relations import Relation, SameLabel, shares_a_label
from tfdml.mining.semi_hard import semi_hard_negatives

__all__ = [
    "AngularMiner",
    "BatchEasyHardMiner",
    "BatchHardMiner",
    "Distance",
    "EasyPositiveMiner",
    "HardAwareMiner",
    "Miner",
    "Relation",
    "SameLabel",
    "UniformHistogramMiner",
    "multi_similarity_pairs",
    "negative_probabilities",
    "sample_negatives",
    "semi_hard_negatives",
    "shares_a_label",
]
