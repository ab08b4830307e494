"""The flags of `tfdml evaluate`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from tfdml.cli.model_flags import DataFlags
from tfdml.expressions import Arguments
from tfdml.options import changed, condition, option
from tfdml.registry import DISTANCES, PER_CLASS

_ALONE = "no compare and no watch"
_IMAGES = "dataset or features or embeds"
_MEASURED = f"{_ALONE} and task=retrieval"
_GALLERY = "gallery and target and task=classification"
_TASKS = ("retrieval", "verification", "classification")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateFlags(DataFlags):
    """What is measured, and how."""

    title: ClassVar[str] = "What is measured, and how"

    batch_size: int = changed(DataFlags, "batch_size", requires="embeds")
    truncate_dim: int = changed(DataFlags, "truncate_dim", requires="embeds")
    features: str = changed(DataFlags, "features", requires="has_head")
    data_dir: str = changed(DataFlags, "data_dir", requires=_IMAGES)
    dataset_options: Arguments = changed(DataFlags, "dataset_options", requires=_IMAGES)
    bad_images: str = changed(DataFlags, "bad_images", requires=_IMAGES)
    split: str = option(
        "test", words=("test", "train"), requires=_ALONE, help="Which classes to measure on."
    )
    metrics: tuple[str, ...] = option(
        (),
        requires=_MEASURED,
        help="Which metrics, see above. Large sets are quicker without nmi, ami and f1.",
    )
    ks: tuple[int, ...] = option(
        (),
        at_least=1,
        requires=_MEASURED,
        help="The K of Recall@K; by default the benchmark's, or those of 1, 2, 4 and 8 that fit "
        "the images.",
    )
    distance: str = option("euclidean", words=DISTANCES, requires=_ALONE, help="What near means.")
    intervals: str = option(
        "none",
        words=("none", "classes", "queries"),
        requires=_MEASURED,
        help="95 % intervals, by bootstrap over classes or queries.",
    )
    task: str = option(
        "retrieval", words=_TASKS, requires=_ALONE, help="What the embeddings are for."
    )
    target: str = option(
        "",
        requires="task=verification|classification or is_upgrade and split=test",
        help="Choose a threshold: far=0.001 or precision=0.99 with --task=verification, fpir=0.01 "
        "with classification or an older --gallery.",
    )
    gallery: str = option(
        "",
        requires="is_searched",
        help="What is searched. With --task=retrieval, the stored embeddings of an older model, "
        "which --model searches. With classification, in place of a split: images, stored "
        "embeddings, a retriever or the address of a database.",
    )
    known: str = option(
        "",
        requires=_GALLERY,
        help="Further images of the gallery's classes, or embeddings.",
    )
    strangers: str = option(
        "",
        requires=_GALLERY,
        help="Images of none of the gallery's classes, or embeddings.",
    )
    neighbors: int = option(
        5, at_least=1, requires="task=classification", help="How many images vote."
    )
    per_class: str = option(
        "nearest",
        words=PER_CLASS,
        requires="task=classification or set_pairs",
        help="What stands for a class, or a set: each image, their mean, or several means.",
    )
    set_pairs: str = option(
        "",
        requires="task=verification and no target and no report",
        help="A table of pairs of sets of images, such as the templates of IJB, in the columns a, "
        "b and similar. The sets are the classes of the images.",
    )
    groups: bool = option(
        False,
        requires="set_pairs",
        help="Images of one group of a set have one mean, by their column group.",
    )
    templates: tuple[str, ...] = option(
        ("{}",),
        requires="task=classification",
        help="Texts with {} in the place of a class's name, for a model of images and texts.",
    )
    generalization: bool = option(
        False,
        requires=f"{_MEASURED} and no gallery",
        help="Also compare the embeddings of the training classes with these.",
    )
    json: str = option("", help="File to write the metrics to, as fractions.")
    report: str = option(
        "",
        requires=f"{_ALONE} and task=retrieval|verification and no gallery",
        help="File to write an HTML page to.",
    )
    compare: tuple[str, ...] = option(
        (),
        paths=True,
        help="In place of --model: finished runs, compared with the first of them.",
    )
    watch: str = option(
        "",
        requires="no compare",
        help="A JSON file with a threshold for searches: compare --queries with those that it was "
        "measured on.",
    )
    queries: tuple[str, ...] = option(
        (),
        paths=True,
        requires="watch",
        help="Later queries: images, folders or patterns; a list of images, *.csv or *.jsonl; or "
        "stored embeddings.",
    )
    unknown_share: float | None = option(
        None,
        at_least=0,
        at_most=1,
        requires="watch",
        help="The share of strangers expected among them; by default that among the queries of the "
        "threshold.",
    )

    @condition(
        "--watch, --task=retrieval without --compare, or --task=classification with --target"
    )
    def is_searched(self) -> bool:
        """Whether a gallery is searched."""
        if self.watch:
            return True
        if self.task == "retrieval":
            return not self.compare
        return self.task == "classification" and bool(self.target)

    @condition("a --gallery of an older model")
    def is_upgrade(self) -> bool:
        """Whether a model searches the gallery of an older one."""
        return bool(self.gallery) and self.task == "retrieval" and not self.watch

    @condition("a model as --model")
    def embeds(self) -> bool:
        """Whether images are embedded."""
        from tfdml.embeddings.files import holds_embeddings

        return not self.compare and not holds_embeddings(self.model)

    @condition("a head as --model")
    def has_head(self) -> bool:
        """Whether the model may be a head."""
        from tfdml.embeddings.files import holds_embeddings

        return not holds_embeddings(self.model)
