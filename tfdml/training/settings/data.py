"""Images, views and batches."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdml.data.transforms import KINDS, as_color
from tfdml.errors import UserError
from tfdml.training.expressions import Call, parse_arguments, parse_sum
from tfdml.training.settings.fields import Settings, as_text, choice, fraction, positive


@dataclasses.dataclass(frozen=True)
class DataSettings(Settings):
    """Which images a run sees, in which views, and which of them form a batch.

    Raises:
        UserError: A value is out of range, or two do not go together.

    Example:
        >>> DataSettings(dataset="glyphs", dataset_options="size=32", image_size=28, resize=32).data_options()
        {'size': 32}
    """

    dataset: str = choice("glyphs", "Data set: a name of the catalogue, or folder for any tree of class folders.")
    data_dir: str = choice("", "Where the unpacked data set lies. glyphs needs none.")
    dataset_options: str = choice("", "Options of the data set, e.g. 'images_per_class=40' or 'test_fraction=0.3'.")
    bad_images: str = choice("error", "What to do with files that are no readable images.", choices=("error", "skip"))
    check_images: str = choice(
        "headers",
        "How images are checked before training: the header and the end of each file, or all of it (decode), at about "
        "a millisecond an image and core.",
        choices=("headers", "decode"),
    )
    holdout_classes: float = choice(
        0.0, "Share of the training classes that is held out of training, as validation classes.", check=fraction
    )
    holdout_sampling: str = choice(
        "random",
        "How --holdout_classes are drawn, by the seed: all alike (random); or one of each of as many groups of classes "
        "of about the same size (stratified), so that large and small classes are held out in proportion.",
        choices=("random", "stratified"),
    )
    cache: str = choice(
        "auto",
        "Keep the decoded images in memory; auto: where they take less than --cache_limit_mb and less than half of the "
        "free memory, and the run sees them more than once.",
        choices=("auto", "true", "false"),
        switch=True,
    )
    cache_limit_mb: int = choice(4096, "Most memory that --cache may take, in MiB.", check=positive)
    # Views
    image_size: int = choice(224, "Height and width in pixels of the crops that the network sees.", check=positive)
    resize: int = choice(256, "Pixels to which images are resized before the crop.", check=positive)
    resize_mode: str = choice(
        "shorter",
        "Whether the shorter side becomes --resize; both sides do (squash); or the longer side does and --pad_color "
        "fills up the square (pad).",
        choices=("shorter", "squash", "pad"),
    )
    pad_color: str = choice(
        "black", "Colour around images, for --resize_mode=pad and multi_resolution: black, white, or R,G,B of 0 to 255."
    )
    augmentation: str = choice("random_crop", "How training crops are taken.", choices=KINDS)
    min_scale: float = choice(
        0.08, "Smallest share of the image's area that random_resized_crop takes.", check=lambda v: 0 < v <= 1
    )
    min_resolution: float = choice(
        0.8, "Smallest longer side in multi_resolution, as a multiple of --image_size.", check=positive
    )
    max_resolution: float = choice(
        1.8, "Largest longer side in multi_resolution, as a multiple of --image_size.", check=positive
    )
    flip: bool = choice(True, "Mirror every second training image.")
    policy: str = choice(
        "",
        "What happens to the finished crops, by Keras's layers: e.g. 'rand_augment(factor=0.4) + 0.2 * grayscale' "
        "(the second on a fifth of the images).",
    )
    # Batches
    sampling: str = choice(
        "class_balanced",
        "P classes x K images; the same from a few super-classes (hierarchical); all images of random classes up to "
        "--batch_size (whole_classes); or a plain shuffle.",
        choices=("class_balanced", "shuffle", "whole_classes", "hierarchical"),
    )
    classes_per_batch: int = choice(20, "P, for class_balanced and hierarchical.", check=positive)
    images_per_class: int = choice(5, "K, for class_balanced and hierarchical.", check=positive)
    batch_size: int = choice(100, "Images per batch, over all replicas, for shuffle and whole_classes.", check=positive)
    short_classes: str = choice(
        "repeat", "Classes of fewer than K images: repeat their images, or drop them.", choices=("repeat", "drop")
    )
    super_classes_per_batch: int = choice(
        1, "S, for hierarchical: a batch has P / S classes of each of S super-classes.", check=positive
    )
    super_class_weights: str = choice(
        "proportional",
        "For hierarchical: super-classes in proportion to their classes, or all equally often (uniform).",
        choices=("proportional", "uniform"),
    )
    short_super_classes: str = choice(
        "merge",
        "Super-classes of fewer than P / S classes: merge them into one, or drop them.",
        choices=("merge", "drop"),
    )

    def __post_init__(self):
        # A truth value from Python, or from flag files of when it was a switch.
        object.__setattr__(self, "cache", as_text(self.cache))
        super().__post_init__()
        if self.resize < self.image_size and self.augmentation not in ("random_resized_crop", "multi_resolution"):
            raise UserError(
                f"--resize={self.resize} is smaller than --image_size={self.image_size}: no such crop can be cut"
            )
        as_color(self.pad_color)
        if self.min_resolution > self.max_resolution:
            raise UserError(
                f"--min_resolution={self.min_resolution:g} is above --max_resolution={self.max_resolution:g}"
            )
        self.data_options()
        self.policy_steps()

    def data_options(self) -> dict[str, Any]:
        """The options of the data set."""
        return parse_arguments(self.dataset_options, "--dataset_options")

    def policy_steps(self) -> list[tuple[float, Call]]:
        """The steps of the augmentation policy: the share of the images, and what happens to them."""
        return parse_sum(self.policy, "--policy") if self.policy.strip() else []
