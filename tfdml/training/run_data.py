"""From settings to the images of a run: its splits, sampler and views, and what of them is kept in
memory."""

import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from tfdml import data
from tfdml.audit import read_drops
from tfdml.data import sampling
from tfdml.data.dataset import ImageDataset
from tfdml.data.faults import check
from tfdml.data.images import OptionalImages
from tfdml.data.pipeline import CACHE_LIMIT_MB, MEGABYTE, decoded_bytes, memory_to_spare
from tfdml.data.policies import Policy
from tfdml.data.readers.own_images import linked_classes, read_pairs, similar_images
from tfdml.data.readers.splits import split_classes, warn_shared_classes
from tfdml.data.transforms import EvaluationTransform, TrainTransform
from tfdml.embeddings.files import ImageTable, StoredEmbeddings, read_embeddings
from tfdml.errors import ERROR_TEXT, UserError, check_share, counted, user_errors
from tfdml.evaluation import dataset_protocol
from tfdml.evaluation.metrics import DEFAULT_KS, ks_within
from tfdml.evaluation.relevance import retrieval_task
from tfdml.evaluation.retrieval import check_depth
from tfdml.evaluation.views import ViewItems
from tfdml.io.files import plain_path
from tfdml.io.tables import Table
from tfdml.labels import require_classes
from tfdml.names import composed, quoted
from tfdml.training.choices import (
    Augmentation,
    ClassBalanced,
    Hierarchical,
    HoldoutSampling,
    Neighbors,
    Pairs,
    Random,
    RandomResizedCrop,
    Sampling,
    Shuffle,
    Stratified,
    Texts,
    Vectors,
    WholeClasses,
)
from tfdml.training.settings import MOST_CLASSES, DataSettings


@dataclasses.dataclass(frozen=True)
class Splits:
    """The images of a run.

    Args:
        train: With class ids 0 .. C - 1.
        validation: Held-out training classes, or None.
        test: The unseen classes; None for a final model, which trains on all.
        dropped: Names of the training images that were left out.
        views: By name, the images and texts of the splits that are measured, where texts are
            embedded too: each image is in the split once.
        also: The test images of a second data set, which are measured, too; or None.
    """

    train: ImageDataset
    validation: ImageDataset | None
    test: ImageDataset | None
    dropped: tuple[str, ...] = ()
    views: Mapping[str, ViewItems] = dataclasses.field(default_factory=dict)
    also: ImageDataset | None = None

    def searched_by_images(self, name: str) -> bool:
        """Whether images of a split search it; not where it has texts, and no two images of one
        class."""
        split = getattr(self, name)
        return name not in self.views or split.num_classes < len(split)

    def evaluated(self) -> dict[str, ImageDataset]:
        """Return the splits that the embedder is measured on, by name."""
        splits = {"validation": self.validation, "test": self.test, "also": self.also}
        return {name: split for name, split in splits.items() if split is not None}

    def identity(self, directory: str = "") -> dict[str, dict[str, Any]]:
        """Return what identifies a run's images: how many there are, their names, labels and
        content.

        Args:
            directory: Where the data set lies; names count from there.
        """
        splits = {"train": self.train} | self.evaluated()
        identities = {name: _identity_of(split, directory) for name, split in splits.items()}
        if self.dropped:
            identities["train"]["dropped"] = list(self.dropped)
        return identities


def _identity_of(split: ImageDataset, directory: str) -> dict[str, Any]:
    table = ImageTable.of([split], directory)
    identity = {
        # An image with several texts has several rows.
        "images": len(set(split.names)),
        "classes": split.num_classes,
        "names and labels": table.checksum(),
        "content": split.checksum(),
    }
    if split.pairs is not None:
        identity["pairs"] = split.pairs.checksum()
    if split.texts is not None:
        identity["texts"] = hashlib.sha256("\0".join(split.texts).encode()).hexdigest()
    return identity


