"""Thresholds that flags name: `read_calibration` reads the file of one, and `MaxDistance` is what
--max_distance means."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tfdml.errors import ERROR_TEXT, UserError, user_errors
from tfdml.io.files import read_json
from tfdml.names import warn

if TYPE_CHECKING:
    from tfdml.evaluation import Calibration
    from tfdml.retrieval import Gallery


def read_calibration(path: str, queries: str = "images") -> Calibration:
    """Read the threshold of a JSON file.

    Args:
        path: The file.
        queries: What is compared with images: `images` or `texts`.

    Raises:
        UserError: It cannot be read, has no threshold, or that of other queries.
    """
    from tfdml.evaluation.calibration import calibration_in

    return calibration_in(read_json(path), path, queries)


@dataclasses.dataclass(frozen=True)
class MaxDistance:
    """Within which distance a neighbor counts, see `read`.

    Args:
        text: What --max_distance is.
        limit: A number, infinite for none, or a threshold; None: that of the gallery itself.
    """

    text: str
    limit: float | Calibration | None

    @classmethod
    def read(cls, text: str, queries: str = "images") -> MaxDistance:
        """Read a number, empty for none; the path of a JSON file; or `calibrated`.

        Args:
            text: The text.
            queries: As `read_calibration`.

        Raises:
            UserError: It is none of these, as `read_calibration`, or of other queries.
        """
        from tfdml.arguments import number

        if text == "calibrated":
            if queries != "images":
                raise UserError(
                    f"the gallery's threshold is of images as queries, not of {queries}",
                    max_distance=text,
                )
            return cls(text, None)
        if text.endswith(".json"):
            return cls(text, read_calibration(text, queries))
        advice = "write a number, calibrated, or a JSON file"
        with user_errors(ValueError, advice, max_distance=text):
            return cls(text, number("max_distance", float(text)) if text else float("inf"))

    def of_gallery(self, gallery: Gallery) -> MaxDistance:
        """Return the distance of searches of a gallery, whose own threshold may be meant.

        Args:
            gallery: The gallery.

        Raises:
            UserError: It is empty, or as `for_searches`.
        """
        about = gallery.about
        if about is None or not len(gallery):
            raise UserError("is empty: write it with tfdml index", gallery=gallery.address)
        limit = gallery.calibration if self.limit is None else self.limit
        within = dataclasses.replace(self, limit=limit)
        return within.for_searches(about.distance, len(gallery), about.per_class)

    def for_searches(self, distance: str, size: int, per_class: str = "nearest") -> MaxDistance:
        """Return and print the distance, if it holds for searches of a gallery.

        Args:
            distance: The distance of the search.
            size: The number of its images or classes.
            per_class: What stands for a class.

        Raises:
            UserError: As `Calibration.for_searches`, the gallery's threshold is meant and there is
                none, or no distance is so small.
        """
        limit = self.limit
        if limit is None:
            raise UserError(
                "the gallery has no threshold: export a retriever with --calibrate=fpir=0.01, or "
                "give a number or a JSON file",
                max_distance=self.text,
            )
        if not isinstance(limit, float):
            with user_errors(UserError, ERROR_TEXT, max_distance=self.text):
                print(limit.for_searches(distance, size, per_class))
        # Products alone may be below 0.
        if self.value < 0 and distance != "dot":
            raise UserError(f"no {distance} distance is below 0", max_distance=self.text)
        bound = "" if self.value == float("inf") else f", at most {self.value:.9g}"
        print(f"{distance} distances{bound}")
        return self

    @property
    def value(self) -> float:
        """The distance, after `for_searches`."""
        assert self.limit is not None  # as `for_searches` sees to
        return self.limit if isinstance(self.limit, float) else self.limit.threshold

    def check_models(self, model: str, gallery_model: str) -> None:
        """Raise a `UserError` where the threshold is not of these models.

        A number states no model: a warning says so where two models are compared, whose distances
        are others than those of either.

        Args:
            model: The fingerprint of the model that embedded the queries.
            gallery_model: That of the gallery.
        """
        limit = self.limit
        if limit is not None and not isinstance(limit, float):
            with user_errors(UserError, ERROR_TEXT, max_distance=self.text):
                limit.check_models(model, gallery_model)
        elif self.text and model and gallery_model and model != gallery_model:
            warn(
                f"max_distance={self.text}: a number states no model, and two models are compared "
                "here: give the JSON file of tfdml evaluate --gallery=OLD --target"
            )
