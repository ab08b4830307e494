"""Which of the proxies of a run are of no use: nearest of no image, or without a gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
from keras import ops

from tfdml.objectives import ProxyLoss
from tfdml.training.watching.alarms import IDLE_IMAGES, IDLE_SHARE, UNMOVED_SHARE
from tfdml.training.watching.statistics import nearest_proxies

# Of more proxies only so many are watched.
_MOST = 65536


class ProxyWatch:
    """Follows the proxies of one objective along the sampled batches.

    Idle is a proxy that was the nearest of no image since 20 images (times the proxies of a class) of its class were
    sampled. Unmoved is one whose direction has turned in an epoch by less than a thousandth of the median of all:
    weight decay shortens a proxy without a gradient, and does not turn it.

    Args:
        objective: The objective that owns the proxies.
    """

    def __init__(self, objective: ProxyLoss):
        self.objective = objective
        per_class = objective.proxies_per_class
        count = min(objective.num_classes, _MOST // per_class) * per_class
        self._classes = np.arange(count) // per_class
        self._images = np.zeros(objective.num_classes, np.int64)
        #: How many images of its class had been sampled when a proxy was last the nearest.
        self._when_used = np.zeros(count, np.int64)
        self._patience = IDLE_IMAGES * per_class
        self._directions: np.ndarray | None = None

    def follow(self, vectors: np.ndarray, labels: np.ndarray) -> None:
        """Count a batch.

        Args:
            vectors: (B, d) what the objective compares with its proxies.
            labels: (B,) class ids.
        """
        self._images += np.bincount(labels, minlength=len(self._images))
        used = np.unique(nearest_proxies(vectors, self._rows()))
        self._when_used[used] = self._images[self._classes[used]]

    def idle(self) -> np.ndarray:
        """The idle proxies, by their rows: proxy k of class c is row c K + k."""
        return np.flatnonzero(self._images[self._classes] - self._when_used >= self._patience)

    def begin_epoch(self) -> None:
        """Note where the proxies point."""
        self._directions = self._pointing()

    def unmoved(self) -> np.ndarray:
        """The proxies that have not turned since the epoch began."""
        if self._directions is None:
            return np.zeros(0, np.int64)
        turned = np.linalg.norm(self._pointing() - self._directions, axis=1)
        median = float(np.median(turned))
        return np.flatnonzero(turned < UNMOVED_SHARE * median)

    def dead(self) -> str:
        """What says that proxies are dead; empty: nothing."""
        idle, unmoved, count = self.idle(), self.unmoved(), len(self._classes)
        if len(unmoved):
            return (
                f"{self._named(unmoved)} got no gradient in an epoch, of the {count} proxies of {self.objective.name}"
            )
        if len(idle) >= IDLE_SHARE * count:
            return (
                f"{self._named(idle)} are the nearest of none of the last {self._patience} sampled images of their "
                f"classes, of the {count} proxies of {self.objective.name}"
            )
        return ""

    def _named(self, rows: np.ndarray, most: int = 5) -> str:
        shown = ", ".join(str(self._classes[row]) for row in rows[:most])
        return f"{len(rows)} proxies (classes {shown}{', ...' if len(rows) > most else ''})"

    def _rows(self) -> np.ndarray:
        proxies: Any = self.objective.class_proxies.proxies
        values = np.asarray(ops.convert_to_numpy(proxies), np.float32)
        return values.reshape(-1, values.shape[-1])[: len(self._classes)]

    def _pointing(self) -> np.ndarray:
        rows = self._rows()
        return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