def load_splits(settings: DataSettings, seed: int) -> Splits:
    """Load and check the images of a run.

    Args:
        settings: Which images.
        seed: Of the choice of the classes that are held out.

    Raises:
        UserError: Something about the data is wrong; the message says what and where.
    """
    train, test = _read_splits(settings)
    dropped: tuple[str, ...] = ()
    if settings.drop:
        train, dropped = leave_out(train, test, settings.drop, plain_path(settings.data_dir))
    if not settings.features:
        depth = "decode" if settings.bad_images == "skip" else "headers"
        train = check(train, settings.bad_images, depth)
        if test is not None:
            test = check(test, settings.bad_images, depth)
    if settings.text_backbone and train.texts is None and train.tokens is None:
        logging.info(
            "%s has no texts: those of its images are the names of their classes", train.name
        )
        train = train.with_class_names()
        test = None if test is None else test.with_class_names()
    if train.texts is not None and not settings.text_backbone:
        logging.info("the texts of %s are left out: --text_backbone embeds them", train.name)
    _refuse_one_class(train)
    train, validation = split_training_classes(
        train, settings.holdout_classes, seed, settings.holdout_sampling
    )
    also = _read_second(settings) if settings.also_measure else None
    splits = Splits(train.contiguous(), validation, test, dropped=dropped, also=also)
    return _with_views(splits) if settings.text_backbone else splits


def _read_splits(settings: DataSettings) -> tuple[ImageDataset, ImageDataset | None]:
    """Return the training and the test images that settings name; of a final model, all of them
    and None."""
    if settings.features:
        train, test = _read_features(settings)
    else:
        directory = plain_path(settings.data_dir) or None
        train = data.load(settings.dataset, directory, "train", **settings.dataset_options)
        test = data.load(settings.dataset, directory, "test", **settings.dataset_options)
    return (train.join(test), None) if settings.final_of else (train, test)


def _read_second(settings: DataSettings) -> ImageDataset:
    """Return the test images of `also_measure`, checked."""
    name, _, directory = settings.also_measure.partition(":")
    with user_errors(UserError, ERROR_TEXT, also_measure=settings.also_measure):
        images = data.load(name, plain_path(directory) or None, "test")
        depth = "decode" if settings.bad_images == "skip" else "headers"
        return check(images, settings.bad_images, depth)


def _read_features(settings: DataSettings) -> tuple[ImageDataset, ImageDataset]:
    options, directory = settings.dataset_options, plain_path(settings.data_dir)
    texts = settings.text_backbone.path if isinstance(settings.text_backbone, Vectors) else ""
    with user_errors(TypeError, f"of features: {ERROR_TEXT}", dataset_options=str(options)):
        splits = vector_splits(settings.features, directory, **options, texts=texts)
    return splits["train"], splits["test"]


def _refuse_one_class(train: ImageDataset) -> None:
    if train.num_classes == 1 and train.pairs is None and train.label_rows is None:
        name = next(iter(train.class_names.values()))
        raise UserError(
            f"the training images of {train.name} have one class only, {name!r}; name a folder or "
            "list with two or more"
        )


def _with_views(splits: Splits) -> Splits:
    """Return splits with their images and texts as views, and each image once where it is
    measured."""
    views = {name: ViewItems.of(split) for name, split in splits.evaluated().items()}
    once: dict[str, Any] = {}
    for name, items in views.items():
        once[name] = getattr(splits, name).take(items.rows)
    return dataclasses.replace(splits, **once, views=views)


def leave_out(
    train: ImageDataset, test: ImageDataset | None, drop: str, directory: str = ""
) -> tuple[ImageDataset, tuple[str, ...]]:
    """Return the training images without those that a CSV file says to drop, and the names of
    these.

    Args:
        train: The training images.
        test: The test images, which all stay, so that results remain comparable. None: there are
            none.
        drop: As `tfdml.audit.read_drops`.
        directory: Where the data set lies; names count from there.

    Raises:
        UserError: As `read_drops`; the file names images that are in neither split, or all of
            `train`.
    """
    names = _composed_names(train, directory)
    test_names = [] if test is None else _composed_names(test, directory)
    named = _named_drops(drop, train.name, {*names, *test_names})
    kept = [row for row, name in enumerate(names) if name not in named]
    if not kept:
        raise UserError("leaves no training image", drop=drop)
    share = f"{len(names) - len(kept):,} of {len(names):,}"
    staying = len(named.intersection(test_names))
    rest = "" if test is None else f"; {staying:,} test images that it names stay"
    logging.info("drop=%s leaves out %s training images%s", drop, share, rest)
    return train.take(np.array(kept)), tuple(sorted(named.intersection(names)))


