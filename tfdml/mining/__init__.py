"""Choosing pairs and tuples of a batch: functions from distances or similarities to masks, weights or indices.

`Miner` and `Distance` are what one gives a loss as `mining` and `distance` where none of its own will do.
"""

from tfdml.mining.composing import Distance, Miner
from tfdml.mining.distance_weighted import negative_probabilities, sample_negatives
from tfdml.mining.multi_similarity import multi_similarity_pairs
from tfdml.mining.semi_hard import semi_hard_negatives

__all__ = [
    "Distance",
    "Miner",
    "multi_similarity_pairs",
    "negative_probabilities",
    "sample_negatives",
    "semi_hard_negatives",
]
