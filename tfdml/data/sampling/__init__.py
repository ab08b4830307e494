"""Which images make up the batch of a training step: a pure function of the seed and the step.

Nothing is iterated and nothing remembered, so a run resumed at any step sees the batches that an unbroken run would
have seen. Orders come from keyed permutations that are evaluated only at the positions wanted, and from the plan of a
pass, which is laid out once and holds for thousands of batches: a batch costs the same whether there are a hundred
classes or a million.
"""

from tfdml.data.sampling.class_balanced import ClassBalancedSampler
from tfdml.data.sampling.hierarchical import HierarchicalSampler
from tfdml.data.sampling.permutation import permute
from tfdml.data.sampling.protocol import Sampler
from tfdml.data.sampling.share import Share, check_divides
from tfdml.data.sampling.shuffle import ShuffleSampler
from tfdml.data.sampling.whole_classes import WholeClassSampler

__all__ = [
    "ClassBalancedSampler",
    "HierarchicalSampler",
    "Sampler",
    "Share",
    "ShuffleSampler",
    "WholeClassSampler",
    "check_divides",
    "permute",
]
