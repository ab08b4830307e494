"""Searches of a gallery of one's own: its threshold, and how later queries differ."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tfdml.cli.command_line import load_tensorflow
from tfdml.cli.evaluation.flags import EvaluateFlags
from tfdml.cli.evaluation.thresholds import read_calibration
from tfdml.cli.model_flags import DataChoice, kind_of_gallery, load_source, trained_names
from tfdml.errors import ERROR_TEXT, UserError, counted, user_errors
from tfdml.io.files import printable

if TYPE_CHECKING:
    import numpy as np

    from tfdml.embeddings.backends import EmbeddingBackend
    from tfdml.evaluation import Drift
    from tfdml.retrieval.galleries import About

# What may be searched, next to images and stored embeddings.
_GALLERIES = ("retriever", "database")
# Of lists of images.
_LISTS = (".csv", ".tsv", ".jsonl", ".ndjson", ".json")


@dataclasses.dataclass(frozen=True)
class GallerySide:
    """Images or stored embeddings, by the names of their classes.

    Args:
        embeddings: (N, d).
        classes: (N,) names.
        model: The fingerprint of what embedded them; empty where it is not known.
        classes_are_numbers: Whether the classes have no names.
        about: What is known of a gallery; None: of other sides.
    """

    embeddings: np.ndarray
    classes: np.ndarray
    model: str
    classes_are_numbers: bool = False
    about: About | None = None

    @classmethod
    def read(
        cls,
        name: str,
        flags: EvaluateFlags,
        source: Callable[[], EmbeddingBackend],
        distance: str = "",
    ) -> GallerySide:
        """Read what a flag names, and print what it is.

        Args:
            name: The flag.
            flags: The flags.
            source: Loads what embeds images.
            distance: That of the searches of a gallery; empty: that of the gallery.

        Raises:
            UserError: It is a gallery that is not searched, it has no classes or another distance,
                or an image is bad.
        """
        from tfdml.embeddings.files import class_of_each

        path = os.path.expanduser(getattr(flags, name))
        kind = kind_of_gallery(path)
        if kind == "embeddings" or (kind in _GALLERIES and name == "gallery"):
            side = cls._of_gallery(path, kind, distance)
            if not any(side.classes):
                raise UserError("has no classes: add the class of each embedding", **{name: path})
        elif kind == "images":
            images = DataChoice("folder", path, {}, flags.bad_images).load("all")
            classes = class_of_each(images.labels, images.class_names)
            vectors = source().embed(images, flags.batch_size)
            side = cls(vectors, classes, source().fingerprint())
        else:
            raise UserError(
                f"is a {kind}: name the images or the embeddings that it was made from",
                **{name: getattr(flags, name)},
            )
        count = f"{counted(len(side.classes), 'image')} of {len(set(side.classes)):,} classes"
        print(f"{name} {printable(getattr(flags, name))}: {count}")
        return side

    @classmethod
    def _of_gallery(cls, path: str, kind: str, distance: str) -> GallerySide:
        import numpy as np

        from tfdml.retrieval import open_gallery

        if kind == "retriever":
            load_tensorflow()
        with open_gallery(path, distance=distance) as gallery:
            about = gallery.about
            if about is None or not len(gallery):
                raise UserError("is empty: write it with tfdml index", gallery=gallery.address)
            gallery.check_holds_rows()
            rows = gallery.rows(len(gallery))
            classes = np.array(rows.columns["class"], object)
            return cls(rows.vectors, classes, about.model, about.classes_are_numbers, about)


def _source(flags: EvaluateFlags) -> Callable[[], EmbeddingBackend]:
    """Return what loads, once, the model that embeds images: --model or a retriever."""
    from tfdml.embeddings.backends import load_backend

    @functools.cache
    def source() -> EmbeddingBackend:
        if flags.model:
            return load_source(flags)
        if kind_of_gallery(flags.gallery) != "retriever":
            raise UserError("is missing: it embeds the images", model=...)
        return load_backend(os.path.expanduser(flags.gallery))

    return source


def calibrate_gallery(flags: EvaluateFlags) -> dict[str, Any]:
    """Print the threshold for searches of a gallery by known queries and strangers, and return it
    for JSON."""
    import numpy as np

    from tfdml import evaluation

    target = evaluation.target_of(flags.target, kinds=("fpir",))

    source = _source(flags)
    names = ["gallery", "strangers"] + (["known"] if flags.known else [])
    sides = {name: GallerySide.read(name, flags, source, flags.distance) for name in names}
    gallery = sides.pop("gallery")
    for name, side in sides.items():
        _check_against_gallery(gallery, side, name)
    shared = np.intersect1d(sides["strangers"].classes, gallery.classes)
    if len(shared):
        raise UserError(
            f"{len(shared):,} of its classes are in the gallery, such as {shared[0]}: name images "
            "of other classes",
            strangers=flags.strangers,
        )
    _report_trained(flags.model, sides)
    queries = np.concatenate([side.embeddings for side in sides.values()])
    labels = np.concatenate([side.classes for side in sides.values()])
    is_stranger = np.zeros(len(labels), bool)
    is_stranger[: len(sides["strangers"].classes)] = True
    calibration = evaluation.calibrate(
        queries,
        labels,
        gallery=gallery.embeddings,
        gallery_labels=gallery.classes,
        unknown=is_stranger,
        distance=flags.distance,
        per_class=flags.per_class,
        **target,
    )
    model = sides["strangers"].model or gallery.model
    gallery_model = "" if gallery.model == model else gallery.model
    calibration = calibration.measured_on(
        gallery=printable(flags.gallery), model=model, gallery_model=gallery_model
    )
    print(calibration)
    return {
        "task": flags.task,
        **_named(flags, "model", "gallery", "known", "strangers"),
        "distance": flags.distance,
        "calibration": calibration.to_dict(),
    }


def _named(flags: EvaluateFlags, *names: str) -> dict[str, str]:
    """Return flags as they may be stored: without the passwords of addresses."""
    return {name: printable(getattr(flags, name)) for name in names}


def _check_against_gallery(gallery: GallerySide, side: GallerySide, name: str) -> None:
    """Refuse queries of another model, or with numbers of classes that the gallery has too: nobody
    knows whether they are the same classes."""
    from tfdml.embeddings.files import check_same_model

    if gallery.about is None:
        check_same_model(gallery.model, side.model, f"--gallery and --{name}")
    else:
        gallery.about.check_model(side.model, f"--gallery and --{name}")
    if gallery.classes_are_numbers or side.classes_are_numbers:
        shared = sorted(set(gallery.classes).intersection(side.classes))
        if shared:
            raise UserError(
                f"its classes or those of the gallery are numbers, such as {shared[0]}, which mean "
                "something in one file alone: store names of classes",
                **{name: ...},
            )


def _report_trained(model: str, sides: Mapping[str, GallerySide]) -> None:
    """Print which queries have the names of classes that an exported model was trained on.

    Raises:
        UserError: Strangers have.
    """
    trained = trained_names(model)
    for name, side in sides.items():
        shared = sorted(trained.intersection(side.classes))
        if not shared:
            continue
        text = f"{len(shared):,} of the classes were trained on by name, such as {shared[0]}"
        if name == "strangers":
            raise UserError(f"{text}: the rate would come out too good", strangers=...)
        print(f"{name}: {text}: tpir may come out too good")


def watch_queries(flags: EvaluateFlags) -> tuple[Drift, dict[str, Any]]:
    """Print how later queries differ from those of a calibration, and return it, also for JSON."""
    from tfdml.embeddings.files import check_same_model

    calibration = read_calibration(flags.watch)
    with user_errors(UserError, ERROR_TEXT, watch=flags.watch):
        calibration.for_searches(calibration.distance)
    source = _source(flags)
    gallery = GallerySide.read("gallery", flags, source, calibration.distance)
    basis = calibration.basis
    own = basis.gallery_model or basis.model
    check_same_model(own, gallery.model, "the threshold and --gallery")
    queries = _queries(flags, source)
    check_same_model(basis.model, queries.model, "the threshold and --queries")
    with user_errors(UserError, ERROR_TEXT, watch=flags.watch):
        drift = calibration.watch(
            queries.embeddings,
            gallery.embeddings,
            gallery.classes,
            classes=queries.classes,
            unknown_share=flags.unknown_share,
        )
    print(
        f"{counted(drift.count, 'query')}; threshold {calibration.threshold:.6g} for "
        f"{calibration.target}"
    )
    print(drift)
    print(
        f"  without a change, all are in their intervals in {100 * drift.level:g} % of weeks; "
        f"classes are found by {counted(drift.compared, 'query')}"
    )
    document = _named(flags, "watch", "model", "gallery")
    return drift, {**document, "queries": list(map(printable, flags.queries)), **drift.to_dict()}


@dataclasses.dataclass(frozen=True)
class _Queries:
    """Later queries.

    Args:
        embeddings: (N, d).
        classes: (N,) their classes; None: not known.
        model: The fingerprint of what embedded them; empty where it is not known.
    """

    embeddings: np.ndarray
    classes: np.ndarray | None
    model: str


def _queries(flags: EvaluateFlags, source: Callable[[], EmbeddingBackend]) -> _Queries:
    """Return the queries that the flags name: stored embeddings, or images, embedded."""
    import numpy as np

    from tfdml.data import ImageDataset
    from tfdml.data.faults import check
    from tfdml.data.images import FileImages
    from tfdml.data.readers.image_files import images_named
    from tfdml.embeddings.files import holds_embeddings, read_embeddings

    first = os.path.expanduser(flags.queries[0])
    if len(flags.queries) == 1 and holds_embeddings(first):
        stored = read_embeddings(first)
        return _Queries(np.asarray(stored.embeddings), stored.labels, stored.model)
    labels = None
    if len(flags.queries) == 1 and first.endswith(_LISTS):
        paths, labels = _listed(first)
    else:
        paths = []
        for text in flags.queries:
            paths += images_named("queries", text)
    numbers = np.zeros(len(paths), np.int64)
    images = ImageDataset("queries", "all", FileImages(tuple(paths)), numbers)
    load_tensorflow()
    images = check(images, flags.bad_images, "decode" if flags.bad_images == "skip" else "headers")
    if len(images) != len(paths):  # some are left out, and said so
        labels = None
    vectors = source().embed(images, flags.batch_size)
    return _Queries(vectors, labels, source().fingerprint())


def _listed(path: str) -> tuple[list[str], np.ndarray | None]:
    """Return the images of a list, and their classes where it has them."""
    import numpy as np

    from tfdml.data.readers.own_images import read_rows

    table = read_rows(os.path.abspath(path), required=("path",))
    labels = table.columns.get("label")
    return table.columns["path"], None if labels is None else np.array(labels, object)
