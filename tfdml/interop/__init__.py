"""Losses by the names and arguments of another library; its data and indexes as ours, and ours as its."""

from tfdml.interop.pml import NormalizedLoss, from_pml
from tfdml.interop.similarity import build_indexer, read_indexer, sampler_dataset

__all__ = ["NormalizedLoss", "build_indexer", "from_pml", "read_indexer", "sampler_dataset"]
