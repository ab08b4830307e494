"""Figures of a report, drawn by matplotlib as inline SVG in the style sheet's colors: curves,
histograms, the map."""

from __future__ import annotations

import functools
import io
import itertools
import pathlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from tfdml.errors import UserError
from tfdml.evaluation.identification import Identification
from tfdml.evaluation.intervals import Interval
from tfdml.evaluation.relevance import ids_or_names
from tfdml.evaluation.verification import OperatingPoint, PairHistogram, Verification
from tfdml.names import class_names_of
from tfdml.report.runs import Run
from tfdml.retrieval.exact import check_embeddings, unit_rows

if TYPE_CHECKING:  # slow to import, so only where something is drawn
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = Sequence[Mapping[str, Any]]

# Kinds of points and lines, distinguished by color, shape and dashes.
STYLES = 8
MARKS = "os^vDPX*"
_DASHES = (
    "-",
    *(
        (0, dash)
        for dash in ((4, 2), (1, 2), (5, 2, 1, 2), (2, 2), (7, 2), (1, 1, 3, 1), (3, 1, 1, 1))
    ),
)
# Colors are drawn as #000001, #000002 ... and become the style sheet's variables of these names, so
# that a figure is light or dark as the report is.
_COLORS = ("", "ink", "soft", "line", "card", "dot", *(f"s{style}" for style in range(STYLES)))
_SIZE = (480, 300)
# Beyond this many points on a curve, marks on each would run into one another.
_MARKED_POINTS = 60
_BINS = 48
# Images on the map: t-SNE of them takes some two seconds of one core.
MAPPED_IMAGES = 1000


def color(name: str) -> str:
    """Return the placeholder of a variable of the style sheet."""
    return f"#0000{_COLORS.index(name):02d}"


def _in_sheet_colors(svg: str) -> str:
    """Replace the placeholders of `color` by the variables of the style sheet."""

    def variable(placeholder: re.Match) -> str:
        return f": var(--{_COLORS[int(placeholder[1])]})"

    return re.sub(r": #0000(\d\d)", variable, svg)


def _without_counted_ids(svg: str) -> str:
    """Remove the ids of groups, such as `axes_1`, which all figures of a page would share. Ids that
    are referred to are hashes of the label, and stay."""
    return re.sub(r' id="[^"]*_\d+"', "", svg)


def draw(plot: Callable[[Figure], None], label: str, size: tuple[int, int] = _SIZE) -> Markup:
    """Draw a figure as an inline `<svg>`.

    Args:
        plot: Draws it.
        label: What a screen reader says in its place; no other figure of the report may have the
            same.
        size: Width and height, in units of its view box, of which text is 13 high.
    """
    import matplotlib
    from matplotlib.figure import Figure

    stream = io.StringIO()
    style = pathlib.Path(__file__).with_name("templates") / "figures.mplstyle"
    with matplotlib.rc_context({"svg.hashsalt": label}, style), warnings.catch_warnings():
        # The browser has fonts for what ours does not show.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure = Figure((size[0] / 72, size[1] / 72), layout="constrained")
        plot(figure)
        figure.savefig(stream, format="svg", transparent=True)
    # Everything within matplotlib's `<svg>`.
    match = re.search(r"<g id=.*(?=</svg>)", stream.getvalue(), re.DOTALL)
    assert match is not None
    body = _in_sheet_colors(_without_counted_ids(match[0]))
    start = Markup('<svg class="figure" viewBox="0 0 {} {}" role="img" aria-label="{}">')
    return start.format(*size, label) + Markup(body + "</svg>")  # noqa: S704 - matplotlib escapes text


def _axes(figure: Figure, x_label: str, y_label: str) -> Axes:
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_title(y_label)
    return axes


