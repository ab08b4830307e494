"""Data sets, sampling, augmentation and the input pipeline."""

from tfdml.data.catalogue import load, names
from tfdml.data.dataset import ArrayImages, EncodedImages, FileImages, ImageDataset
from tfdml.data.decoding import decode_image
from tfdml.data.pipeline import class_balanced, evaluation_batches, explain_failure, shuffled, training_batches
from tfdml.data.sampling import ClassBalancedSampler, Sampler, ShuffleSampler
from tfdml.data.transforms import EvaluationTransform, TrainTransform

__all__ = [
    "ArrayImages",
    "ClassBalancedSampler",
    "EncodedImages",
    "EvaluationTransform",
    "FileImages",
    "ImageDataset",
    "Sampler",
    "ShuffleSampler",
    "TrainTransform",
    "class_balanced",
    "decode_image",
    "evaluation_batches",
    "explain_failure",
    "load",
    "names",
    "shuffled",
    "training_batches",
]
