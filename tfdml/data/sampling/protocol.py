"""What a sampler is."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Sampler(Protocol):
    """What `tfdml.data.training_batches` needs of a sampler."""

    @property
    def batch_size(self) -> int:
        """Images per batch, B."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches per epoch."""

    def batch(self, step: int) -> np.ndarray:
        """(B,) int64 indices of the images of step `step`."""
