"""The families of choices of a run: `Sampling`, `HoldoutSampling`, `Augmentation`, `Head` and
`TextBackbone`, with those that there are; and `Interpolation`.

What they build is registered next to it: `build_sampler`, `hold_out` and `train_transform` of
`tfdml.training.run_data`, `projection` and `build_text_embedder` of `tfdml.training.build`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from tfdml.errors import UserError, user_errors
from tfdml.expressions import HUB, Arguments, Call
from tfdml.options import Choice, choice, option


class Sampling(Choice):
    """What a batch is.

    Attributes:
        by_class: Whether it is composed of `classes_per_batch` and `images_per_class`, and not of
            `batch_size`.
    """

    by_class: ClassVar[bool] = False
    by_size: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class _ByClass(Sampling):
    by_class: ClassVar[bool] = True
    by_size: ClassVar[bool] = False

    short_classes: str = option(
        "repeat",
        words=("repeat", "drop"),
        help="What happens to classes of fewer than K images.",
    )


@choice("class_balanced", "P classes x K images.")
@dataclasses.dataclass(frozen=True)
class ClassBalanced(_ByClass):
    """P classes with K images each."""


@choice("hierarchical", "P classes x K images, from few super-classes.")
@dataclasses.dataclass(frozen=True)
class Hierarchical(_ByClass):
    """P classes with K images each, from few super-classes."""

    super_classes: int = option(1, at_least=1, help="From how many super-classes a batch is.")
    weights: str = option(
        "proportional",
        words=("proportional", "uniform"),
        help="How likely a super-class is: by its images, or all alike.",
    )


@choice("neighbors", "P classes x K images, of classes that the embedder confuses.")
@dataclasses.dataclass(frozen=True)
class Neighbors(_ByClass):
    """P classes with K images each, of classes that the embedder confuses."""

    every: int = option(1, at_least=1, help="Epochs between two searches for them.")
    anchor_classes: int = option(4, at_least=1, help="Classes of a batch whose neighbors follow.")
    skip_top: int = option(
        0, at_least=0, help="How many of the nearest images of other classes each image skips."
    )
    relative_margin: float | None = option(
        None,
        help="Leaves out images of other classes whose cosine is above 1 - this times the mean "
        "cosine within the class; none: no image.",
    )


@choice("whole_classes", "All images of classes, up to --batch_size.")
@dataclasses.dataclass(frozen=True)
class WholeClasses(Sampling):
    """All images of classes."""


@choice("shuffle", "Any images.")
@dataclasses.dataclass(frozen=True)
class Shuffle(Sampling):
    """Any images."""


@choice("pairs", "Given pairs.")
@dataclasses.dataclass(frozen=True)
class Pairs(Sampling):
    """Given pairs."""


@choice("texts", "Images of different texts.")
@dataclasses.dataclass(frozen=True)
class Texts(Sampling):
    """Images of different texts."""


@dataclasses.dataclass(frozen=True)
class HoldoutSampling(Choice):
    """How validation classes are drawn."""

    part: int = option(
        0,
        at_least=0,
        help="Which of the disjoint parts of the training classes, from 1 on; 0: any classes.",
    )


@choice("random", "All alike.")
@dataclasses.dataclass(frozen=True)
class Random(HoldoutSampling):
    """All alike."""


@choice("stratified", "One of each of as many groups of classes of about the same size.")
@dataclasses.dataclass(frozen=True)
class Stratified(HoldoutSampling):
    """One of each of as many groups of classes of about the same size."""


class Augmentation(Choice):
    """How training crops are taken."""


@choice("random_crop", "Of the size of --image_size.")
@dataclasses.dataclass(frozen=True)
class RandomCrop(Augmentation):
    """Crops of one size."""


@choice("random_resized_crop", "Of any size and shape, resized.")
@dataclasses.dataclass(frozen=True)
class RandomResizedCrop(Augmentation):
    """Crops of any size and shape, resized."""

    min_scale: float = option(0.08, above=0, at_most=1, help="Smallest share of the image's area.")


@choice("multi_resolution", "Of the image at another size each time, filled with --pad_color.")
@dataclasses.dataclass(frozen=True)
class MultiResolution(Augmentation):
    """Crops of the image at another size each time."""


@choice("none", "The crop of evaluation.")
@dataclasses.dataclass(frozen=True)
class Centered(Augmentation):
    """The crop of evaluation."""


class Head(Choice):
    """What projects pooled features to the embedding."""


@choice("linear", "One dense layer.")
@dataclasses.dataclass(frozen=True)
class Linear(Head):
    """One dense layer."""

    bias: bool = option(True, help="Whether it has a bias.")


@choice("mlp", "Two dense layers, with a ReLU between.")
@dataclasses.dataclass(frozen=True)
class MLP(Head):
    """Two dense layers, with a ReLU between."""

    hidden: int = option(512, at_least=1, help="Size of the first.")


@choice("whitened", "One dense layer, which starts as the PCA whitening of the training images.")
@dataclasses.dataclass(frozen=True)
class Whitened(Head):
    """One dense layer, which starts as the PCA whitening of the training images."""

    power: float | None = option(
        None,
        at_least=0,
        at_most=1,
        help="1: all components vary alike; 0: as if not whitened; none: 1.",
    )
    shrinkage: float | None = option(
        None,
        at_least=0,
        at_most=1,
        help="0 to 1: how far the variances are drawn to their mean; none: 0.",
    )


@choice("ensemble", "An attention ensemble (ABE) that shares --embedding_dim.")
@dataclasses.dataclass(frozen=True)
class Ensemble(Head):
    """An attention ensemble (ABE)."""

    heads: int = option(8, at_least=1, help="How many learners.")
    cut: tuple[str, ...] | None = option(
        None, help="The layers between which the attention lies; none: those of the backbone."
    )
    bias: bool = option(True, help="Whether the dense layer has a bias.")


class TextBackbone(Choice):
    """What reads texts."""

    @classmethod
    def parse(cls, text: str, argument: str) -> Choice:
        """Return the backbone of a text, such as `hub:siglip_base(length=64)`.

        Raises:
            UserError: The text cannot be read, or there is no such backbone or option.
        """
        if not text.startswith(HUB):
            return super().parse(text, argument)
        preset, opening, options = text.removeprefix(HUB).partition("(")
        call = Call.parse(f"hub{opening}{options}", argument)
        return cls.of(Call("hub", Arguments(call.arguments, preset=preset)), text, argument)


@dataclasses.dataclass(frozen=True)
class _Trained(TextBackbone):
    rate: float = option(
        -1.0,
        at_least=0,
        also=-1,
        help="Its learning rate; 0: it does not train; -1: that of the projection, and of a "
        "preset that of the backbone.",
    )


@choice("bytes", "Their bytes, by a small network that is trained from scratch.")
@dataclasses.dataclass(frozen=True)
class Bytes(_Trained):
    """A small network of bytes, trained from scratch."""

    length: int = option(64, at_least=1, help="Bytes of a text that are read.")
    width: int = option(64, at_least=1, help="Features of a byte.")
    pooling: str = option("max", help="Pooling over the positions.")


@choice("hub", "The text half of a preset of KerasHub, written hub:NAME or hub:NAME(length=32).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Hub(_Trained):
    """The text half of a preset of KerasHub."""

    preset: str = option(help="Name or folder of the preset.")
    length: int = option(0, at_least=0, help="Tokens of a text; 0: the preset's own.")
    pooling: str = option("avg", help="Pooling over the positions, of presets of texts alone.")
    truncate: bool = option(False, help="Whether longer texts are cut, and no error.")

    def __str__(self) -> str:
        options = self.changed()
        return str(Call(f"{HUB}{options.pop('preset')}", options))


@choice("vectors", "Stored vectors of the texts, next to --features.")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Vectors(TextBackbone):
    """Stored vectors of texts."""

    path: str = option(help="A file or folder of embeddings, in the order of the images.")


@dataclasses.dataclass(frozen=True)
class Interpolation:
    """How far the weights that are kept lie from the start of a training to its end.

    Attributes:
        share: 0 .. 1; None: it is measured.

    Example:
        >>> Interpolation.parse("0.5", "interpolate"), str(Interpolation(None))
        (Interpolation(share=0.5), 'auto')
    """

    share: float | None = 1.0

    @classmethod
    def parse(cls, text: str, argument: str) -> Interpolation:
        """Parse a share, or auto.

        Raises:
            UserError: It is neither.
        """
        if text.strip() == "auto":
            return cls(None)
        wrong = "write auto, or a number of 0 to 1: the share of the end"
        named: dict[str, Any] = {argument: text}
        with user_errors(ValueError, wrong, **named):
            share = float(text)
        if not 0 <= share <= 1:
            raise UserError(wrong, **named)
        return cls(share)

    def __str__(self) -> str:
        return "auto" if self.share is None else f"{self.share:g}"
