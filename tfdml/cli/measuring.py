"""What `tfdml evaluate` measures of a split that a model embeds, or of embeddings on disk; and how it is printed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from tfdml.cli import model_flags
from tfdml.cli.command_line import Flags
from tfdml.data.dataset import ImageDataset
from tfdml.data.pipeline import evaluation_batches
from tfdml.data.transforms import EvaluationTransform
from tfdml.embeddings.base import EmbeddingBackend, Views, embed_views
from tfdml.embeddings.reader import StoredEmbeddings, read_embeddings
from tfdml.errors import UserError
from tfdml.evaluation import (
    KNNClassifier,
    Sources,
    calibrate,
    evaluate_classification,
    evaluate_generalisation,
    measure_chains,
    target_of,
    verification,
)
from tfdml.evaluation.chains import Step, steps_of
from tfdml.evaluation.per_query import dataset_roles
from tfdml.evaluation.retrieval import CLUSTERING_METRICS, dataset_protocol, ks_within
from tfdml.models import Embedder, Head
from tfdml.report import Run, write_report
from tfdml.training import RunFolder
from tfdml.training.build.images import split_training_classes
from tfdml.training.expressions import parse_sum, shortened
from tfdml.training.run.several import final_run


@dataclasses.dataclass(frozen=True)
class EmbeddedSplit:
    """A split of a data set, embedded.

    Args:
        values: The flags.
        name: What to call the images in print.
        dataset_name: The data set, or where the embeddings lie.
        embeddings: (N, d).
        images: Has the `labels` (N,), and `is_query` (N,) or None, of the embeddings.
        dataset: The images themselves; None where only embeddings are known.
        source: The model; None likewise.
        choice: Where to read other splits from; None likewise.
        stored: All that lies next to the embeddings on disk; None for a model.
    """

    values: Flags
    name: str
    dataset_name: str
    embeddings: np.ndarray
    images: Any
    dataset: ImageDataset | None = None
    source: EmbeddingBackend | None = None
    choice: model_flags.DataChoice | None = None
    stored: StoredEmbeddings | None = None

    @classmethod
    def by_model(cls, values: Flags, metrics: Sequence[str]) -> EmbeddedSplit:
        """Return a split, embedded by a model."""
        choice = model_flags.chosen_data(values)
        source = model_flags.chosen_source(values)
        dataset = choice.load(values.split)
        if "recall" in metrics:
            fitting_ks(values, dataset)
        vectors = source.embed(dataset, values.batch_size)
        return cls(values, f"{choice.name}, {values.split}", choice.name, vectors, dataset, dataset, source, choice)

    @classmethod
    def on_disk(cls, values: Flags) -> EmbeddedSplit:
        """Return a split of embeddings from disk; with `--dataset`, checked against its images.

        Raises:
            UserError: There are no labels, the data set's images are others, or a page is asked for without them.
        """
        if values.report and not values.dataset:
            raise UserError("--report shows images: name their --dataset and --data_dir next to the embeddings")
        everything = read_embeddings(values.model)
        part = everything.split(values.split)
        dataset, choice = None, None
        if values.dataset:
            choice = model_flags.chosen_data(values)
            dataset = choice.load(values.split)
            part = _with_labels_of(part, dataset, f"{choice.name} ({values.split})")
        if part.labels is None:
            raise UserError(f"{values.model} has no labels: add the class of each embedding, or name a --dataset")
        known = choice.name if choice else Path(values.model).name
        about = part.manifest.get("dataset", {}).get("name") or known
        name = f"{about}, {values.split}" if part.roles is not None or choice else about
        images = part if dataset is None or not (dataset.protocol or dataset.groups is not None) else dataset
        return cls(values, name, about, part.embeddings, images, dataset, None, choice, everything)

    @property
    def num_classes(self) -> int:
        """How many classes the images are of."""
        return len(np.unique(self.images.labels))

    def generalisation(self) -> dict[str, Any]:
        """Return the measures of generalisation that the training classes, and the model, allow."""
        if self.values.split == "train":
            raise UserError("--generalisation compares the test classes with the training classes: leave --split=test")
        train, options = self._train_side(), {}
        if train[0] is None:
            logging.warning("no embeddings of training classes: some measures are left out (tfdml embed --split=all)")
        embedder = getattr(self.source, "embedder", None)
        if isinstance(embedder, Embedder) and not isinstance(embedder, Head) and self.dataset is not None:
            batches = evaluation_batches(self.dataset, EvaluationTransform.of(embedder), self.values.batch_size)
            options = {"embedder": embedder, "test_batches": batches}
        return evaluate_generalisation(
            self.embeddings, self.images.labels, *train, distance=self.values.distance, **options
        )

    def after_embedding(
        self, chains: Sequence[Sequence[Step]], ks: Sequence[int], metrics: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return the rows of `measure_chains`: what is gained by steps between the embedding and the ranking."""

        # Chains that need the same images embedded share them.
        @functools.cache
        def train(views: Views | None) -> Any:
            if self.values.split == "train":
                raise UserError("--after: whitening is fitted to the training classes: leave --split=test")
            vectors, _ = self._train_side(views)
            if vectors is None:
                raise UserError("--after: whitening needs embeddings of training classes, too: tfdml embed --split=all")
            return vectors

        @functools.cache
        def embed(views: Views) -> tuple[np.ndarray, np.ndarray | None]:
            protocol = dataset_protocol(self._embed(self.dataset, views), self.images)
            return protocol["embeddings"], protocol.get("gallery")

        return measure_chains(
            **dataset_protocol(self.embeddings, self.images),
            chains=chains,
            sources=Sources(train, embed if self.source is not None else None),
            ks=ks,
            metrics=[name for name in metrics if name not in CLUSTERING_METRICS] or ["recall"],
            distance=self.values.distance,
        )

    def verification(self) -> dict[str, Any]:
        """Print verification over all pairs of the split, and with `--target` the threshold; return both for JSON."""
        labels, distance = self.images.labels, self.values.distance
        measured = verification(self.embeddings, labels, distance=distance)
        print(f"{self.values.model} on {self.name}: {len(labels):,} images of {measured.num_classes:,} classes")
        print(
            f"  pairs: {measured.num_same:,} of one class, {measured.num_different:,} of different classes; {distance}"
        )
        print(f"  {'auc':<24}{measured.auc:9.6f}")
        print(f"  {'eer':<24}{100 * measured.eer:6.2f} %  at a distance of {measured.eer_threshold:.6g}")
        for far, point in measured.points.items():
            place = f"at a distance of {point.threshold:.6g}"
            print(f"  {f'tar@far={far:g}':<24}{100 * point.tar.mean:6.2f} %{_interval(point.tar)}  {place}")
        result = measured.to_dict()
        result["intervals"] = {f"tar@far={far:g}": point.tar for far, point in measured.points.items()}
        if self.values.target:
            calibration = calibrate(self.embeddings, labels, distance=distance, **target_of(self.values.target))
            print(f"  the same, with {calibration.target}: at a distance of at most {calibration.threshold:.6g}")
            print("  to expect of as many other classes, with 95 % intervals:")
            for name in ("far", "tar", "precision"):
                rate = getattr(calibration, name)
                print(f"    {name:<22}{100 * rate.mean:8.4f} %  [{100 * rate.low:.4f}, {100 * rate.high:.4f}]")
            result["calibration"] = calibration.to_dict()
        return result

    def classification(self) -> dict[str, Any]:
        """Print how well nearest images classify the split, and name classes that the gallery lacks; return it."""
        labels = np.asarray(self.images.labels)
        order = np.argsort(labels, kind="stable")
        _, starts, counts = np.unique(labels[order], return_index=True, return_counts=True)
        place = np.empty(len(labels), np.int64)
        place[order] = np.arange(len(labels)) - np.repeat(starts, counts)
        known = np.isin(labels, np.unique(labels)[: -(-len(counts) // 2)])
        in_gallery = known & (place % 2 == 0)
        classifier = KNNClassifier(
            self.embeddings[in_gallery], labels[in_gallery], k=self.values.neighbors, distance=self.values.distance
        )
        measured = evaluate_classification(classifier, self.embeddings[~in_gallery], labels[~in_gallery])
        print(
            f"{self.values.model} on {self.name}: a gallery of {in_gallery.sum():,} images of "
            f"{len(classifier.classes):,} classes; {measured['num_known']:,} queries of these, "
            f"{measured['num_unknown']:,} of other classes"
        )
        print_metrics({name: value for name, value in measured.items() if isinstance(value, float)})
        return measured

    def write_page(self, result: dict[str, Any]) -> None:
        """Write the report of one model on the split.

        Raises:
            UserError: It cannot be written.
        """
        assert self.dataset is not None
        values, held_out = self.values, None
        if self.source is not None and self.choice is not None and values.split == "test" and is_run(values.model):
            _, classes = seen_and_held_out(self.choice.load("train"), self.choice.name, values.model)
            held_out = None if classes is None else (self._embed(classes, None), classes.labels)
        if values.task == "verification":
            shown = [name for name in result if name in ("auc", "intervals") or name.startswith("tar@")]
            result = {name: result[name] for name in shown}
        options: dict[str, Any] = {"distance": values.distance, "held_out": held_out}
        if values.target:
            options["target"] = target_of(values.target)
        settings = {name: values[name].value for name in values if values[name].present}
        run = Run(values.model, {"metrics": result}, flags=settings)
        try:
            write_report(values.report, run, self.dataset, self.embeddings, **options)
        except OSError as error:
            raise UserError(f"--report={values.report} cannot be written: {error.strerror or error}") from error

    def _embed(self, dataset: ImageDataset | None, views: Views | None) -> np.ndarray:
        """(N, d) a data set, embedded by the model, in its one view or averaged over several."""
        assert self.source is not None
        assert dataset is not None
        if views is None:
            return self.source.embed(dataset, self.values.batch_size)

        return embed_views(self.source, dataset, self.values.batch_size, views)

    def _train_side(self, views: Views | None = None) -> tuple[Any, Any]:
        """Embeddings and labels of the training classes; None where they are not to be had."""
        if self.source is not None and self.choice is not None:
            dataset, _ = seen_and_held_out(self.choice.load("train"), self.choice.name, self.values.model)
            return self._embed(dataset, views), dataset.labels
        if self.stored is not None and self.stored.roles is not None and (self.stored.roles == "train").any():
            train = self.stored.split("train")
            return train.embeddings, train.labels
        return None, None


def fitting_ks(values: Flags, images: Any) -> tuple[int, ...]:
    """Return the K of `--ks`; where the flag is not given, without those that the images are too few for.

    Args:
        values: The flags.
        images: Has `labels` (N,), and `is_query` (N,) or None.

    Raises:
        UserError: A query is compared with fewer than K images, for a K that was asked for.
    """
    benchmark = getattr(images, "protocol", None)
    ks = benchmark.ks if benchmark and not values["ks"].present else tuple(int(k) for k in values.ks)
    queries, gallery = dataset_roles(images)
    available = len(queries) - 1 if gallery is None else len(gallery)
    fitting = ks_within(ks, available)
    if max(ks) > available and values["ks"].present:
        asked, smaller = (",".join(map(str, some)) for some in (ks, fitting))
        raise UserError(f"--ks={asked}: there are {available:,} images to search in; choose e.g. --ks={smaller}")
    return fitting


def is_run(model: str) -> bool:
    """Whether a path is the folder of a run."""
    return (Path(model) / "flags.txt").is_file()


def seen_and_held_out(train: ImageDataset, name: str, model: str) -> tuple[ImageDataset, ImageDataset | None]:
    """Return the training images of the classes that a run trained on, and those of the classes that it held out.

    Args:
        train: The images.
        name: The data set.
        model: The folder of the run; for another model, or another data set, no class is held out, nor by a run
            without labels.
    """
    if not is_run(model):
        return train, None
    experiment = RunFolder(model).load_experiment()
    if experiment.data_name != name or experiment.sampling == "two_views":
        return train, None
    data = final_run(experiment)
    return split_training_classes(train, data.holdout_classes, experiment.seed, data.holdout_sampling)


def _with_labels_of(part: StoredEmbeddings, dataset: ImageDataset, what: str) -> StoredEmbeddings:
    if len(part) != len(dataset):
        raise UserError(f"{part.source} holds {len(part):,} embeddings, but {what} has {len(dataset):,} images")
    if part.labels is None:
        roles = None if dataset.is_query is None else np.where(dataset.is_query, "query", "gallery")
        return dataclasses.replace(part, labels=dataset.labels, roles=part.roles if roles is None else roles)
    # An .npz may number its classes in its own way: the same images must belong together.
    pairs = np.unique(np.stack([part.labels, dataset.labels]), axis=1).shape[1]
    if not pairs == len(np.unique(part.labels)) == len(np.unique(dataset.labels)):
        raise UserError(f"{part.source} holds embeddings of other classes than {what}, or of its images in other order")
    return part


def parsed_chains(texts: Sequence[str]) -> list[list[Step]]:
    """Return the chains of `--after`.

    Raises:
        UserError: One cannot be read, or has an unknown step, argument or order.
    """
    result = []
    for text in texts:
        if not text.strip():
            raise UserError("--after= names nothing: leave the flag out, or name a step")
        terms = parse_sum(text, "--after")
        if any(weight != 1 for weight, _ in terms):
            raise UserError(f"--after={shortened(text)!r}: steps have no factors; join them by +, in their order")
        try:
            result.append(steps_of((call.name, call.arguments) for _, call in terms))
        except UserError as error:
            raise UserError(f"--after={shortened(text)!r}: {error}") from error
    return result


def print_metrics(result: dict[str, Any]) -> None:
    """Print one metric a line, fractions in percent, with its interval where there is one."""
    intervals = result.get("intervals", {})
    for key, value in result.items():
        if isinstance(value, float):
            print(f"  {key:<24}{100 * value:6.2f} %{_interval(intervals.get(key))}")
        elif isinstance(value, int):
            print(f"  {key:<24}{value:>6}")
    if "parts" in result:
        print("  means over ten disjoint parts:")
        for key, interval in result["parts"].items():
            print(f"    {key:<22}{100 * interval.mean:6.2f} %{_interval(interval)}")
    if "generalisation" in result:
        print("  generalisation (no percentages):")
        for key, value in result["generalisation"].items():
            print(f"    {key:<34}{value:>14,}" if isinstance(value, int) else f"    {key:<34}{value:>14.4g}")
    if "after" in result:
        _print_rows(result["after"])


def _interval(interval: Any) -> str:
    return f"  [{100 * interval.low:.2f}, {100 * interval.high:.2f}]" if interval is not None else ""


def _print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line a row: each metric in percent with the points gained, seconds, megabytes and hubs."""
    names = list(rows[0]["metrics"])
    width = max(4, *(len(row["step"]) for row in rows))
    hubs = rows[0]["hubness"]["k"]
    print(f"  after the embedding, points gained on plain in brackets; hubs among the {hubs} nearest:")
    heads = [f"{name:>15}" for name in names]
    print(f"    {'step':<{width}}{''.join(heads)}{'seconds':>9}{'MB':>9}{'skew':>7}{'orphans':>9}{'hub':>7}")
    for row in rows:
        numbers = [f"{100 * row['metrics'][name]:6.2f} ({100 * row['gain'][name]:+6.2f})" for name in names]
        found = row["hubness"]
        print(
            f"    {row['step']:<{width}}{''.join(numbers)}{row['seconds']:>9.2f}{row['bytes'] / 1e6:>9,.1f}"
            f"{found['skewness']:>7.2f}{100 * found['orphans']:>7.2f} %{found['largest_hub']:>7,}"
        )
