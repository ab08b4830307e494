"""The part of bin/evaluate that measures what is done with embeddings before and after a search."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import flags

from tfdml.cli import measuring
from tfdml.errors import UserError

if TYPE_CHECKING:
    from tfdml.embeddings.views import Views
    from tfdml.evaluation.chains import Step

flags.DEFINE_multi_string(
    "after",
    [],
    "A chain of steps after the embedding, in their order: a row of metrics, gain and cost after each. Steps: "
    "views(flip=true, crops=1 or 5) embeds several views; whitening(dim=0, power=1, shrinkage=0), fitted to the "
    "training classes; database_augmentation(k=10, alpha=3); query_expansion(k=10, alpha=3); and last csls(k=10) or "
    "k_reciprocal(k1=20, k2=6, weight=0.3, top=200). E.g. 'whitening(dim=128) + query_expansion(k=5)'. Give the flag "
    "again for another chain.",
    module_name=__name__,
)


def chains() -> list[list[Step]]:
    """The chains of `--after`.

    Raises:
        UserError: One cannot be read, or has an unknown step, argument or order.
    """
    from tfdml.evaluation.chains import steps_of
    from tfdml.training.expressions import parse_sum, shortened

    result = []
    for text in flags.FLAGS.after:
        if not text.strip():
            raise UserError("--after= names nothing: leave the flag out, or name a step")
        terms = parse_sum(text, "--after")
        if any(weight != 1 for weight, _ in terms):
            raise UserError(
                f"--after={shortened(text)!r}: steps have no factors; join them by +, in the order in which they apply"
            )
        try:
            result.append(steps_of((call.name, call.arguments) for _, call in terms))
        except UserError as error:
            raise UserError(f"--after={shortened(text)!r}: {error}") from error
    return result


def measure(
    subject: measuring.Subject, chosen: Sequence[Sequence[Step]], ks: Sequence[int], metrics: Sequence[str]
) -> list[dict[str, Any]]:
    """The rows of `measure_chains` for what was embedded."""
    from tfdml.evaluation import Sources, measure_chains
    from tfdml.evaluation.retrieval import CLUSTERING_METRICS, dataset_protocol

    # Chains that need the same images embedded share them.
    @functools.cache
    def train(views: Views | None) -> Any:
        if flags.FLAGS.split == "train":
            raise UserError("--after: whitening is fitted to the training classes: leave --split=test")
        vectors, _ = measuring.train_side(subject, views)
        if vectors is None:
            raise UserError("--after: whitening needs embeddings of training classes, too: bin/embed --split=all")
        return vectors

    @functools.cache
    def embed(views: Views) -> tuple[np.ndarray, np.ndarray | None]:
        protocol = dataset_protocol(measuring.embed(subject, subject.dataset, views), subject.images)
        return protocol["embeddings"], protocol.get("gallery")

    return measure_chains(
        **dataset_protocol(subject.embeddings, subject.images),
        chains=chosen,
        sources=Sources(train, embed if subject.source is not None else None),
        ks=ks,
        metrics=[name for name in metrics if name not in CLUSTERING_METRICS] or ["recall"],
        distance=flags.FLAGS.distance,
    )


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """A line a row: each metric in percent with the points gained, seconds, megabytes and hubs."""
    names = list(rows[0]["metrics"])
    width = max(4, *(len(row["step"]) for row in rows))
    hubs = rows[0]["hubness"]["k"]
    print(f"  after the embedding, points gained on plain in brackets; hubs among the {hubs} nearest:")
    heads = [f"{name:>15}" for name in names]
    print(f"    {'step':<{width}}{''.join(heads)}{'seconds':>9}{'MB':>9}{'skew':>7}{'orphans':>9}{'hub':>7}")
    for row in rows:
        figures = [f"{100 * row['metrics'][name]:6.2f} ({100 * row['gain'][name]:+6.2f})" for name in names]
        found = row["hubness"]
        print(
            f"    {row['step']:<{width}}{''.join(figures)}{row['seconds']:>9.2f}{row['bytes'] / 1e6:>9,.1f}"
            f"{found['skewness']:>7.2f}{100 * found['orphans']:>7.2f} %{found['largest_hub']:>7,}"
        )
