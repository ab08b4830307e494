"""Miners, which choose the pairs that a loss learns from, and the base classes of your own.

A loss takes a `Miner` as `mining` and a `Distance` as `distance`. A `Relation` decides which images
belong together where labels are sets or hierarchies, or where pairs are given one by one. The
functions compute masks, weights or indices from `tfdml.pairs.Pairs`.
"""

from tfdml.mining.base import Distance as Distance
from tfdml.mining.base import GivenPairs as GivenPairs
from tfdml.mining.base import Jaccard as Jaccard
from tfdml.mining.base import Miner as Miner
from tfdml.mining.base import Relation as Relation
from tfdml.mining.base import SameLabel as SameLabel
from tfdml.mining.base import same_label_or_text as same_label_or_text
from tfdml.mining.base import shares_a_label as shares_a_label
from tfdml.mining.miners import AngularMiner as AngularMiner
from tfdml.mining.miners import BatchEasyHardMiner as BatchEasyHardMiner
from tfdml.mining.miners import BatchHardMiner as BatchHardMiner
from tfdml.mining.miners import EasyPositiveMiner as EasyPositiveMiner
from tfdml.mining.miners import HardAwareMiner as HardAwareMiner
from tfdml.mining.miners import multi_similarity_pairs as multi_similarity_pairs
from tfdml.mining.miners import negative_probabilities as negative_probabilities
from tfdml.mining.miners import sample_negatives as sample_negatives
from tfdml.mining.miners import semi_hard_negatives as semi_hard_negatives
