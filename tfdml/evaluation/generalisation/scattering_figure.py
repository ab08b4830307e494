"""The figure of the scattering of deep features: Recall@1 by the share of positions."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence

from tfdml.errors import UserError
from tfdml.storage import atomic_write

_FORMATS = (".png", ".svg", ".pdf")
# Told apart by marker and line too, and by readers who do not see all colours.
_STYLES = (("#0b63b5", "o", "-"), ("#c8500a", "s", "--"), ("#4d4d4d", "^", ":"), ("#7b3fa0", "D", "-."))


def draw_scattering(path: str | os.PathLike, curves: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Draw Recall@1, and the cosine with the whole image's embedding, by the share of positions of the feature map.

    A model whose deep features are well gathered keeps its Recall@1 to the left, where one whose features scatter
    falls off: the figure shows by how much HORDE, or any other training, gathers them.

    Args:
        path: A .png, .svg or .pdf file, written atomically.
        curves: What `scattering_curve` gave, by the name of the model; one to four.

    Raises:
        UserError: The file's name has another ending, its folder does not exist, or there are not 1 to 4 curves.

    Example:
        >>> curve = [{"share": 0.17, "recall@1": 0.41, "cosine": 0.83}, {"share": 1.0, "recall@1": 0.55, "cosine": 1.0}]
        >>> draw_scattering("scattering.png", {"binomial": curve})
    """
    path = pathlib.Path(path)
    if path.suffix not in _FORMATS:
        raise UserError(f"{path}: name the figure with one of {', '.join(_FORMATS)}")
    if not path.resolve().parent.is_dir():
        raise UserError(f"{path}: its folder does not exist")
    if not 1 <= len(curves) <= len(_STYLES) or not all(curves.values()):
        raise UserError(f"there must be 1 to {len(_STYLES)} curves, none of them empty; got {len(curves)}")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.9), dpi=120, layout="constrained")
    recall, cosine = figure.subplots(1, 2)
    for (name, curve), (colour, marker, line) in zip(curves.items(), _STYLES, strict=False):
        shares = [100 * point["share"] for point in curve]
        style = {"color": colour, "marker": marker, "linestyle": line, "label": name}
        recall.plot(shares, [100 * point["recall@1"] for point in curve], **style)
        cosine.plot(shares, [point["cosine"] for point in curve], **style)
    for axes, label in ((recall, "Recall@1, %"), (cosine, "cosine with the embedding of the whole")):
        axes.set_xlabel("positions of the feature map, %")
        axes.set_ylabel(label)
        axes.set_xlim(0, 102)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    recall.set_ylim(bottom=0)
    if len(curves) > 1:
        recall.legend(frameon=False, loc="lower right")
    with atomic_write(path) as temporary:
        figure.savefig(temporary)
