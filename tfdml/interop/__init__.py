"""Losses by the names, arguments and conventions of another library."""

from tfdml.interop.normalized import NormalizedLoss
from tfdml.interop.pml import from_pml

__all__ = ["NormalizedLoss", "from_pml"]
