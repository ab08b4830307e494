"""Data sets, sampling, augmentation and the input pipeline, each imported on first use."""

from typing import TYPE_CHECKING

from tfdml.registry import imported_later

_PARTS = {
    "tfdml.data.catalog": (
        "load",
        "names",
    ),
    "tfdml.data.dataset": (
        "ImageDataset",
        "PairList",
    ),
    "tfdml.data.decoding": ("decode_image",),
    "tfdml.data.faults": ("explain_failure",),
    "tfdml.data.images": (
        "ArrayImages",
        "EncodedImages",
        "FileImages",
        "OptionalImages",
    ),
    "tfdml.data.pipeline": (
        "class_balanced",
        "evaluation_batches",
        "training_batches",
    ),
    "tfdml.data.policies": (
        "Policy",
        "Step",
    ),
    "tfdml.data.preparation": ("prepare",),
    "tfdml.data.sampling": (
        "ArrayBatches",
        "ClassBalancedSampler",
        "HierarchicalSampler",
        "NeighborSampler",
        "PairSampler",
        "Sampler",
        "Share",
        "ShuffleSampler",
        "WholeClassSampler",
    ),
    "tfdml.data.transforms": (
        "EvaluationTransform",
        "TrainTransform",
    ),
}

if TYPE_CHECKING:
    from tfdml.data.catalog import load as load
    from tfdml.data.catalog import names as names
    from tfdml.data.dataset import ImageDataset as ImageDataset
    from tfdml.data.dataset import PairList as PairList
    from tfdml.data.decoding import decode_image as decode_image
    from tfdml.data.faults import explain_failure as explain_failure
    from tfdml.data.images import ArrayImages as ArrayImages
    from tfdml.data.images import EncodedImages as EncodedImages
    from tfdml.data.images import FileImages as FileImages
    from tfdml.data.images import OptionalImages as OptionalImages
    from tfdml.data.pipeline import class_balanced as class_balanced
    from tfdml.data.pipeline import evaluation_batches as evaluation_batches
    from tfdml.data.pipeline import training_batches as training_batches
    from tfdml.data.policies import Policy as Policy
    from tfdml.data.policies import Step as Step
    from tfdml.data.preparation import prepare as prepare
    from tfdml.data.sampling import ArrayBatches as ArrayBatches
    from tfdml.data.sampling import ClassBalancedSampler as ClassBalancedSampler
    from tfdml.data.sampling import HierarchicalSampler as HierarchicalSampler
    from tfdml.data.sampling import NeighborSampler as NeighborSampler
    from tfdml.data.sampling import PairSampler as PairSampler
    from tfdml.data.sampling import Sampler as Sampler
    from tfdml.data.sampling import Share as Share
    from tfdml.data.sampling import ShuffleSampler as ShuffleSampler
    from tfdml.data.sampling import WholeClassSampler as WholeClassSampler
    from tfdml.data.transforms import EvaluationTransform as EvaluationTransform
    from tfdml.data.transforms import TrainTransform as TrainTransform
else:
    __getattr__, __dir__ = imported_later(__name__, _PARTS)
