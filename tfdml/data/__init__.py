"""Data sets, sampling, augmentation and the input pipeline."""

from tfdml.data.batches import distributed, hierarchical, whole_classes
from tfdml.data.catalogue import load, names
from tfdml.data.dataset import ArrayImages, EncodedImages, FileImages, ImageDataset, RecordImages
from tfdml.data.decoding import decode_image
from tfdml.data.pipeline import class_balanced, evaluation_batches, explain_failure, shuffled, training_batches
from tfdml.data.policies import Policy, Step
from tfdml.data.preview import contact_sheet
from tfdml.data.sampling import (
    ClassBalancedSampler,
    HierarchicalSampler,
    Sampler,
    ShuffleSampler,
    WholeClassSampler,
    share,
)
from tfdml.data.transforms import EvaluationTransform, TrainTransform

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
    "Sampler",
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
    "hierarchical",
    "load",
    "names",
    "share",
    "shuffled",
    "training_batches",
    "whole_classes",
]
