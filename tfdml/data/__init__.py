"""Data sets, sampling, augmentation and the input pipeline."""

from tfdml.data.catalogue import load, names
from tfdml.data.dataset import ImageDataset, PairList
from tfdml.data.decoding import decode_image
from tfdml.data.faults import explain_failure
from tfdml.data.images import ArrayImages, EncodedImages, FileImages, VectorImages
from tfdml.data.pipeline import (
    class_balanced,
    contact_sheet,
    distributed,
    evaluation_batches,
    hierarchical_sampler,
    shuffled,
    training_batches,
)
from tfdml.data.policies import Policy, Step
from tfdml.data.records import RecordImages, RecordSettings, prepare
from tfdml.data.sampling import (
    ArrayBatches,
    ClassBalancedSampler,
    HierarchicalSampler,
    NeighborSampler,
    PairSampler,
    Sampler,
    Share,
    ShuffleSampler,
    TwoViewSampler,
    WholeClassSampler,
)
from tfdml.data.transforms import EvaluationTransform, TrainTransform

__all__ = [
    "ArrayBatches",
    "ArrayImages",
    "ClassBalancedSampler",
    "EncodedImages",
    "EvaluationTransform",
    "FileImages",
    "HierarchicalSampler",
    "ImageDataset",
    "NeighborSampler",
    "PairList",
    "PairSampler",
    "Policy",
    "RecordImages",
    "RecordSettings",
    "Sampler",
    "Share",
    "ShuffleSampler",
    "Step",
    "TrainTransform",
    "TwoViewSampler",
    "VectorImages",
    "WholeClassSampler",
    "class_balanced",
    "contact_sheet",
    "decode_image",
    "distributed",
    "evaluation_batches",
    "explain_failure",
    "hierarchical_sampler",
    "load",
    "names",
    "prepare",
    "shuffled",
    "training_batches",
]