def leave_out_of_all(
    splits: Sequence[ImageDataset], drop: str, directory: str = ""
) -> list[ImageDataset]:
    """Return splits without the images that a CSV file says to drop, as `leave_out` of the training
    images alone.

    Raises:
        UserError: As `leave_out`; or no image is left.
    """
    names = [_composed_names(split, directory) for split in splits]
    named = _named_drops(drop, splits[0].name, set(itertools.chain(*names)))
    parts = []
    for split, split_names in zip(splits, names, strict=True):
        kept = [row for row, name in enumerate(split_names) if name not in named]
        if kept:
            parts.append(split.take(np.array(kept)))
    if not parts:
        raise UserError("leaves no image", drop=drop)
    total = sum(map(len, splits))
    left_out = total - sum(map(len, parts))
    logging.info("drop=%s leaves out %s of %s images", drop, f"{left_out:,}", f"{total:,}")
    return parts


def _named_drops(drop: str, dataset: str, names: set[str]) -> set[str]:
    """Return the names that a CSV file says to drop, all of which a data set has."""
    named = set(map(composed, read_drops(os.path.expanduser(drop))))
    if unknown := sorted(named - names):
        raise UserError(
            f"names {counted(len(unknown), 'image')} that {dataset} does not have, such as "
            f"{unknown[0]!r}: correct the names, or take out the rows",
            drop=drop,
        )
    return named


def _composed_names(split: ImageDataset, directory: str) -> list[str]:
    table = ImageTable.of([split], os.path.expanduser(directory))
    return list(map(composed, table.names))


def vector_splits(
    path: str, folder: str = "", test_fraction: float | None = 0.5, pairs: str = "", texts: str = ""
) -> dict[str, ImageDataset]:
    """Return stored embeddings as the `train` and the `test` images of a head.

    Their roles are the split. Where the file has none, the last classes in the order of their ids
    are the test classes.

    Args:
        path: As of `read_embeddings`; labels have to be there.
        folder: Where the images lie that its names are of.
        test_fraction: Without roles: the share of the classes that is the test split; at least one.
            None, for a trained head: all are test images, one split may be missing, and vectors
            without labels are each of an own class.
        pairs: A file with pairs of the names, see `read_pairs`; there need be no labels then.
        texts: A file with the vector of each image's text: by the name of the image where both
            files have names, or else in the same order.

    Raises:
        UserError: There are no labels, a vector is not finite, a split would be empty, or there is
            not one vector of a text for each image.

    Example:
        >>> np.savez("vectors.npz", embeddings=np.eye(4, dtype=np.float32), labels=[0, 0, 1, 1])
        >>> vector_splits("vectors.npz", test_fraction=0.5)["test"]
        ImageDataset('vectors', 'test', images=2, classes=1)
    """
    if test_fraction is not None:
        check_share(test_fraction=test_fraction)
    path = os.path.expanduser(path)
    stored = read_embeddings(path)
    _refuse_not_finite(stored, features=path)
    columns: dict[str, Any] = {}
    if texts:
        columns["tokens"] = _text_vectors(os.path.expanduser(texts), stored)
    if pairs:
        stored, columns = _with_given_pairs(stored, path, pairs, columns)
    stored = _with_split(stored, path, test_fraction)
    splits = {}
    is_train = stored.roles == "train"
    for split, is_of_split in (("train", is_train), ("test", ~is_train)):
        rows = np.flatnonzero(is_of_split)
        # A split that was asked for and is empty is refused there.
        if len(rows) or test_fraction is not None:
            splits[split] = _vectors_of(stored, split, folder, rows, columns)
    if len(splits) == 2:
        shared = np.intersect1d(splits["train"].classes, splits["test"].classes)
        warn_shared_classes("features", path, shared.tolist())
    return splits


def _refuse_not_finite(stored: StoredEmbeddings, **argument: str) -> None:
    bad = np.flatnonzero(~np.isfinite(stored.embeddings).all(axis=1))
    if len(bad):
        raise UserError(
            f"{counted(len(bad), 'vector', 'are')} not finite, the first in row {bad[0]:,}",
            **argument,
        )


