"""How metrics are written for people: names, percent, differences, intervals, order."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

# Keys of `evaluate_retrieval` that count images and measure nothing.
COUNTS = ("num_queries", "num_gallery", "queries_without_match")
# (low, high) or what `tfdml.evaluation.confidence_intervals` gives, by metric.
Intervals = Mapping[str, Any]

_NAMES = {
    "map@r": "MAP@R",
    "r_precision": "R-precision",
    "map": "mAP",
    "map_trapezoidal": "mAP, trapezoidal",
    "minp": "mINP",
    "mrr": "MRR",
    "nmi": "NMI",
    "ami": "AMI",
    "f1": "Pairwise F1",
    "auc": "AUC",
}
_FAMILIES = {"recall": "Recall", "precision": "Precision", "map": "MAP", "mp": "mP", "mmp": "mMP"}


def metric_name(key: str) -> str:
    """Return what to call a metric in print.

    Example:
        >>> metric_name("recall@1"), metric_name("map@r")
        ('Recall@1', 'MAP@R')
    """
    name = _NAMES.get(key, key)
    family, _, k = name.partition("@")
    return f"{_FAMILIES[family]}@{k}" if family in _FAMILIES else name


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers: not what else a result may hold, such as intervals."""
    return {key: value for key, value in metrics.items() if isinstance(value, (int, float))}


def plain_intervals(intervals: Intervals | None, metrics: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the ends of intervals by metric.

    Args:
        intervals: As a caller gives them; None: those that `metrics` brings along.
        metrics: What was measured; `evaluate_retrieval` may put intervals under `intervals`.

    Example:
        >>> plain_intervals(None, {"recall@1": 0.5, "intervals": {"recall@1": [0.5, 0.4, 0.6, 0.05]}})
        {'recall@1': (0.4, 0.6)}
    """
    if intervals is None:
        intervals = metrics.get("intervals") or {}
    ends = {}
    for key, value in intervals.items():
        # Besides its ends an interval may hold the mean before them and the standard error after them.
        low, high = (value[0], value[1]) if len(value) == 2 else (value[1], value[2])
        ends[key] = (float(low), float(high))
    return ends


def is_fraction(key: str) -> bool:
    """Whether a metric is a share, printed in percent, of which more is better."""
    return key in _NAMES or "@" in key


def metric_order(keys: Iterable[str]) -> list[str]:
    """Return the keys that name metrics: Recall@K by K, then those known here, then the others as they come.

    Example:
        >>> metric_order(["nmi", "recall@10", "num_queries", "recall@2"])
        ['recall@2', 'recall@10', 'nmi']
    """
    keys = list(keys)
    recalls = sorted((key for key in keys if re.fullmatch(r"recall@\d+", key)), key=lambda key: int(key[7:]))
    known = recalls + [key for key in _NAMES if key in keys]
    return known + [key for key in keys if key not in known and key not in COUNTS]


def metric_value(key: str, value: Any) -> str:
    """Return a value in print, a fraction in percent; a dash where there is none.

    Example:
        >>> metric_value("recall@1", 0.5738), metric_value("lambda", 3.14159)
        ('57.4', '3.142')
    """
    if value is None:
        return "–"
    # The sum takes the sign from a zero that rounding left negative.
    text = f"{round(100 * value, 1) + 0.0:.1f}" if is_fraction(key) else f"{value:,.4g}"
    return text.replace("-", "−")


def metric_change(key: str, before: float | None, after: float | None) -> str:
    """Return the difference of two values as printed, so that the row adds up; a dash where one is missing.

    Example:
        >>> metric_change("recall@1", 0.1234, 0.2), metric_change("recall@1", 0.2, 0.1)
        ('+7.7', '−10.0')
    """
    if before is None or after is None:
        return "–"
    if is_fraction(key):
        text = f"{round(100 * after, 1) - round(100 * before, 1) + 0.0:+.1f}"
        return text.replace("-0.0", "+0.0").replace("-", "−")
    return f"{after - before:+.4g}".replace("-", "−")


def metric_interval(key: str, interval: tuple[float, float] | None) -> str:
    """Return an interval in print; empty where there is none.

    Example:
        >>> metric_interval("recall@1", (0.5512, 0.5966))
        '55.1 – 59.7'
    """
    if interval is None:
        return ""
    low, high = interval
    return f"{metric_value(key, low)} – {metric_value(key, high)}"


def order_name(order: str) -> str:
    """Return what to call one of HORDE's orders of moments in print.

    Example:
        >>> order_name("1"), order_name("3"), order_name("all")
        ('1, the embedding', 'order 3', 'all, side by side')
    """
    return {"1": "1, the embedding", "all": "all, side by side"}.get(order, f"order {order}")
