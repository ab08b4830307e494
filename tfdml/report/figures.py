"""Figures of a page, as inline SVG whose colours are the page's CSS classes: curves and histograms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from tfdml.evaluation.generalisation import overlap_coefficient, share_ordered
from tfdml.report.axes import BOTTOM, HEIGHT, TOP, WIDTH, Axes, log_ticks, svg, ticks
from tfdml.report.rendering import element, render

# Kinds of points and lines that the style sheet knows, as colour, shape and dashes.
STYLES = 8
_BINS = 48
# Beyond this many points on a curve, marks on each would run into one another.
_MARKED_POINTS = 60


DISTANCE_NAMES = {
    "euclidean": "Euclidean distance",
    "sqeuclidean": "squared Euclidean distance",
    "cosine": "cosine distance",
    "dot": "negative inner product",
}


@dataclasses.dataclass(frozen=True)
class Series:
    """One curve.

    Args:
        name: What it shows.
        points: (x, y), ascending in x; at least one.
        style: Which colour, dashes and marks, 0 .. STYLES - 1.
        line: Whether the points are joined.
        marks: Which x carry a mark; None: all, unless there are very many.
    """

    name: str
    points: Sequence[tuple[float, float]]
    style: int = 0
    line: bool = True
    marks: frozenset[float] | None = None

    @property
    def css(self) -> str:
        """The style's class."""
        return f"s{self.style % STYLES}"


def marker(style: int, x: float, y: float, r: float = 4.0) -> str:
    """The path of a mark at (x, y): each style has a shape of its own, of about one area."""
    shape = style % STYLES
    if shape == 0:  # disc
        return f"M{x - r:.1f} {y:.1f}a{r:g} {r:g} 0 1 0 {2 * r:g} 0a{r:g} {r:g} 0 1 0 {-2 * r:g} 0z"
    if shape == 1:  # square
        s = 0.9 * r
        return f"M{x - s:.1f} {y - s:.1f}h{2 * s:.1f}v{2 * s:.1f}h{-2 * s:.1f}z"
    s = 1.3 * r
    if shape in (2, 3):  # triangles, up and down
        t = s if shape == 2 else -s
        return f"M{x:.1f} {y - t:.1f}L{x + s:.1f} {y + 0.75 * t:.1f}H{x - s:.1f}z"
    if shape == 4:  # diamond
        return f"M{x:.1f} {y - s:.1f}L{x + s:.1f} {y:.1f}L{x:.1f} {y + s:.1f}L{x - s:.1f} {y:.1f}z"
    if shape == 5:  # plus
        a, b = s, 0.4 * r
        return (
            f"M{x - b:.1f} {y - a:.1f}h{2 * b:.1f}v{a - b:.1f}h{a - b:.1f}v{2 * b:.1f}h{b - a:.1f}v{a - b:.1f}"
            f"h{-2 * b:.1f}v{b - a:.1f}h{b - a:.1f}v{-2 * b:.1f}h{a - b:.1f}z"
        )
    if shape == 6:  # bar, standing
        return f"M{x - 0.5 * r:.1f} {y - 1.5 * r:.1f}h{r:.1f}v{3 * r:.1f}h{-r:.1f}z"
    return f"M{x - 1.5 * r:.1f} {y - 0.5 * r:.1f}h{3 * r:.1f}v{r:.1f}h{-3 * r:.1f}z"  # bar, lying


def line_chart(
    series: Sequence[Series],
    *,
    name: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    limits: tuple[float, float] = (0.0, 100.0),
    notes: Sequence[tuple[float, float, str]] = (),
) -> Markup:
    """Curves over one pair of axes.

    Args:
        series: The curves; at least one.
        name: What a screen reader calls the figure.
        x_label: Under the axis.
        y_label: Above the axis.
        log_x: Whether equal steps along the axis are equal ratios of x.
        limits: Beyond which there are no values, hence no axis.
        notes: (x, y, text) of points that are ringed and labelled.

    Returns:
        An `<svg>` element.
    """
    xs = [float(x) for curve in series for x, _ in curve.points]
    ys = [float(y) for curve in series for _, y in curve.points]
    margin = max((max(ys) - min(ys)) * 0.12, 0.5)
    low, high = max(min(ys) - margin, limits[0]), min(max(ys) + margin, limits[1])
    axes = Axes((min(xs), max(xs)), (low, max(high, low + margin)), log_x)
    x_ticks = log_ticks(*axes.x_range) if log_x else ticks(*axes.x_range, about=8)
    # Epochs and ranks are whole: fractions between few of them would be no more than noise.
    x_ticks = [t for t in x_ticks if t == round(t)] or [xs[0]]
    body = axes.frame(x_ticks, ticks(*axes.y_range), x_label, y_label)
    for curve in series:
        body += draw_curve(curve, axes)
    for x, y, text in notes:
        at_x, at_y = axes.x(x), axes.y(y)
        # Inwards, clear of the numbers on the axis; below a point at the upper edge, above it elsewhere.
        side, inwards = ("end", -7) if at_x > WIDTH / 2 else ("start", 7)
        label_y = at_y + 20 if at_y < TOP + 14 else at_y - 11
        body += element("circle", css="best", cx=at_x, cy=at_y, r=5)
        body += element("text", text, css=f"mark {side}", x=at_x + inwards, y=f"{label_y:.1f}")
    described = "; ".join(_described(curve, x_label) for curve in series)
    return svg(body, f"{name}. {described}")


