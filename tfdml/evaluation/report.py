"""One self-contained HTML page on what a training run achieved."""

from __future__ import annotations

import html
import importlib.resources
import json
import os
import pathlib
import string
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation.figures import distance_histogram, line_chart
from tfdml.evaluation.gallery import ReadImage, choose_examples, dataset_reader, gallery_html
from tfdml.evaluation.neighbours import check_embeddings
from tfdml.evaluation.pair_distances import sample_pair_distances

if TYPE_CHECKING:  # tfdml.data needs TensorFlow, which measuring does not
    from tfdml.data.dataset import ImageDataset

_COUNTS = ("num_queries", "num_gallery", "queries_without_match")
_NAMES = {"map@r": "MAP@R", "r_precision": "R-precision", "nmi": "NMI", "ami": "AMI", "f1": "Pairwise F1"}
_DISTANCE_NAMES = {
    "euclidean": "Euclidean distance",
    "sqeuclidean": "squared Euclidean distance",
    "cosine": "cosine distance",
    "dot": "negative inner product",
}
_Metrics = Mapping[str, float]


def write_report(
    path: str | os.PathLike,
    title: str,
    metrics_before: _Metrics | None,
    metrics_after: _Metrics,
    history: Sequence[Mapping[str, Any]],
    dataset: ImageDataset,
    embeddings: np.ndarray,
    *,
    gallery: ImageDataset | None = None,
    gallery_embeddings: np.ndarray | None = None,
    distance: str = "euclidean",
    summary: str = "",
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    curve_metric: str = "recall@1",
    num_queries: int = 10,
    neighbours: int = 8,
    read_image: ReadImage | None = None,
    read_gallery_image: ReadImage | None = None,
    seed: int = 0,
) -> None:
    """Write the report: metrics, the training curve, retrieval examples, pair distances, settings.

    The page loads nothing from anywhere: pictures are inside it as JPEG thumbnails, figures as SVG, and it runs no
    script. It is written whole or not at all. What comes from outside (names, flags) is escaped.

    Args:
        path: Where to write; the folder is made if it is missing.
        title: The heading, such as the run's name.
        metrics_before: What `evaluate_retrieval` gave before training; None if it was not measured.
        metrics_after: What it gives now.
        history: One mapping per epoch with `epoch` and `curve_metric`, a fraction; others are skipped.
        dataset: The queries.
        embeddings: (N, d) those of `dataset`, after training.
        gallery: What is searched; None: all-to-all.
        gallery_embeddings: (G, d), given exactly if `gallery` is.
        distance: What the metrics were computed with.
        summary: A sentence under the title, such as how the model was selected.
        flags: Settings of the run, by name.
        environment: Versions and hardware, by name.
        curve_metric: What the curve shows.
        num_queries: How many queries to show.
        neighbours: How many neighbours of each.
        read_image: Reads query `index` as (H, W, 3) uint8; default `dataset_reader(dataset)`.
        read_gallery_image: The same for the gallery.
        seed: Of the choice of queries and of the pairs in the histogram.

    Raises:
        UserError: Embeddings that do not go with their data set, or an image that cannot be read.
        OSError: The page cannot be written.

    Example:
        >>> write_report("run/report/index.html", "cars", before, after, history, dataset, embeddings)  # doctest: +SKIP
    """
    embeddings = _checked(embeddings, dataset, "embeddings")
    if (gallery is None) != (gallery_embeddings is None):
        raise UserError("gallery and gallery_embeddings go together: give both (query/gallery) or none (all-to-all)")
    if gallery is not None:
        gallery_embeddings = _checked(gallery_embeddings, gallery, "gallery embeddings")
    read_image = read_image or dataset_reader(dataset)
    read_gallery_image = read_gallery_image or (read_image if gallery is None else dataset_reader(gallery))
    examples = choose_examples(
        embeddings,
        dataset.labels,
        gallery_embeddings,
        None if gallery is None else gallery.labels,
        num_queries=num_queries,
        neighbours=neighbours,
        distance=distance,
        seed=seed,
    )
    pictures = gallery_html(examples, dataset, gallery or dataset, read_image, read_gallery_image)
    points = embeddings if gallery_embeddings is None else np.concatenate([embeddings, gallery_embeddings])
    labels = dataset.labels if gallery is None else np.concatenate([dataset.labels, gallery.labels])
    positive, negative = sample_pair_distances(points, labels, distance=distance, seed=seed)
    name = _DISTANCE_NAMES[distance]
    _write(
        pathlib.Path(path),
        string.Template(_template()).substitute(
            title=html.escape(title),
            subtitle=_paragraph("summary", summary) + f"<p>{_described(dataset, gallery, name)}</p>",
            tiles=_tiles(metrics_before, metrics_after),
            metrics=_metrics_table(metrics_before, metrics_after),
            counts=_counts(metrics_after),
            curve=_curve(history, curve_metric),
            examples=pictures or "<p>No query has another image of its class to find.</p>",
            histogram=_histogram(positive, negative, name),
            flags=_settings("Flags", flags),
            environment=_settings("Environment", environment),
        ),
    )


def metric_name(key: str) -> str:
    """What to call a metric in print.

    Example:
        >>> metric_name("recall@1"), metric_name("map@r")
        ('Recall@1', 'MAP@R')
    """
    return _NAMES.get(key, key.replace("recall@", "Recall@"))


def _checked(embeddings: Any, dataset: ImageDataset, what: str) -> np.ndarray:
    embeddings = check_embeddings(embeddings, what)
    if len(embeddings) != len(dataset):
        raise UserError(f"{what}: {len(embeddings)} rows for the {len(dataset)} images of {dataset.name}")
    return embeddings


