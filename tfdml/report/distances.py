"""How far classes are apart: d+ and d- of sampled pairs, drawn and put in figures."""

from __future__ import annotations

import numpy as np

from tfdml.report.figures import distance_histogram, histogram_overlap, share_ordered

DISTANCE_NAMES = {
    "euclidean": "Euclidean distance",
    "sqeuclidean": "squared Euclidean distance",
    "cosine": "cosine distance",
    "dot": "negative inner product",
}
LEGEND = (
    '<ul class="legend"><li><span class="swatch positive-swatch"></span>d⁺, pairs of one class</li>'
    '<li><span class="swatch negative-swatch"></span>d⁻, pairs of different classes</li></ul>'
)


def has_both(positive: np.ndarray, negative: np.ndarray) -> bool:
    """Whether there are pairs of both kinds."""
    return len(positive) > 0 and len(negative) > 0


def histogram_html(positive: np.ndarray, negative: np.ndarray, name: str, *, key: bool = True) -> str:
    """The two histograms and what they say in figures.

    Args:
        positive: (P,) d+.
        negative: (Q,) d-.
        name: What the distance is called.
        key: Whether to say which shape is which, and to put the text beside the figure.
    """
    if not has_both(positive, negative):
        return "<p>There are not both pairs of one class and pairs of different classes.</p>"
    figure = distance_histogram(positive, negative, name="Histogram of pair distances", x_label=name)
    text = (
        f"<p>The two shapes share <b>{100 * histogram_overlap(positive, negative):.1f}%</b> of their area.</p>"
        f"<p>A random pair of one class is nearer than a random pair of different classes in "
        f"<b>{100 * share_ordered(positive, negative):.1f}%</b> of draws ({len(positive):,} pairs of each kind).</p>"
    )
    return f'<div class="beside">{figure}<div>{LEGEND}{text}</div></div>' if key else figure + text