def draw_curve(curve: Series, axes: Axes) -> Markup:
    """The line and the marks of a curve."""
    places = [(axes.x(x), axes.y(y)) for x, y in curve.points]
    body = Markup()
    if curve.line and len(places) > 1:
        body = element("polyline", css=f"curve {curve.css}", points=" ".join(f"{x},{y}" for x, y in places))
    if curve.marks is not None:
        places = [place for place, (x, _) in zip(places, curve.points, strict=True) if x in curve.marks]
    elif len(places) > _MARKED_POINTS:
        places = []
    if places:
        body += _marks(curve, places)
    return body


def _marks(curve: Series, places: Sequence[tuple[float, float]]) -> Markup:
    shapes = "".join(marker(curve.style, x, y, 3.6) for x, y in places)
    return element("path", css=f"point {curve.css}{'' if curve.line else ' hollow'}", d=shapes)


def _described(curve: Series, x_label: str) -> str:
    best = max(curve.points, key=lambda point: point[1])
    first, last = curve.points[0], curve.points[-1]
    return (
        f"{curve.name}: {first[1]:.1f} at {x_label} {first[0]:g}, best {best[1]:.1f} at {best[0]:g}, "
        f"last {last[1]:.1f} at {last[0]:g}"
    )


def legend(series: Sequence[Series]) -> Markup:
    """What each curve is, as a list: its line and mark, and its name."""
    items = Markup()
    for curve in series:
        key = element("line", css=f"curve {curve.css}", x1=1, y1=8, x2=33, y2=8) if curve.line else Markup()
        key += _marks(curve, [(17, 8)])
        key = element("svg", key, css="key-line", viewBox="0 0 34 16", aria_hidden="true")
        items += element("li", key, curve.name)
    return element("ul", items, css="legend")


def pair_counts(positive: np.ndarray, negative: np.ndarray, bins: int = _BINS) -> tuple[np.ndarray, list[np.ndarray]]:
    """The edges of equal bins from 0, or the least distance if it is less, to the largest, and the pairs in each.

    Args:
        positive: (P,) d+.
        negative: (Q,) d-. Neither may be empty.
        bins: How many.
    """
    both = np.concatenate([positive, negative]).astype(np.float64)
    low, high = min(0.0, float(both.min())), float(both.max())
    edges = np.linspace(low, high if high > low else low + 1.0, bins + 1)
    return edges, [np.histogram(distances, edges)[0] for distances in (positive, negative)]


def outline(css: str, edges: np.ndarray, heights: np.ndarray, axes: Axes) -> Markup:
    """The shape of a histogram: along the top of every bar, from the axis and back to it."""
    corners = zip(np.repeat(edges, 2), np.concatenate([[0.0], np.repeat(heights, 2), [0.0]]), strict=True)
    return element("polygon", css=css, points=" ".join(f"{axes.x(x)},{axes.y(y)}" for x, y in corners))


def distance_histogram(positive: np.ndarray, negative: np.ndarray, *, name: str, x_label: str) -> Markup:
    """Two histograms over one axis, each as the percentage of its own pairs, with their means.

    Args:
        positive: (P,) d+; drawn filled.
        negative: (Q,) d-; drawn hatched. Neither may be empty.
        name: What a screen reader calls the figure.
        x_label: Under the axis.

    Returns:
        An `<svg>` element.
    """
    edges, counts = pair_counts(positive, negative)
    shares = [100 * count / count.sum() for count in counts]
    axes = Axes((edges[0], edges[-1]), (0.0, 1.12 * max(float(share.max()) for share in shares)))
    body = axes.frame(ticks(edges[0], edges[-1], 6), ticks(*axes.y_range), x_label, "% of pairs")
    for kind, share in zip(("negative", "positive"), shares[::-1], strict=True):
        body += outline(kind, edges, share, axes)
    means = (float(np.mean(positive)), float(np.mean(negative)))
    # The label of the smaller mean goes to the left of its line, so that close means do not overprint.
    for kind, sign, mean, left in (
        ("positive", "d⁺", means[0], means[0] <= means[1]),
        ("negative", "d⁻", means[1], means[0] > means[1]),
    ):
        x = axes.x(mean)
        # Unless there is no room between it and the edge.
        side, at = ("end", x - 5) if (left and x > 130) or x > WIDTH - 100 else ("start", x + 5)
        body += element("line", css=f"mean {kind}-mean", x1=x, y1=TOP - 8, x2=x, y2=HEIGHT - BOTTOM)
        body += element("text", f"{sign} {mean:.3g}", css=f"mark {side}", x=at, y=TOP)
    return svg(body, f"{name}. Mean of d+ {means[0]:.3g}, mean of d- {means[1]:.3g}")


def histogram_html(positive: np.ndarray, negative: np.ndarray, distance: str, *, key: bool = True) -> Markup:
    """The two histograms, and in figures how much they overlap.

    Args:
        positive: (P,) d+.
        negative: (Q,) d-.
        distance: As `nearest_neighbours`.
        key: Whether to say which shape is which, and to put the text beside the figure.
    """
    if not (len(positive) and len(negative)):
        return render("histogram.html", figure=None)
    x_label = DISTANCE_NAMES[distance]
    return render(
        "histogram.html",
        figure=distance_histogram(positive, negative, name="Histogram of pair distances", x_label=x_label),
        overlap=overlap_coefficient(*pair_counts(positive, negative)[1]),
        ordered=share_ordered(positive, negative),
        pairs=len(positive),
        key=key,
    )
