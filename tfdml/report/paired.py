"""Runs compared query by query: whether one is better than another, with the interval of the difference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from tfdml.evaluation.intervals import Interval, paired_differences, seed_difference
from tfdml.evaluation.per_query import QUERIES_FILE, QueryValues
from tfdml.report.metric_text import metric_name, metric_order, metric_value
from tfdml.report.runs import Run


@dataclasses.dataclass(frozen=True)
class Paired:
    """A run beside the one that it is compared with.

    Args:
        name: Of the run.
        reference: Of the other one.
        refused: Why they cannot be compared query by query; empty where they can.
        classes: Run minus reference by metric, with intervals over classes: see `paired_differences`.
        seeds: The same with intervals over seeds, where both have several: see `seed_difference`.
        counts: How many seeds the run and the reference have.

    Example:
        >>> Paired("jrd", "am", classes={"recall@1": Interval(0.024, 0.011, 0.036, 0.006)}).sentence("recall@1")
        'jrd is better than am by 2.4 points of Recall@1 (95 % interval over classes 1.1 to 3.6; one seed each)'
    """

    name: str
    reference: str
    refused: str = ""
    classes: Mapping[str, Interval] = dataclasses.field(default_factory=dict)
    seeds: Mapping[str, Interval] = dataclasses.field(default_factory=dict)
    counts: tuple[int, int] = (1, 1)

    def told_apart(self, metric: str) -> bool:
        """Whether no interval that is known of the difference holds 0."""
        known = [of[metric] for of in (self.classes, self.seeds) if metric in of]
        return all(interval.low > 0 for interval in known) or all(interval.high < 0 for interval in known)

    def sentence(self, metric: str) -> str:
        """What the comparison says of a metric."""
        interval = self.classes[metric]
        if not self.told_apart(metric):
            return (
                f"{self.name} and {self.reference} are not told apart by {metric_name(metric)}: the difference is "
                f"{self.change(metric)} points ({self._intervals(metric, 1)})"
            )
        word, sign = ("better", 1) if interval.mean > 0 else ("worse", -1)
        points = metric_value(metric, sign * interval.mean)
        return (
            f"{self.name} is {word} than {self.reference} by {points} points of {metric_name(metric)} "
            f"({self._intervals(metric, sign)})"
        )

    def change(self, metric: str) -> str:
        """The difference in points, with its sign."""
        value = metric_value(metric, self.classes[metric].mean)
        return value if value.startswith("−") else f"+{value}"

    def ends(self, metric: str) -> str:
        """The interval over classes in print."""
        return _ends(metric, self.classes[metric], 1)

    def _intervals(self, metric: str, sign: int) -> str:
        said = f"95 % interval over classes {_ends(metric, self.classes[metric], sign)}"
        if metric in self.seeds:
            first, second = self.counts
            return f"{said}, over {first} and {second} seeds {_ends(metric, self.seeds[metric], sign)}"
        return f"{said}; one seed each" if self.counts == (1, 1) else f"{said}; one of them has one seed"


def _ends(metric: str, interval: Interval, sign: int) -> str:
    low, high = sorted((sign * interval.low, sign * interval.high))
    return f"{metric_value(metric, low)} to {metric_value(metric, high)}"


def paired_with_first(runs: Sequence[Run], measured: Sequence[QueryValues] | None = None) -> list[Paired]:
    """Each run but the first beside the first, query by query.

    Args:
        runs: What `read_runs` gives.
        measured: Values of the same queries under each run, for runs that have not stored theirs.
    """
    stored = [_stored(run) for run in runs]
    found = []
    for number in range(1, len(runs)):
        sides = [stored[number], stored[0]]
        if measured is not None and any(isinstance(side, str) for side in sides):
            sides = [[measured[number]], [measured[0]]]
        found.append(_paired(runs[number], runs[0], sides))
    return found


def _stored(run: Run) -> list[QueryValues] | str:
    """What the seeds of a run have found for each query, or why that is not known."""
    values = []
    for one in run.seeds or [run]:
        path = None if one.path is None else one.path / QUERIES_FILE
        if path is None or not path.is_file():
            return f"{run.name} has no {QUERIES_FILE}; name the data set, and the command embeds the images again"
        values.append(QueryValues.read(path))
    return values


def _paired(run: Run, reference: Run, sides: Sequence[list[QueryValues] | str]) -> Paired:
    for side in sides:
        if isinstance(side, str):
            return Paired(run.name, reference.name, side)
    first, second = (list(side) for side in sides if not isinstance(side, str))
    for other in (*first[1:], *second):
        difference = first[0].difference_to(other)
        if difference:
            return Paired(run.name, reference.name, f"their queries are not the same: {difference}")
    runs = [*first, *second]
    shared = metric_order(name for name in first[0].values if all(name in of.values for of in runs))
    if not shared:
        return Paired(run.name, reference.name, "they have no metric in common")
    here, there = ([{name: of.values[name] for name in shared} for of in side] for side in (first, second))
    classes = paired_differences(here, there, first[0].labels)
    over_seeds: dict[str, Interval] = {}
    if min(len(first), len(second)) > 1:
        means = [{name: [float(np.nanmean(of[name])) for of in side] for name in shared} for side in (here, there)]
        over_seeds = {name: seed_difference(means[0][name], means[1][name]) for name in shared}
    return Paired(run.name, reference.name, "", classes, over_seeds, (len(first), len(second)))
