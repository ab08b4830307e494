"""Losses by the names and arguments of another library; its data and indexes as ours, and ours as its."""

from tfdml.interop.pml import NormalizedLoss as NormalizedLoss
from tfdml.interop.pml import from_pml as from_pml
from tfdml.interop.similarity import build_indexer as build_indexer
from tfdml.interop.similarity import read_indexer as read_indexer
from tfdml.interop.similarity import sampler_dataset as sampler_dataset
