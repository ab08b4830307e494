"""What bin/evaluate measures: embeddings of a model or from disk, with their images; and how it prints the result."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import flags, logging

from tfdml.cli import model_flags
from tfdml.cli.flag_names import own_flags
from tfdml.errors import UserError
from tfdml.memory import free_memory, require_memory

if TYPE_CHECKING:
    from tfdml.data.dataset import ImageDataset
    from tfdml.embeddings.backends import EmbeddingBackend
    from tfdml.embeddings.reader import StoredEmbeddings
    from tfdml.embeddings.views import Views

_CLUSTERING = ("nmi", "ami", "f1")


@dataclasses.dataclass(frozen=True)
class Subject:
    """Embeddings and what they are of.

    Args:
        name: What to call the images in print.
        dataset_name: The data set, or where the embeddings lie.
        embeddings: (N, d).
        images: What has the `labels` (N,), and `is_query` (N,) or None, of the embeddings.
        dataset: The images themselves; None where only embeddings are known.
        source: The model; None likewise.
        choice: Where to read other splits from; None likewise.
        stored: All that lies beside the embeddings on disk; None for a model.
    """

    name: str
    dataset_name: str
    embeddings: np.ndarray
    images: Any
    dataset: ImageDataset | None = None
    source: EmbeddingBackend | None = None
    choice: model_flags.DataChoice | None = None
    stored: StoredEmbeddings | None = None

    @property
    def num_classes(self) -> int:
        """How many classes the images are of."""
        return len(np.unique(self.images.labels))


def embedded(model: str, split: str, metrics: list[str]) -> Subject:
    """A split, embedded by a model."""
    choice = model_flags.chosen_data(model)
    source = model_flags.chosen_source(model)
    dataset = choice.load(split)
    if "recall" in metrics:
        fitting_ks(dataset)
    vectors = source.embed(dataset, flags.FLAGS.batch_size)
    return Subject(f"{choice.name}, {split}", choice.name, vectors, dataset, dataset, source, choice)


def stored(path: str, split: str, metrics: list[str]) -> Subject:
    """A split of embeddings from disk; with `--dataset`, checked against its images.

    Raises:
        UserError: There are no labels, the data set's images are others, or a page is asked for without them.
    """
    from tfdml.embeddings.reader import read_embeddings

    if flags.FLAGS.report and not flags.FLAGS.dataset:
        raise UserError("--report shows images: name their --dataset and --data_dir beside the embeddings")
    everything = read_embeddings(path)
    part = everything.split(split)
    dataset, choice = None, None
    if flags.FLAGS.dataset:
        choice = model_flags.chosen_data(path)
        dataset = choice.load(split)
        part = _with_labels_of(part, dataset, f"{choice.name} ({split})")
    if part.labels is None:
        raise UserError(f"{path} has no labels: put the class id of each embedding there, or name a --dataset")
    about = part.manifest.get("dataset", {}).get("name") or (choice.name if choice else Path(path).name)
    name = f"{about}, {split}" if part.roles is not None or choice else about
    return Subject(name, about, part.embeddings, part, dataset, None, choice, everything)


def fitting_ks(images: Any) -> tuple[int, ...]:
    """The K of `--ks`; where the flag is not given, without those that the images are too few for.

    Args:
        images: What has `labels` (N,), and `is_query` (N,) or None.

    Raises:
        UserError: A query is compared with fewer than K images, for a K that was asked for.
    """
    from tfdml.evaluation.per_query import dataset_roles
    from tfdml.evaluation.retrieval import ks_within

    ks = tuple(int(k) for k in flags.FLAGS.ks)
    queries, gallery = dataset_roles(images)
    available = len(queries) - 1 if gallery is None else len(gallery)
    fitting = ks_within(ks, available)
    if max(ks) > available and flags.FLAGS["ks"].present:
        raise UserError(
            f"--ks={','.join(map(str, ks))}: there are {available:,} images to search in; choose smaller ones, e.g. "
            f"--ks={','.join(map(str, fitting))}"
        )
    return fitting


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


def kmeans_sample(subject: Subject, metrics: list[str]) -> int:
    """How many embeddings k-means is to be trained on where not all fit into memory; 0: all.

    Raises:
        UserError: Not even as many as there are classes fit.
    """
    from tfdml.retrieval.exact import is_memory_mapped

    wanted = sorted(set(metrics) & set(_CLUSTERING))
    # Three times over: in memory k-means holds the embeddings, a copy that it moves, and faiss's own.
    if not wanted or not is_memory_mapped(subject.embeddings):
        return 0
    free = free_memory()
    if 3 * subject.embeddings.nbytes <= free:
        return 0
    row = subject.embeddings.nbytes // len(subject.embeddings)
    fitting = int(free / 2) // (3 * row)
    what, advice = f"{', '.join(wanted)} of {subject.name}", "leave them out: --metrics=recall,map@r,r_precision"
    require_memory(6 * row * subject.num_classes, what, advice)
    logging.warning("%s: k-means is trained on a sample of %s embeddings, which fit into memory", what, f"{fitting:,}")
    return fitting


def quantised(subject: Subject, kinds: list[str], distance: str) -> dict[str, Any]:
    """Recall@1 in galleries of fewer bytes, see `quantised_recall`."""
    from tfdml.evaluation.approximate_search import quantised_recall
    from tfdml.evaluation.retrieval import dataset_protocol

    return quantised_recall(**dataset_protocol(subject.embeddings, subject.images), kinds=kinds, distance=distance)


def generalisation(subject: Subject, distance: str) -> dict[str, Any]:
    """The measures of generalisation that the training classes, and the model, allow."""
    from tfdml.evaluation import evaluate_generalisation
    from tfdml.models import Embedder

    if flags.FLAGS.split == "train":
        raise UserError("--generalisation compares the test classes with the training classes: leave --split=test")
    train, options = train_side(subject), {}
    if train[0] is None:
        logging.warning(
            "no embeddings of training classes: measures that need them are left out (bin/embed --split=all)"
        )
    embedder = getattr(subject.source, "embedder", None)
    if isinstance(embedder, Embedder) and subject.dataset is not None:
        from tfdml.data.pipeline import evaluation_batches
        from tfdml.data.transforms import EvaluationTransform

        batches = evaluation_batches(subject.dataset, EvaluationTransform.of(embedder), flags.FLAGS.batch_size)
        options = {"embedder": embedder, "test_batches": batches}
    return evaluate_generalisation(subject.embeddings, subject.images.labels, *train, distance=distance, **options)


def embed(subject: Subject, dataset: ImageDataset | None, views: Views | None = None) -> np.ndarray:
    """(N, d) a data set, embedded by a subject's model, in its one view or averaged over several."""
    assert subject.source is not None
    assert dataset is not None
    if views is None:
        return subject.source.embed(dataset, flags.FLAGS.batch_size)
    from tfdml.embeddings.views import embed_views

    return embed_views(subject.source, dataset, flags.FLAGS.batch_size, views)


