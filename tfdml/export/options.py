"""How an export is made: `ExportOptions`, without TensorFlow."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from tfdml.data.limits import SERVING_LIMIT
from tfdml.errors import UserError
from tfdml.options import Settings, option

#: The precisions of LiteRT files.
PRECISIONS = ("float32", "float16", "dynamic_range", "int8")
FORMATS = ("saved_model", *(f"litert_{precision}" for precision in PRECISIONS), "onnx")
_TARGETS = ("fpir=", "far=", "precision=")
_GROUPS = {"all": FORMATS, "litert": tuple(name for name in FORMATS if name.startswith("litert"))}


@dataclasses.dataclass(frozen=True)
class ExportOptions(Settings):
    """How an export is made.

    Raises:
        UserError: A value is out of range.

    Example:
        >>> ExportOptions(formats="litert_int8,saved_model").formats
        ('saved_model', 'litert_int8')
    """

    stored: ClassVar[bool] = False
    title: ClassVar[str] = "How an export is made"

    formats: tuple[str, ...] = option(
        ("saved_model",),
        words=(*FORMATS, *_GROUPS),
        help="What to write: saved_model; litert_float32, litert_float16, litert_dynamic_range, "
        "litert_int8, or litert for the four; onnx; all.",
    )
    images: int = option(
        2000,
        at_least=0,
        help="Test images, as whole classes, on which the exports are compared with the embedder; "
        "0: all.",
    )
    representative_images: int = option(
        500, at_least=1, help="Training images on which the ranges of litert_int8 are measured."
    )
    max_pixels: int = option(
        SERVING_LIMIT,
        at_least=1,
        help="The SavedModel refuses images with more pixels in their header before it decodes "
        "them.",
    )
    min_cosine: float | None = option(
        None,
        at_least=-1,
        at_most=1,
        help="Smallest cosine to the Keras embedder, in place of each format's own.",
    )
    max_recall_drop: float | None = option(
        None,
        at_least=0,
        at_most=1,
        help="Largest loss of Recall@1, as a fraction, in place of each format's own.",
    )
    calibrate: str = option(
        "auto",
        help="How the threshold on the distance is chosen. For searches of a gallery fpir=0.01: "
        "the share of the queries of unknown classes that is accepted. For pairs of images "
        "far=0.001 or precision=0.99. On the images of the comparison, or on those of a "
        "retriever's gallery. Or a JSON file of `tfdml evaluate` with a target; none; auto: for a "
        "retriever fpir=0.01, else far=0.001, where the images can show it.",
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.formats:
            raise UserError("name some of " + ", ".join((*FORMATS, *_GROUPS)), formats="")
        chosen: set[str] = set()
        for name in self.formats:
            chosen.update(_GROUPS.get(name, (name,)))
        object.__setattr__(self, "formats", tuple(name for name in FORMATS if name in chosen))
        if self.calibrate.startswith(_TARGETS):
            from tfdml.evaluation import target_of

            target_of(self.calibrate, "calibrate")
