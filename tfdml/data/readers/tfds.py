"""Any image data set of TensorFlow Datasets, by its name."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfdml.data.dataset import ImageDataset
from tfdml.data.images import EncodedImages
from tfdml.data.readers import label_files as files
from tfdml.data.readers.label_files import warn_singleton_classes
from tfdml.errors import REASON, UserError, short_message, user_errors


def read(
    data_dir: str | os.PathLike | None = None,
    split: str = "train",
    *,
    name: str,
    image: str = "",
    label: str = "label",
    by_class: bool = True,
    test_fraction: float = 0.5,
    download: bool = False,
) -> ImageDataset:
    """Read a data set that TensorFlow Datasets has prepared, with its class ids.

    Most of these data sets have every class in each of their splits. So by default the images of the splits train,
    validation and test, or of all if it has none of these, are taken together, and the last classes are held out as the
    test split, as for a folder of class folders. Unlabelled images (class -1) are left out. The images of the split
    asked for are held in memory, encoded as they are stored.

    Args:
        data_dir: Where TensorFlow Datasets keeps its data; `~/tensorflow_datasets` by default.
        split: `"train"` or `"test"`.
        name: The data set, if need be with configuration and version, e.g. `"cifar100"` or `"cars196:2.1.0"`.
        image: Its image feature; needed only if there are several.
        label: Its feature with the class, of a `ClassLabel` or another integer.
        by_class: Whether to split by class; False to take its own splits `train` and `test`, for a data set whose
            splits have different classes, such as `stanford_online_products`.
        test_fraction: The share of the classes that `by_class` holds out; each split gets at least one class.
        download: Whether to download and prepare the data set if it is not there.

    Raises:
        UserError: TensorFlow Datasets is not installed, does not know the data set or has not prepared it, or the
            data set has no such image, label or split.

    Example:
        >>> read(split="test", name="cifar100", download=True).num_classes  # doctest: +SKIP
        50
    """
    files.check_fraction("tfds", test_fraction)
    builder = _builder(name, data_dir, download)
    image = _image_feature(builder, image)
    _check_label_feature(builder, label)
    labels = {own: _labels(builder, own, label) for own in _own_splits(builder, by_class)}
    # Image rows of the split asked for, by the data set's own splits.
    if by_class:
        classes = np.unique(np.concatenate([found[found >= _lowest(builder, label)] for found in labels.values()]))
        chosen = files.split_classes("tfds", name, classes.tolist(), test_fraction, "by_class=False")[split]
        rows = {own: np.flatnonzero(np.isin(found, chosen)) for own, found in labels.items()}
    else:
        files.warn_shared_classes("tfds", name, np.intersect1d(labels["train"], labels["test"]).tolist())
        rows = {split: np.flatnonzero(labels[split] >= _lowest(builder, label))}
    names = [f"{name}/{own}/{row}" for own in rows for row in rows[own]]
    data = tuple(encoded for own in rows for encoded in _encoded(builder, own, image, rows[own]))
    ids = np.concatenate([labels[own][rows[own]] for own in rows])
    class_name = getattr(builder.info.features[label], "int2str", str)
    class_names = {int(c): class_name(int(c)) for c in np.unique(ids)}
    warn_singleton_classes("tfds", split, ids, class_names)
    return ImageDataset("tfds", split, EncodedImages(data, tuple(names)), ids, class_names)


def _library() -> Any:
    with user_errors(ImportError, "tfds: TensorFlow Datasets is not installed; pip install 'tfdml[tfds]'"):
        import tensorflow_datasets  # optional, and slow to import
    return tensorflow_datasets


def _builder(name: str, data_dir: str | os.PathLike | None, download: bool) -> Any:
    library = _library()
    try:
        builder = library.builder(name, data_dir=data_dir)
    except library.core.DatasetNotFoundError as error:
        raise UserError(f"tfds: TensorFlow Datasets knows no data set {name!r}") from error
    except Exception as error:  # a wrong configuration or version, or a requirement of the data set's own code
        raise UserError(f"tfds: {name!r} cannot be opened: {short_message(error, 'first')}") from error
    if download:
        # anything between the network and the disk
        with user_errors(Exception, f"tfds: {name} could not be fetched: {REASON}", keep="first"):
            builder.download_and_prepare()
    if not builder.is_prepared():
        raise UserError(f"tfds: {name} is not prepared in {builder.data_dir}: run `tfds build {name}`")
    return builder


def _image_feature(builder: Any, image: str) -> str:
    found = [key for key, feature in builder.info.features.items() if isinstance(feature, _library().features.Image)]
    if image in found:
        return image
    if len(found) == 1 and not image:
        return found[0]
    there = f"its image features are {', '.join(found)}" if found else "it has no image feature"
    wanted = f"no image feature {image!r}" if image else "not one image feature"
    raise UserError(f"tfds: {builder.info.name} has {wanted}; {there} (option image)")


def _check_label_feature(builder: Any, label: str) -> None:
    features = builder.info.features
    integers = [
        key for key, feature in features.items() if feature.shape == () and np.issubdtype(feature.np_dtype, np.integer)
    ]
    if label not in integers:
        there = f"one of: {', '.join(integers)}" if integers else "a data set that has one"
        raise UserError(f"tfds: {builder.info.name} has no integer feature {label!r}; choose {there} (option label)")


def _own_splits(builder: Any, by_class: bool) -> list[str]:
    """Return the names of the data set's splits to read."""
    there = sorted(builder.info.splits)
    if by_class:
        return [own for own in ("train", "validation", "test") if own in there] or there
    if lacking := {"train", "test"} - {*there}:
        held = f"only {', '.join(there)}; pass by_class=True"
        raise UserError(f"tfds: {builder.info.name} has no split {max(lacking)!r}, {held}")
    return ["train", "test"]


def _lowest(builder: Any, label: str) -> int:
    """Return the lowest id that is a class: -1 of a ClassLabel marks images without a label."""
    is_class = isinstance(builder.info.features[label], _library().features.ClassLabel)
    return 0 if is_class else int(np.iinfo(np.int64).min)


def _examples(builder: Any, split: str, feature: str) -> Iterator[Any]:
    """One feature of every example, images as stored, in the order of the files."""
    library = _library()
    is_image = isinstance(builder.info.features[feature], library.features.Image)
    dataset = builder.as_dataset(
        split=split,
        shuffle_files=False,
        decoders=library.decode.PartialDecoding(
            {feature: True}, decoders={feature: library.decode.SkipDecoding()} if is_image else None
        ),
        read_config=library.ReadConfig(try_autocache=False, interleave_cycle_length=1),
    )
    return (example[feature] for example in dataset.as_numpy_iterator())


def _labels(builder: Any, split: str, label: str) -> np.ndarray:
    with user_errors(OverflowError, f"tfds: {builder.info.name}, split {split}: a {label} does not fit in 64 bits"):
        return np.fromiter(_examples(builder, split, label), np.int64)


def _encoded(builder: Any, split: str, image: str, rows: np.ndarray) -> Iterator[bytes]:
    wanted = set(rows.tolist())
    return (data for row, data in enumerate(_examples(builder, split, image)) if row in wanted)