def train_side(subject: Subject, views: Views | None = None) -> tuple[Any, Any]:
    """Embeddings and labels of the training classes; None where they are not to be had."""
    if subject.source is not None and subject.choice is not None:
        dataset = _trained_on(subject.choice.load("train"), subject.choice.name)
        return embed(subject, dataset, views), dataset.labels
    whole = subject.stored
    if whole is not None and whole.roles is not None and (whole.roles == "train").any():
        train = whole.split("train")
        return train.embeddings, train.labels
    return None, None


def _trained_on(train: ImageDataset, name: str) -> ImageDataset:
    """Without the classes that a run held out: it has not seen them."""
    from tfdml.training import RunFolder
    from tfdml.training.build.images import split_training_classes
    from tfdml.training.run.several import trained_on

    if not (Path(flags.FLAGS.model) / "flags.txt").is_file():
        return train
    experiment = RunFolder(flags.FLAGS.model).load_experiment()
    if experiment.dataset != name:
        return train
    data = trained_on(experiment)
    return split_training_classes(train, data.holdout_classes, experiment.seed, data.holdout_sampling)[0]


def print_metrics(result: dict[str, Any]) -> None:
    """One metric a line, fractions in percent, with its interval where there is one."""
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
    for kind, found in result.get("quantised", {}).items():
        name, lost = f"recall@1, {kind}", 100 * found["lost"]
        print(
            f"  {name:<24}{100 * found['recall@1']:6.2f} %  {found['bytes']:,} bytes a vector, {lost:+.2f} points lost"
        )
    if "generalisation" in result:
        print("  generalisation (no percentages):")
        for key, value in result["generalisation"].items():
            print(f"    {key:<34}{value:>14,}" if isinstance(value, int) else f"    {key:<34}{value:>14.4g}")


def _interval(interval: Any) -> str:
    return f"  [{100 * interval.low:.2f}, {100 * interval.high:.2f}]" if interval is not None else ""


def write_page(subject: Subject, result: dict[str, Any], path: str, distance: str) -> None:
    """The report of one model on one split.

    Raises:
        UserError: The page cannot be written.
    """
    from tfdml.report import Run, write_report

    assert subject.dataset is not None
    settings = {flag.name: flag.value for flag in own_flags().values() if flag.present}
    run = Run(flags.FLAGS.model, {"metrics": result}, flags=settings)
    try:
        write_report(path, run, subject.dataset, subject.embeddings, distance=distance)
    except OSError as error:
        raise UserError(f"--report={path} cannot be written: {error.strerror or error}") from error
