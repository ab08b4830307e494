"""Axes of the figures: where a value lies, round numbers along an axis, and the frame around a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from tfdml.report.rendering import element

# In user units; the page scales a figure to its column.
WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 36, 48
_HALF_DIGIT = 5.5  # of the larger type on a narrow screen


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


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between `low` and `high`; 2 and 5 times them too where there are fewer than three.

    Example:
        >>> log_ticks(1, 1000), log_ticks(1, 41)
        ([1, 10, 100, 1000], [1, 2, 5, 10, 20])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    tens = [10**p for p in powers if low <= 10**p <= high]
    return tens if len(tens) > 2 else [f * 10**p for p in powers for f in (1, 2, 5) if low <= f * 10**p <= high]


class Axes:
    """Data to user units.

    Args:
        x_range: The lowest and the highest x.
        y_range: The lowest and the highest y.
        log_x: Whether equal steps along the axis are equal ratios of x.
    """

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float], log_x: bool = False):
        self.x_range, self.y_range, self.log_x = x_range, y_range, log_x

    def x(self, value: float) -> float:
        """Where a value lies from the left."""
        low, high = self.x_range
        if self.log_x:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return round(LEFT + (value - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        """Where a value lies from the top."""
        low, high = self.y_range
        return round(HEIGHT - BOTTOM - (value - low) / ((high - low) or 1) * (HEIGHT - TOP - BOTTOM), 1)

    def frame(self, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str) -> Markup:
        """The grid, the axis, the numbers and the labels, as SVG."""
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        body = Markup()
        for value in y_ticks:
            y = self.y(value)
            body += element("line", css="grid", x1=LEFT, y1=y, x2=right, y2=y)
            body += element("text", f"{value:g}", css="tick end", x=LEFT - 8, y=y + 4.5)
        body += element("line", css="axis", x1=LEFT, y1=bottom, x2=right, y2=bottom)
        for value in x_ticks:
            x, number = self.x(value), f"{value:g}"
            body += element("line", css="axis", x1=x, y1=bottom, x2=x, y2=bottom + 4)
            # The last number would stick out to the right if it were long and centred.
            side, at = ("end", WIDTH) if x + _HALF_DIGIT * len(number) > WIDTH else ("middle", x)
            body += element("text", number, css=f"tick {side}", x=at, y=bottom + 20)
        body += element("text", x_label, css="label middle", x=(LEFT + right) / 2, y=HEIGHT - 4)
        return body + element("text", y_label, css="label", x=0, y=16)


def svg(body: Markup, label: str, width: float = WIDTH, height: float = HEIGHT) -> Markup:
    """The image with what a screen reader says in its place."""
    return element("svg", body, css="figure", viewBox=f"0 0 {width} {height}", role="img", aria_label=label)