def curves(
    title: str,
    lines: Mapping[str, Mapping[float, float]],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    points: str = "",
) -> Markup:
    """Draw curves over one pair of axes, the highest point of each in the label; empty where there
    is no value.

    Args:
        title: What is drawn.
        lines: y by x of each curve, by its name; the order chooses its style.
        x_label: Under the axis.
        y_label: Above the axis.
        log_x: Whether equal steps along the axis are equal ratios of x.
        points: The name of a curve that is drawn as single points.
    """
    styles = {name: style % STYLES for style, name in enumerate(lines)}
    shown = {name: line for name, line in lines.items() if line}
    if not shown:
        return Markup()

    def plot(figure: Figure) -> None:
        axes = _axes(figure, x_label, y_label)
        for name, line in shown.items():
            _plot_line(axes, name, line, styles[name], is_solitary=name == points)
        if min(min(line.values()) for line in shown.values()) >= 0:
            axes.set_ylim(bottom=0)
        axes.locator_params(axis="x", integer=True)
        if log_x:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
        if len(shown) > 1:
            longest = max(len(name) for name in shown)
            figure.legend(loc="outside lower left", ncols=1 if longest > 26 else 2)

    described = []
    for name, line in shown.items():
        described.append(f"{name}: {_ends_in_words(line, x_label)}")
    rows_of_legend = -(-len(shown) // 2)
    size = (_SIZE[0], _SIZE[1] + 20 * (rows_of_legend - 1))
    return draw(plot, f"{title}. {'; '.join(described)}", size)


def _ends_in_words(line: Mapping[float, float], x_label: str) -> str:
    highest = max(line, key=lambda x: line[x])
    last = line[max(line)]
    return f"highest {line[highest]:.4g} at {x_label} {highest:g}, last {last:.4g}"


def _plot_line(
    axes: Axes, name: str, line: Mapping[float, float], style: int, is_solitary: bool
) -> None:
    """Draw y by x as a line in its style, with marks where there are few points; or the marks
    alone."""
    dashes = "" if is_solitary else _DASHES[style]
    mark = MARKS[style] if len(line) <= _MARKED_POINTS else None
    look: dict[str, Any] = {"color": color(f"s{style}"), "ls": dashes, "marker": mark}
    axes.plot(list(line), list(line.values()), label=name[:50], clip_on=False, **look)


def _points(records: Records, along: str, key: str, factor: float = 1) -> dict[float, float]:
    points = {}
    for record in records:
        x, y = record.get(along), record.get(key)
        if x is not None and y is not None and np.isfinite(y):
            points[float(x)] = factor * float(y)
    return points


def recall_figure(recall: np.ndarray, before: Mapping[str, float]) -> Markup:
    """Draw Recall@K against K, K along a logarithmic axis.

    Args:
        recall: Recall@K for K = 1, 2, ... as fractions.
        before: Metrics before training, of which only some Recall@K were measured, drawn as single
            points.
    """
    points = {}
    for key, value in before.items():
        is_recall = re.fullmatch(r"recall@(\d+)", key)
        if is_recall and int(is_recall[1]) <= len(recall):
            points[float(is_recall[1])] = 100 * value
    after = {float(k): 100 * value for k, value in enumerate(recall.tolist(), 1)}
    lines = {"after training": after, "before training": dict(sorted(points.items()))}
    return curves("Recall@K", lines, "K", "Recall@K, %", log_x=True, points="before training")


def training_figure(run: Run) -> Markup:
    """Draw Recall@1 after each epoch, of the run or of each of its seeds."""
    lines = {
        name: _points(records, "epoch", "recall@1", 100) for name, records in run.histories.items()
    }
    return curves("Recall@1 per epoch", lines, "epoch", "Recall@1, %")


def objective_figures(run: Run) -> dict[str, Markup]:
    """Draw each value that the training has reported by epoch: of the objectives, and what they
    report besides."""
    records = run.records("train")
    drawn = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(records)):
        if name not in ("epoch", "loss"):
            line = _points(records, "epoch", name)
            drawn[name] = curves(name, {name: line}, "epoch", "in training batches")
    return {name: figure for name, figure in drawn.items() if figure}


#: What the two histograms of distances are of, and the unit.
PAIRS = ("one class, d⁺", "different classes, d⁻", "% of pairs")
QUERIES = ("known queries", "unknown queries", "% of queries")