def _text_vectors(path: str, stored: StoredEmbeddings) -> np.ndarray:
    """Return the vector of each image's text, (N, d)."""
    texts = read_embeddings(path)
    if len(texts) != len(stored):
        raise UserError(
            f"{path} has {len(texts):,} vectors of texts, and features={stored.source} "
            f"{len(stored):,} of images"
        )
    _refuse_not_finite(texts, text_backbone=path)
    names = list(map(composed, stored.names))
    text_names = list(map(composed, texts.names))
    if not (stored.has_names and texts.has_names) or names == text_names:
        return texts.embeddings
    row_of = {name: row for row, name in enumerate(text_names)}
    if len(row_of) < len(text_names) or row_of.keys() != set(names):
        raise UserError(
            f"{path} names {quoted(text_names[0])} first, and features={stored.source} "
            f"{quoted(names[0])}: vectors of texts are paired by the name of their image; give "
            "both files the same names, each once, or neither file names"
        )
    return texts.embeddings[[row_of[name] for name in names]]


def _with_given_pairs(
    stored: StoredEmbeddings, path: str, pairs: str, columns: Mapping[str, Any]
) -> tuple[StoredEmbeddings, dict[str, Any]]:
    """Return stored vectors and their columns with the pairs of a file; without labels, linked
    vectors are a class."""
    count = len(stored.names)
    table = Table("features", path, {"path": list(stored.names)})
    given, junk = read_pairs(os.path.join(os.path.dirname(path), pairs), table)
    columns = {**columns, "pairs": given}
    if stored.labels is None:
        columns["protocol"] = similar_images(given, count, junk)
        stored = dataclasses.replace(stored, labels=linked_classes(given, count))
    return stored, columns


def _with_split(
    stored: StoredEmbeddings, path: str, test_fraction: float | None
) -> StoredEmbeddings:
    """Return stored vectors with labels, and with roles that are their split."""
    labels, roles = stored.labels, stored.roles
    if test_fraction is None:
        labels = np.arange(len(stored)) if labels is None else labels
        roles = np.full(len(stored), "test") if roles is None else roles
    if labels is None:
        raise UserError(
            "has no labels: put the class of each vector there, as label or labels",
            features=path,
        )
    if roles is None:
        assert test_fraction is not None
        classes = split_classes(
            "features", path, np.unique(labels).tolist(), test_fraction, "a column role"
        )
        roles = np.where(np.isin(labels, classes["train"]), "train", "test")
    return dataclasses.replace(stored, labels=labels, roles=roles)


def _vectors_of(
    stored: StoredEmbeddings, split: str, folder: str, rows: np.ndarray, columns: Mapping[str, Any]
) -> ImageDataset:
    """Return the vectors of a split as a data set.

    Args:
        stored: All vectors.
        split: The split.
        folder: Where the images lie that the names are of.
        rows: Those of the split.
        columns: What else there is of all vectors: `pairs`, `protocol` or `tokens`.
    """
    part = stored.split(split)
    assert part.labels is not None
    images = OptionalImages(part.names, folder)
    classes = np.unique(part.labels).tolist()
    class_names = {label: part.class_names.get(label, str(label)) for label in classes}
    fields: dict[str, Any] = {"is_query": part.is_query, "groups": part.groups}
    fields["vectors"] = part.embeddings
    if "pairs" in columns:
        fields["pairs"] = columns["pairs"].take(rows, len(stored.names))
    if "protocol" in columns:
        fields["protocol"] = columns["protocol"].take(rows)
    if "tokens" in columns:
        fields["tokens"] = np.asarray(columns["tokens"][rows], np.float32)
    name = Path(part.source).stem
    return ImageDataset(name, split, images, part.labels, class_names, **fields)


def split_training_classes(
    train: ImageDataset, share: float, seed: int, sampling: HoldoutSampling | None = None
) -> tuple[ImageDataset, ImageDataset | None]:
    """Return the training classes that a run trains on, and those that it holds out, if any.

    Args:
        train: The training images.
        share: The share of the classes that is held out.
        seed: Of their choice.
        sampling: How they are drawn, and which of the 1 / `share` parts that have no class in
            common they are; by default any classes, all alike.

    Raises:
        UserError: No class would be left, or there is no such part.
    """
    if not share:
        return train, None
    sampling = sampling or Random()
    rng = np.random.default_rng(seed)
    classes = rng.permutation(train.classes)
    count, parts = max(1, round(share * len(classes))), round(1 / share)
    if count >= len(classes):
        raise UserError("leaves no class to train on", holdout_classes=share)
    if sampling.part and not sampling.part <= parts <= len(classes):
        there_are = f"{parts} parts of --holdout_classes={share:g}, and {len(classes)} classes"
        raise UserError(f"there are {there_are}", holdout_sampling=str(sampling))
    held_out = hold_out(sampling, train, classes, count, parts, rng)
    return train.select_classes(np.setdiff1d(classes, held_out)), train.select_classes(held_out)


