"""The tables of a study: the gain of each row over its base, with paired intervals."""

from __future__ import annotations

import numpy as np

from tfdml.evaluation import paired_differences, seed_difference, student_interval

KEPT = ("recall@1", "map@r")
COLUMNS = ("row", "base", "Recall@1, by seed", "of the base", "gain", "over classes", "over seeds", "gain in MAP@R")
# Of ten seeds: means of them, and intervals over them alone.
PAIRED_COLUMNS = ("row", "base", "Recall@1", "of the base", "gain", "over seeds", "better with", "gain in MAP@R")


def per_query(study, run):
    """A run's metrics as `paired_differences` takes them: each query has the mean of its class.

    Resampling whole classes sums over their queries, for which the mean is all that counts.
    """
    return {name: np.repeat(run["by_class"][name], study["queries"]) for name in KEPT}


def pairs_seeds(study):
    """Whether the runs of one seed are paired, as docs/results.md says."""
    return study.get("study", "").startswith("ten_")


def gains(study):
    """Yield for each row with a base its name, the metrics of both by seed, and the gains with their intervals.

    The intervals over seeds pair runs of the same seed if `pairs_seeds(study)`, and then there are no others.

    Args:
        study: What the JSON file holds.
    """
    labels = np.repeat(study["classes"], study["queries"]) if "classes" in study else None
    for name, row in study["rows"].items():
        of = row["base"]
        base = study["rows"].get(of, {"seeds": {}})
        # Both sides of a pair have the same seed, so the same held-out classes and the same first weights.
        seeds = [
            seed for seed, run in row["seeds"].items() if "metrics" in run and "metrics" in base["seeds"].get(seed, {})
        ]
        if not seeds:
            continue
        own, others = ([side["seeds"][seed] for seed in seeds] for side in (row, base))
        values = {key: np.array([[run["metrics"][key] for run in runs] for runs in (own, others)]) for key in KEPT}
        over_seeds = {}
        if len(seeds) > 1:
            over_seeds = {
                key: student_interval(first - second) if pairs_seeds(study) else seed_difference(first, second)
                for key, (first, second) in values.items()
            }
        found = {"name": name, "base": of, "seeds": values["recall@1"].T.tolist(), "over_seeds": over_seeds}
        if not pairs_seeds(study):
            sides = [[per_query(study, run) for run in runs] for runs in (own, others)]
            yield {**found, "gain": paired_differences(*sides, labels)}
        elif over_seeds:
            yield {**found, "gain": over_seeds}


def tables(study):
    """Return columns and rows of tables: of what has several seeds, of the others, and of tests on the way."""
    found = list(gains(study))
    several = [_paired_cells(row) if pairs_seeds(study) else _cells(row) for row in found if row["over_seeds"]]
    one = [_cells(row) for row in found if not row["over_seeds"]]
    for name, row in study["rows"].items():
        ended = [f"seed {seed}: {run['ended']}" for seed, run in row["seeds"].items() if "ended" in run]
        if ended:
            one.append((name, row["base"], "; ".join(ended), *[""] * (len(COLUMNS) - 3)))
    columns = PAIRED_COLUMNS if pairs_seeds(study) else COLUMNS
    return {"table": (columns, several), "one seed": (COLUMNS, one), "on the way": _on_the_way(study)}


def _on_the_way(study):
    """Recall@1 (MAP@R) after each test that a run made during training, as the mean of the seeds that made it."""
    found = {name: [run.get("tests", {}) for run in row["seeds"].values()] for name, row in study["rows"].items()}
    # Those before and after training are in the other tables.
    found = {name: tests for name, tests in found.items() if max(map(len, tests), default=0) > 2}
    epochs = sorted({int(epoch) for tests in found.values() for of_seed in tests for epoch in of_seed})

    def cell(tests, epoch):
        values = [[of_seed[epoch][name] for name in KEPT] for of_seed in tests if epoch in of_seed]
        return "{:.1f} ({:.1f})".format(*100 * np.mean(values, axis=0)) if values else ""

    rows = [(name, *(cell(tests, str(epoch)) for epoch in epochs)) for name, tests in found.items()]
    return ("row", *(f"{epoch} epochs" for epoch in epochs)), rows


def _cells(row):
    """A row: percent, on the unseen classes."""
    recall, precision = row["gain"]["recall@1"], row["gain"]["map@r"]
    own, others = (" / ".join(f"{100 * pair[i]:.1f}" for pair in row["seeds"]) for i in (0, 1))
    seeds = _interval(row["over_seeds"]["recall@1"]) if row["over_seeds"] else ""
    cells = (row["name"], row["base"], own, others, f"{100 * recall.mean:+.1f}", _interval(recall), seeds)
    return *cells, f"{100 * precision.mean:+.1f} ({_interval(precision)})"


def _paired_cells(row):
    """A row of means over seeds: percent, on the unseen classes."""
    recall, precision = (row["gain"][name] for name in KEPT)
    own, others = (f"{100 * mean:.1f}" for mean in np.mean(row["seeds"], axis=0))
    better = f"{sum(a > b for a, b in row['seeds'])} of {len(row['seeds'])}"
    cells = (row["name"], row["base"], own, others, f"{100 * recall.mean:+.1f}", _interval(recall), better)
    return *cells, f"{100 * precision.mean:+.1f} ({_interval(precision)})"


def _interval(found):
    return f"{100 * found.low:+.1f} to {100 * found.high:+.1f}"