def histogram_figure(
    histogram: PairHistogram,
    distance: str,
    threshold: float,
    names: tuple[str, str, str] = PAIRS,
) -> Markup:
    """Draw two histograms of distances over one axis, each in percent of its own, and the
    threshold."""
    shown = histogram.rebinned(_BINS)
    near, far, unit = names

    def plot(figure: Figure) -> None:
        axes = _axes(figure, f"{distance} distance", unit)
        striped: dict[str, Any] = {"fc": "none", "ec": color("s1"), "hatch": "///"}
        shaded: dict[str, Any] = {"fc": (color("s0"), 0.38), "ec": color("s0")}
        negative = 100 * shown.negative / shown.negative.sum()
        positive = 100 * shown.positive / shown.positive.sum()
        axes.stairs(negative, shown.edges, fill=True, lw=1.5, label=far, **striped)
        axes.stairs(positive, shown.edges, fill=True, lw=1.5, label=near, **shaded)
        label = f"threshold {threshold:.3g}"
        axes.axvline(threshold, color=color("ink"), ls="--", lw=2, label=label)
        figure.legend(loc="outside lower left", ncols=2)

    means = f"mean of {near} {histogram.mean_positive:.3g}, of {far} {histogram.mean_negative:.3g}"
    return draw(plot, f"Histogram of distances: {means}, threshold {threshold:.3g}")


def _rates_figure(
    rates: tuple[np.ndarray, np.ndarray],
    names: tuple[str, str],
    least: float,
    chosen: tuple[float, float, float],
    others: Mapping[float, Interval],
) -> Markup:
    """Draw one rate by another, along a logarithmic axis, with the chosen threshold.

    Args:
        rates: (K,) the rate along the axis, and the other.
        names: What they are called.
        least: Where the axis begins.
        chosen: Both rates at the threshold, and the threshold.
        others: The second rate at some values of the first, for those who do not see the figure.
    """
    x, y, threshold = chosen

    def plot(figure: Figure) -> None:
        axes = _axes(figure, names[0], f"{names[1]}, %")
        shown = rates[0] > 0
        line = rates[0][shown], 100 * rates[1][shown]
        axes.plot(*line, color=color("s0"), drawstyle="steps-post", clip_on=False)
        axes.set(xscale="log", xlim=(max(least, 1e-7), 1), ylim=(0, 100))
        axes.xaxis.set_major_formatter("{x:g}")
        if x:
            at = x, 100 * y
            axes.plot(*at, "o", ms=9, mec=color("s0"), mfc=color("card"), mew=2.5, clip_on=False)
            text = f"threshold {threshold:.3g}"
            axes.annotate(text, at, (-10, 6), "data", "offset points", ha="right")

    values = [f"{100 * rate.mean:.1f} % at {value:g}" for value, rate in others.items()]
    return draw(plot, f"{names[1]} by {names[0]}: {'; '.join(values)}")


def roc_figure(measured: Verification, chosen: OperatingPoint) -> Markup:
    """Draw the true accept rate by the false accept rate, with the chosen threshold."""
    rates = measured.roc["far"], measured.roc["tar"]
    point = chosen.far.mean, chosen.tar.mean, chosen.threshold
    others = {far: other.tar for far, other in measured.points.items()}
    names = "false accept rate", "true accept rate"
    return _rates_figure(rates, names, 1 / measured.num_different, point, others)


def identification_figure(
    measured: Identification, rates: Mapping[str, Interval], threshold: float
) -> Markup:
    """Draw the true positive identification rate by the false one, with the chosen threshold."""
    curve = measured.curve["fpir"], measured.curve["tpir"]
    point = rates["fpir"].mean, rates["tpir"].mean, threshold
    others = {fpir: at["tpir"] for fpir, (_, at, _) in measured.points.items()}
    return _rates_figure(curve, ("FPIR", "TPIR"), 1 / measured.basis.unknown, point, others)


# The map


def rows_on_map(labels: np.ndarray, marked: Sequence[int]) -> np.ndarray:
    """Return rows of at most `MAPPED_IMAGES` images, ascending: of the marked classes, then of
    others at random."""
    classes, of_class = np.unique(labels, return_inverse=True)
    order = np.random.default_rng(0).permutation(len(classes)) + len(classes) * ~np.isin(
        classes, marked
    )
    return np.sort(np.argsort(order[of_class], kind="stable")[:MAPPED_IMAGES])