@functools.singledispatch
def hold_out(
    sampling: HoldoutSampling,
    train: ImageDataset,
    classes: np.ndarray,
    count: int,
    parts: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return the classes that are held out; registered by the choice of how.

    Args:
        sampling: The choice.
        train: The training images.
        classes: Their classes, in any order.
        count: How many are held out, where `sampling.part` is 0.
        parts: How many parts there are.
        rng: What decides.
    """
    raise UserError("nothing is registered to draw classes by it", holdout_sampling=sampling.name)


@hold_out.register
def _(sampling: Random, train, classes, count, parts, rng):
    return classes[sampling.part - 1 :: parts] if sampling.part else classes[:count]


@hold_out.register
def _(sampling: Stratified, train, classes, count, parts, rng):
    # By their number of images; those of as many stay in any order.
    sizes = np.unique(train.labels, return_counts=True)[1]
    classes = classes[np.argsort(sizes[np.searchsorted(train.classes, classes)], kind="stable")]
    if sampling.part:
        return classes[sampling.part - 1 :: parts]
    return np.array([rng.choice(group) for group in np.array_split(classes, count)])


def make_sampler(
    settings: DataSettings, train: ImageDataset, seed: int, replicas: int = 1
) -> sampling.Sampler:
    """Return what chooses the images of each batch.

    Args:
        settings: How batches are composed.
        train: The training images.
        seed: Of the choice.
        replicas: Among how many devices a batch is shared out.

    Raises:
        UserError: The data has too few images, classes or super-classes for it, or the replicas do
            not divide a batch.
    """
    sampler = build_sampler(settings.sampling, settings, train, seed)
    sampling.check_divides(sampler.batch_size, replicas, "replicas")
    return sampler


@functools.singledispatch
def build_sampler(
    choice: Sampling, settings: DataSettings, train: ImageDataset, seed: int
) -> sampling.Sampler:
    """Return the sampler of a choice, by which it is registered.

    Args:
        choice: The choice.
        settings: With `batch_size`, `classes_per_batch` and `images_per_class`.
        train: The training images.
        seed: Of the choice of images.

    Raises:
        UserError: The data has too few images, classes or super-classes for it.
    """
    raise UserError("nothing is registered to make batches by it", sampling=choice.name)


def _classes_of_batch(settings: DataSettings, train: ImageDataset) -> int:
    return settings.classes_per_batch or min(MOST_CLASSES, train.num_classes)


@build_sampler.register
def _(choice: ClassBalanced, settings, train, seed):
    return sampling.ClassBalancedSampler(
        train.labels,
        _classes_of_batch(settings, train),
        settings.images_per_class,
        seed,
        short_classes=choice.short_classes,
    )


@build_sampler.register
def _(choice: Hierarchical, settings, train, seed):
    if train.super_labels is None:
        raise UserError(f"{train.name} has no super-classes", sampling=str(choice))
    return sampling.HierarchicalSampler(
        train.labels,
        train.super_labels,
        classes_per_batch=_classes_of_batch(settings, train),
        images_per_class=settings.images_per_class,
        seed=seed,
        short_classes=choice.short_classes,
        super_classes_per_batch=choice.super_classes,
        weights=choice.weights,
    )


@build_sampler.register
def _(choice: Neighbors, settings, train, seed):
    return sampling.NeighborSampler(
        train.labels,
        classes_per_batch=_classes_of_batch(settings, train),
        images_per_class=settings.images_per_class,
        seed=seed,
        short_classes=choice.short_classes,
        anchor_classes=choice.anchor_classes,
    )


@build_sampler.register
def _(choice: WholeClasses, settings, train, seed):
    return sampling.WholeClassSampler(train.labels, settings.batch_size, seed)


@build_sampler.register
def _(choice: Shuffle, settings, train, seed):
    if train.pairs is None and train.label_rows is None:
        require_classes(train.labels, "training")
    return sampling.ShuffleSampler(len(train), settings.batch_size, seed)


@build_sampler.register
def _(choice: Pairs, settings, train, seed):
    if train.pairs is None:
        raise UserError(
            f"{train.name} has no given pairs; name their file in dataset_options", sampling="pairs"
        )
    return sampling.PairSampler(train.pairs.rows, settings.batch_size, seed)


@build_sampler.register
def _(choice: Texts, settings, train, seed):
    numbers, size = train.text_numbers, settings.batch_size
    count = len(np.unique(numbers))
    if size > count:
        raise UserError(
            f"the training images have {count} different texts: lower it, or use sampling=shuffle, "
            "where items of one text are positives",
            batch_size=size,
        )
    return sampling.ClassBalancedSampler(numbers, size, 1, seed)


def make_transforms(settings: DataSettings) -> tuple[TrainTransform, EvaluationTransform]:
    """Return the views of the images, in training and in evaluation.

    Raises:
        UserError: The policy is not one that can be had.
    """
    if settings.features:
        return TrainTransform(resize=1, image_size=1), EvaluationTransform(
            1, 1
        )  # vectors have no views
    resize, size = max(settings.resize, settings.image_size), settings.image_size
    policy = None if settings.policy is None else Policy.of(settings.policy)
    train = train_transform(
        settings.augmentation,
        resize=resize,
        image_size=size,
        resize_mode=settings.resize_mode,
        flip=settings.flip,
        policy=policy,
        pad_color=settings.pad_color,
    )
    return train, EvaluationTransform(resize, size, settings.resize_mode, settings.pad_color)


@functools.singledispatch
def train_transform(choice: Augmentation, **views: Any) -> TrainTransform:
    """Return how training images are seen, registered by the choice of their crops.

    Args:
        choice: The choice.
        **views: The other arguments of `TrainTransform`.
    """
    return TrainTransform(augmentation=choice.name, **views)


@train_transform.register
def _(choice: RandomResizedCrop, **views):
    return TrainTransform(augmentation=choice.name, scale=(choice.min_scale, 1.0), **views)


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """Whether the decoded training images and the evaluation views stay in memory; batches are the
    same bit by bit.

    Args:
        kept: Whether they do.
        reason: Why, in words, with the memory that they take.
    """

    kept: bool
    reason: str = dataclasses.field(default="", compare=False)


def plan_cache(
    settings: DataSettings, splits: Splits, transform: TrainTransform, images_drawn: int
) -> CachePlan:
    """Decide what `--cache` means for a run. With auto, a run that sees its images hardly once
    keeps none.

    Args:
        settings: What is asked for.
        splits: The images.
        transform: The augmentation.
        images_drawn: How many training images the run will draw.
    """
    if settings.features:
        return CachePlan(False, "the vectors are in memory, or mapped")
    images = decoded_bytes(splits.train, transform)
    views = sum(len(split) for split in splits.evaluated().values()) * 3 * transform.image_size**2
    spare, kept = memory_to_spare(CACHE_LIMIT_MB), settings.cache == "true"
    if settings.cache == "auto":
        kept = images_drawn >= 2 * len(splits.train) and images + views <= spare
    decision = "both are kept" if kept else "neither is kept"
    images_size = f"{images / MEGABYTE:,.1f} MB"
    views_size = f"{views / MEGABYTE:,.1f} MB"
    spare_size = f"{spare / MEGABYTE:,.0f} MB"
    return CachePlan(
        kept,
        f"--cache={settings.cache}: training images take about {images_size} decoded, evaluation "
        f"views {views_size}; {spare_size} may be used: {decision}",
    )


def check_measurable(splits: Splits, ks: tuple[int, ...]) -> None:
    """Refuse splits on which Recall@K cannot be measured for each of `ks`; of the default, what
    fits is measured.

    Args:
        splits: The images of a run.
        ks: The K.

    Raises:
        UserError: No image has another of its class to find, or there are fewer than K images to
            look in.
    """
    for name, split in splits.evaluated().items():
        if not splits.searched_by_images(name):
            continue
        task = retrieval_task(**dataset_protocol(np.zeros((len(split), 1), np.float32), split))
        with user_errors(
            UserError, f"the {name} images of {split.name} cannot be measured: {ERROR_TEXT}"
        ):
            check_depth(task, ())
        if max(ks) > task.available:
            fitting = ",".join(map(str, ks_within(ks, task.available)))
            depth = (
                f"of the {name} images of {split.name} a query is compared with {task.available}"
            )
            if ks != DEFAULT_KS:
                raise UserError(f"{depth}; choose smaller ones, e.g. ks={fitting}", ks=ks)
            logging.warning("recall@K is measured for K = %s alone: %s", fitting, depth)