def _template() -> str:
    return importlib.resources.files("tfdml.evaluation").joinpath("templates/report.html").read_text("utf-8")


def _write(path: pathlib.Path, page: str) -> None:
    """The page at `path`, whole or not at all: readers see the old one until the new one is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(page)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's files are the writer's alone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _paragraph(css_class: str, text: str) -> str:
    return f'<p class="{css_class}">{html.escape(text)}</p>' if text else ""


def _described(dataset: ImageDataset, gallery: ImageDataset | None, distance: str) -> str:
    text = f"{dataset.name}, {dataset.split} split: {len(dataset):,} images of {dataset.num_classes:,} classes"
    if gallery is None:
        text += ", each a query against all others"
    else:
        text += f" as queries against a gallery of {len(gallery):,}"
    return html.escape(f"{text}, by {distance}.")


def _is_fraction(key: str) -> bool:
    return key.startswith("recall@") or key in _NAMES


def _value(key: str, value: Any) -> str:
    return f"{100 * value:.1f}" if _is_fraction(key) else f"{value:,.4g}"


def _change(key: str, before: float, after: float) -> str:
    """The difference of the values as printed, so that the row adds up."""
    scale = 100 if _is_fraction(key) else 1
    if not _is_fraction(key):
        return f"{after - before:+.4g}".replace("-", "−")
    return f"{round(scale * after, 1) - round(scale * before, 1):+.1f}".replace("-", "−")


def _tiles(before: _Metrics | None, after: _Metrics) -> str:
    tiles = []
    for key in [key for key in ("recall@1", "map@r", "r_precision", "nmi") if key in after]:
        change = ""
        if before is not None and key in before:
            change = f'<span class="change">{_change(key, before[key], after[key])} by training</span>'
        tiles.append(
            f"<div><dt>{metric_name(key)}</dt><dd><b>{_value(key, after[key])}<small>%</small></b>{change}</dd></div>"
        )
    return f'<dl class="tiles">{"".join(tiles)}</dl>' if tiles else ""


def _metrics_table(before: _Metrics | None, after: _Metrics) -> str:
    recalls = sorted((key for key in after if key.startswith("recall@")), key=lambda key: (len(key), key))
    keys = recalls + [key for key in _NAMES if key in after]
    keys += [key for key in after if key not in keys and key not in _COUNTS]
    head = ["Metric", "Before", "After", "Change"] if before is not None else ["Metric", "Value"]
    rows = []
    for key in keys:
        cells = []
        if before is not None:
            cells = [_value(key, before[key]) if key in before else "–"]
        cells.append(f"<b>{_value(key, after[key])}</b>")
        if before is not None:
            cells.append(_change(key, before[key], after[key]) if key in before else "–")
        data = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f'<tr><th scope="row">{html.escape(metric_name(key))}</th>{data}</tr>')
    header = "".join(f'<th scope="col">{name}</th>' for name in head)
    return (
        '<table class="metrics"><caption class="hidden">Metrics of the embeddings</caption>'
        f"<thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _counts(metrics: _Metrics) -> str:
    if "num_queries" not in metrics:
        return ""
    text = f"{metrics['num_queries']:,} queries"
    if "num_gallery" in metrics:
        text += f", each compared with {metrics['num_gallery']:,} images"
    text += "."
    alone = metrics.get("queries_without_match", 0)
    if alone:
        text += f" {alone:,} of them have no image of their class to find and are left out of the retrieval means."
    return f'<p class="aside">{text}</p>'


def _curve(history: Sequence[Mapping[str, Any]], metric: str) -> str:
    points = [(float(e["epoch"]), 100 * float(e[metric])) for e in history if "epoch" in e and metric in e]
    points = sorted((x, y) for x, y in points if np.isfinite(x) and np.isfinite(y))
    if not points:
        return "<p>Nothing was measured during training.</p>"
    name = metric_name(metric)
    figure = line_chart(points, name=f"{name} per epoch", x_label="epoch", y_label=f"{name}, %")
    rows = "".join(f'<tr><th scope="row">{x:g}</th><td>{y:.1f}</td></tr>' for x, y in points)
    header = f'<th scope="col">Epoch</th><th scope="col">{html.escape(name)}, %</th>'
    return (
        f"{figure}<details><summary>The values as a table</summary><table><thead><tr>{header}</tr></thead>"
        f"<tbody>{rows}</tbody></table></details>"
    )


def _histogram(positive: np.ndarray, negative: np.ndarray, name: str) -> str:
    if not len(positive) or not len(negative):
        return "<p>There are not both pairs of one class and pairs of different classes.</p>"
    figure = distance_histogram(positive, negative, name="Histogram of pair distances", x_label=name)
    # As the area under a ROC curve: ties count half.
    ranked = np.sort(negative)
    nearer = np.searchsorted(ranked, positive, side="left") + np.searchsorted(ranked, positive, side="right")
    ordered = 1 - nearer.mean() / (2 * len(ranked))
    return (
        f'{figure}<div><ul class="legend"><li><span class="swatch positive-swatch"></span>d⁺, pairs of one class</li>'
        '<li><span class="swatch negative-swatch"></span>d⁻, pairs of different classes</li></ul>'
        f"<p>A random pair of one class is nearer than a random pair of different classes in "
        f"<b>{100 * ordered:.1f}%</b> of draws ({len(positive):,} pairs of each kind).</p></div>"
    )


def _settings(name: str, values: Mapping[str, Any] | None) -> str:
    if not values:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{html.escape(str(key))}</th><td>{html.escape(_text(value))}</td></tr>'
        for key, value in values.items()
    )
    return (
        f'<details><summary>{name}</summary><div class="scroll" tabindex="0" role="region" aria-label="{name}">'
        f'<table class="settings"><tbody>{rows}</tbody></table></div></details>'
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
