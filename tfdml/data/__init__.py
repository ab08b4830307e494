"""Data sets, sampling, augmentation and the input pipeline."""

from tfdml.data.augmentation.evaluation import EvaluationTransform
from tfdml.data.augmentation.policies import Policy, Step
from tfdml.data.augmentation.preview import contact_sheet
from tfdml.data.augmentation.train import TrainTransform
from tfdml.data.batches import class_balanced, distributed, hierarchical_sampler, shuffled
from tfdml.data.catalogue import load, names
from tfdml.data.dataset import ImageDataset
from tfdml.data.failures import explain_failure
from tfdml.data.images import ArrayImages, EncodedImages, FileImages, RecordImages
from tfdml.data.images.decoding import decode_image
from tfdml.data.pipeline import evaluation_batches, training_batches
from tfdml.data.records import RecordSettings, prepare
from tfdml.data.sampling import (
    ClassBalancedSampler,
    HierarchicalSampler,
    Sampler,
    Share,
    ShuffleSampler,
    WholeClassSampler,
)

__all__ = [
    "ArrayImages",
    "ClassBalancedSampler",
    "EncodedImages",
    "EvaluationTransform",
    "FileImages",
    "HierarchicalSampler",
    "ImageDataset",
    "Policy",
    "RecordImages",
    "RecordSettings",
    "Sampler",
    "Share",
    "ShuffleSampler",
    "Step",
    "TrainTransform",
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
