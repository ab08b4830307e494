"""Losses by the names and arguments of another library."""

from tfdml.interop.pml import NormalizedLoss as NormalizedLoss
from tfdml.interop.pml import from_pml as from_pml