def lay_out(
    embeddings: np.ndarray, *, distance: str = "euclidean", seed: int = 0
) -> np.ndarray | None:
    """Places in the plane by t-SNE (van der Maaten and Hinton, 2008); the same arguments give the
    same places.

    Args:
        embeddings: (n, d).
        distance: For `cosine` the embeddings are scaled to length 1 first; else their Euclidean
            distances count.
        seed: Of t-SNE.

    Returns:
        (n, 2) float32; None for fewer than five images or if all are the same.
    """
    x = unit_rows(embeddings) if distance == "cosine" else np.asarray(embeddings)
    if len(x) < 5 or np.ptp(x, axis=0).max() == 0:
        return None
    import threadpoolctl
    from sklearn.manifold import TSNE

    x = x / np.abs(x).max()
    x = np.pad(x, ((0, 0), (0, max(0, 2 - x.shape[1]))))  # a plane needs two
    tsne = TSNE(
        2, perplexity=min(30.0, (len(x) - 1) / 3), init="pca", max_iter=750, random_state=seed
    )
    # Its steps are short: on a busy machine, threads that wait for one another at each take many
    # times as long.
    with threadpoolctl.threadpool_limits(1, user_api="openmp"):
        return tsne.fit_transform(x)


def map(
    embeddings: Any,
    labels: Any = None,
    *,
    class_names: Mapping[int, str] | None = None,
    distance: str = "euclidean",
    seed: int = 0,
) -> Figure:
    """Draw embeddings in the plane by t-SNE, of at most 1,000 images; a notebook displays the
    figure.

    Args:
        embeddings: (N, d).
        labels: (N,) class ids; the eight most frequent classes are marked and named. None: one
            color.
        class_names: What the classes are called.
        distance: As `nearest_neighbors`.
        seed: Of the choice of images and of t-SNE.

    Raises:
        UserError: There are fewer than five different embeddings, or not as many labels.

    Example:
        >>> figure = tfdml.report.map(embeddings, labels)
        >>> figure.savefig("map.png")
    """
    from matplotlib.figure import Figure

    vectors = check_embeddings(embeddings, "embeddings")
    labels = ids_or_names(
        np.zeros(len(vectors), np.int64) if labels is None else labels, len(vectors)
    )
    rows = np.sort(np.random.default_rng(seed).permutation(len(vectors))[:MAPPED_IMAGES])
    places = lay_out(vectors[rows], distance=distance, seed=seed)
    if places is None:
        raise UserError("there are too few different embeddings for a map: at least five")
    classes, counts = np.unique(labels[rows], return_counts=True)
    shown = classes[np.argsort(-counts, kind="stable")][:STYLES].tolist()
    figure = Figure((7.5, 6), layout="constrained")
    given = class_names_of(class_names or {}, "class_names")
    names = {label: given.get(label, str(label)) for label in shown}
    _plot_map(figure, places, labels[rows], names, {"dot": "#cccccc", "card": "white"}.get)
    # What a notebook displays as a cell's value, whether or not pyplot is imported.
    vars(figure)["_repr_png_"] = functools.partial(_png, figure)
    return figure


def map_figure(places: np.ndarray, labels: np.ndarray, marked: Mapping[int, str]) -> Markup:
    """Draw the map of some images.

    Args:
        places: (n, 2) as `lay_out` returns them.
        labels: (n,) their classes.
        marked: Names of at most eight classes that get a color and a shape of their own.
    """
    label = f"Map of {len(places)} images." + (
        f" Marked classes: {', '.join(marked.values())}." if marked else ""
    )
    return draw(lambda figure: _plot_map(figure, places, labels, marked, color), label, (640, 560))


def _plot_map(
    figure: Figure, places: np.ndarray, labels: np.ndarray, marked: Mapping[Any, str], paint: Any
) -> None:
    axes = figure.add_subplot(aspect="equal")
    axes.axis("off")
    axes.plot(*places[~np.isin(labels, list(marked))].T, "o", ms=4, color=paint("dot"), mew=0)
    for style, (label, name) in enumerate(marked.items()):
        x, y = places[labels == label].T
        axes.plot(
            x, y, MARKS[style], ms=9, color=paint(f"s{style}"), mec=paint("card"), label=name[:50]
        )
    if len(marked) > 1:
        figure.legend(loc="outside right upper", frameon=False)


def _png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()
