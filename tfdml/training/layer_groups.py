"""How deep each weight of a backbone lies, and what that means for its learning rate."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

# As many as BEiT's and ConvNeXt's recipes have, whatever the network.
GROUPS = 12
# A block of a transformer, in the path of a weight: encoder/layers_3/attention/query/kernel.
_BLOCK = re.compile(r".*?(?:^|/)\w*?(?:layers|blocks?)_\d+(?=/)")


def depths(variables: Sequence[Any]) -> list[tuple[Any, float]]:
    """Each weight with the depth of its layer: 0 for that nearest to the output, below 1 for that of the image.

    The layers that have weights are counted in the order in which Keras lists them, from the image on: with n of them,
    the i-th from 0 has the depth (n - 1 - i) / n. A block of a transformer counts as one layer, as do the weights of
    all that lies before the first block (patches, positions and tokens).

    Args:
        variables: The trainable variables of a backbone, in Keras's order.

    Example:
        >>> model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
        >>> [depth for _, depth in depths(model.trainable_variables)]
        [0.5, 0.5, 0.0, 0.0]
    """
    layers: dict[str, int] = {}
    places = [layers.setdefault(layer, len(layers)) for layer in _layers([variable.path for variable in variables])]
    return [(variable, (len(layers) - 1 - i) / len(layers)) for variable, i in zip(variables, places, strict=True)]


def _layers(paths: Sequence[str]) -> list[str]:
    """The layer, or the block, of each path."""
    blocks = [_BLOCK.match(path) for path in paths]
    first = next((i for i, block in enumerate(blocks) if block), 0)
    return [
        block[0] if block else "" if i < first else path.rpartition("/")[0]
        for i, (path, block) in enumerate(zip(paths, blocks, strict=True))
    ]


def layer_factor(depth: float, decay: float) -> float:
    """What the backbone's rate is multiplied by at a depth: decay^(1 + g) in the g-th of 12 groups from above.

    Bao et al., "BEiT", ICLR 2022, appendix; Liu et al., "A ConvNet for the 2020s", CVPR 2022, appendix A: the layers of
    the head keep the rate, and each group below has `decay` of the one above.

    Args:
        depth: Of `depths`.
        decay: 1 for the same rate everywhere.

    Example:
        >>> layer_factor(0.0, 0.5), layer_factor(0.5, 0.5), layer_factor(0.9, 1.0)
        (0.5, 0.0078125, 1.0)
    """
    return 1.0 if decay == 1 else decay ** (1 + math.floor(GROUPS * depth))


def thaw_step(depth: float, steps: Sequence[int]) -> int:
    """The first step in which a weight changes: the n parts of the layers thaw one after another, from above.

    Howard and Ruder, "Universal Language Model Fine-tuning for Text Classification", ACL 2018, section 3.3.

    Args:
        depth: Of `depths`.
        steps: When each part thaws, ascending; none for never frozen.

    Example:
        >>> [thaw_step(depth, [100, 200]) for depth in (0.0, 0.49, 0.5, 0.9)]
        [100, 100, 200, 200]
    """
    return int(steps[math.floor(len(steps) * depth)]) if steps else 0
