"""What a run may do, and hardly anybody means."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import keras

from tfdml import backbones
from tfdml.models import Embedder
from tfdml.training.settings import ModelSettings


@contextlib.contextmanager
def warned_of_batch_norm() -> Iterator[None]:
    """Silence what `fit` warns of that `doubts` has reported already."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "batch_norm=.* keeps the BatchNorm statistics")
        yield


def doubts(settings: ModelSettings, embedder: Embedder) -> list[str]:
    """What is almost always a mistake, though it can be run: a line each.

    Args:
        settings: The network.
        embedder: What was built of them.

    Example:
        >>> doubts(ModelSettings(backbone="conv4", batch_norm="train"), embedder)
        []
    """
    name = settings.backbone_call().name
    published = backbones.published_weights(name)
    random = settings.weights in ("", "none") and not settings.start_from
    layers = embedder.backbone._flatten_layers()
    normalized = any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers)
    if not (random and published and normalized and settings.batch_norm != "train"):
        return []
    made = " that python -m tools.convert_weights writes" if published == "FILE" else ""
    return [
        f"WARNING: --weights=none with --batch_norm={settings.batch_norm}: {name} begins with random weights, and its "
        "BatchNorm keeps statistics that are those of no images, so that it hardly learns. To fine-tune it, use "
        f"--weights={published}{made}; to train it from scratch, --batch_norm=train"
    ]
