"""Figures of the report, as inline SVG whose colours are the page's CSS classes."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import numpy as np

# In user units; the page scales the figure to its column.
_WIDTH, _HEIGHT = 520, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 34, 46


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) between `low` and `high`, about `about` of them.

    Example:
        >>> ticks(0.0, 1.0)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


class _Axes:
    """Data to user units, and the frame around the plot."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]):
        self.x_range, self.y_range = x_range, y_range

    def x(self, value: float) -> float:
        low, high = self.x_range
        return round(_LEFT + (value - low) / ((high - low) or 1) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return round(_HEIGHT - _BOTTOM - (value - low) / ((high - low) or 1) * (_HEIGHT - _TOP - _BOTTOM), 1)

    def frame(self, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str) -> str:
        parts = []
        for value in y_ticks:
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}"/>')
            parts.append(f'<text class="tick end" x="{_LEFT - 8}" y="{y + 4.5}">{value:g}</text>')
        bottom = _HEIGHT - _BOTTOM
        parts.append(f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{_WIDTH - _RIGHT}" y2="{bottom}"/>')
        for value in x_ticks:
            parts.append(f'<text class="tick middle" x="{self.x(value)}" y="{bottom + 19}">{value:g}</text>')
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(f'<text class="label middle" x="{middle}" y="{_HEIGHT - 8}">{html.escape(x_label)}</text>')
        parts.append(f'<text class="label" x="0" y="16">{html.escape(y_label)}</text>')
        return "".join(parts)


def _svg(body: str, name: str, description: str) -> str:
    """The image with what a screen reader says in its place."""
    label = html.escape(f"{name}. {description}", quote=True)
    return f'<svg class="figure" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{body}</svg>'


def line_chart(points: Sequence[tuple[float, float]], *, name: str, x_label: str, y_label: str) -> str:
    """A curve through `points`, its highest point marked.

    Args:
        points: (x, y), ascending in x; at least one.
        name: What a screen reader calls the figure.
        x_label: Under the axis.
        y_label: Above the axis.

    Returns:
        An `<svg>` element.
    """
    xs, ys = [float(x) for x, _ in points], [float(y) for _, y in points]
    margin = max((max(ys) - min(ys)) * 0.12, 0.5)
    axes = _Axes((min(xs), max(xs)), (max(min(ys) - margin, 0.0), max(ys) + margin))
    # Epochs are whole: fractions between few of them would be no more than noise.
    x_ticks = [t for t in ticks(*axes.x_range, about=8) if t == round(t)] or [xs[0]]
    path = " ".join(f"{axes.x(x)},{axes.y(y)}" for x, y in zip(xs, ys, strict=True))
    best = int(np.argmax(ys))
    at_x, at_y = axes.x(xs[best]), axes.y(ys[best])
    side = "end" if at_x > _WIDTH / 2 else "start"
    body = axes.frame(x_ticks, ticks(*axes.y_range), x_label, y_label) + f'<polyline class="curve" points="{path}"/>'
    if len(points) <= 60:
        body += "".join(
            f'<circle class="point" cx="{axes.x(x)}" cy="{axes.y(y)}" r="2.5"/>' for x, y in zip(xs, ys, strict=True)
        )
    body += f'<circle class="best" cx="{at_x}" cy="{at_y}" r="5"/>'
    body += f'<text class="mark {side}" x="{at_x}" y="{max(at_y - 11, 30)}">best {ys[best]:.1f}</text>'
    description = f"{ys[0]:.1f} at {x_label} {xs[0]:g}, best {ys[best]:.1f} at {xs[best]:g}, last {ys[-1]:.1f}"
    return _svg(body, name, description)


def distance_histogram(positive: np.ndarray, negative: np.ndarray, *, name: str, x_label: str, bins: int = 48) -> str:
    """Two histograms over one axis, each as the percentage of its own pairs, with their means.

    Args:
        positive: (P,) d+; drawn filled.
        negative: (Q,) d-; drawn hatched. Neither may be empty.
        name: What a screen reader calls the figure.
        x_label: Under the axis.
        bins: How many bars.

    Returns:
        An `<svg>` element.
    """
    both = np.concatenate([positive, negative]).astype(np.float64)
    low, high = min(0.0, float(both.min())), float(both.max())
    high = high if high > low else low + 1.0
    edges = np.linspace(low, high, bins + 1)
    shares = [100 * np.histogram(d, edges)[0] / len(d) for d in (positive, negative)]
    axes = _Axes((low, high), (0.0, 1.12 * max(float(s.max()) for s in shares)))
    hatch = (
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<line class="hatch" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>'
    )
    body = hatch + axes.frame(ticks(low, high, 6), ticks(*axes.y_range), x_label, "% of pairs")
    for kind, share in zip(("negative", "positive"), shares[::-1], strict=True):
        corners = [(edges[0], 0.0)]
        for left, right, value in zip(edges[:-1], edges[1:], share, strict=True):
            corners += [(left, value), (right, value)]
        corners.append((edges[-1], 0.0))
        outline = " ".join(f"{axes.x(x)},{axes.y(y)}" for x, y in corners)
        body += f'<polygon class="{kind}" points="{outline}"/>'
    means = (float(np.mean(positive)), float(np.mean(negative)))
    # The label of the smaller mean goes to the left of its line, so that close means do not overprint.
    for kind, sign, mean, left in (
        ("positive", "d⁺", means[0], means[0] <= means[1]),
        ("negative", "d⁻", means[1], means[0] > means[1]),
    ):
        x, side = axes.x(mean), "end" if left else "start"
        body += f'<line class="mean {kind}-mean" x1="{x}" y1="{_TOP - 8}" x2="{x}" y2="{_HEIGHT - _BOTTOM}"/>'
        body += f'<text class="mark {side}" x="{x - 5 if left else x + 5}" y="{_TOP}">{sign} {mean:.3g}</text>'
    return _svg(body, name, f"Mean of d+ {means[0]:.3g}, mean of d- {means[1]:.3g}")
