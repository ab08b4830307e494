"""Choosing pairs and tuples of a batch: functions from distances or similarities to masks, weights or indices."""

from tfdml.mining.distance_weighted import negative_probabilities, sample_negatives
from tfdml.mining.multi_similarity import multi_similarity_pairs
from tfdml.mining.semi_hard import semi_hard_negatives

__all__ = ["multi_similarity_pairs", "negative_probabilities", "sample_negatives", "semi_hard_negatives"]
