"""Measurements, selection and the report."""

from __future__ import annotations

import dataclasses

from tfdml.errors import UserError
from tfdml.training.settings.fields import Settings, choice, integers, not_negative, positive


@dataclasses.dataclass(frozen=True)
class EvaluationSettings(Settings):
    """What is measured, when, and what counts and is written in the end.

    Raises:
        UserError: A value is out of range, or two do not go together.

    Example:
        >>> EvaluationSettings(ks="1,10", selection="test").recall_ks()
        (1, 10)
    """

    ks: str = choice("1,2,4,8", "The K of Recall@K.")
    evaluate_every: int = choice(
        1, "Evaluate the unseen classes every this many epochs; 0: at the end only.", check=not_negative
    )
    evaluate_train: float = choice(
        0.0,
        "Measure training classes too, with every evaluation: whole classes, drawn by the seed until they have this "
        "many images or, at most 1, this share of the training images; 0: none.",
        check=not_negative,
    )
    generalisation_every: int = choice(
        0,
        "Measure lambda, the H-divergence and the density of classes, between the images of --evaluate_train and the "
        "test images, before training, every this many epochs and at the end; 0: not.",
        check=not_negative,
    )
    evaluation_batch_size: int = choice(100, "Images per batch in evaluation.", check=positive)
    selection: str = choice(
        "last",
        "Which epoch's embedder is kept: the last; the best on the held-out training classes (validation); the best "
        "on the test classes (test: the papers' way, which flatters the figure).",
        choices=("last", "validation", "test"),
    )
    selection_metric: str = choice(
        "map@r",
        "The metric that selects the epoch. MAP@R depends on all images of a class, and differs between epochs "
        "where Recall@1 is saturated.",
        choices=("map@r", "recall@1"),
    )
    refit: bool = choice(
        False,
        "With --selection=validation: then train anew, from the same start, on all training classes (the held-out ones "
        "too) for as many epochs as were best; that embedder and its figures are the run's.",
    )
    moment_embedder: bool = choice(
        False, "With horde: also write and measure moments.keras, which searches with all orders, reduced by a PCA."
    )
    evaluate_orders: str = choice(
        "end",
        "With one horde: measure the embedding of each order of moments by itself, and all side by side, on the unseen "
        "classes: at the end; with every evaluation (epochs); or never.",
        choices=("end", "epochs", "never"),
    )
    report: bool = choice(True, "Write report/index.html at the end.")

    def __post_init__(self):
        super().__post_init__()
        if self.refit and self.selection != "validation":
            raise UserError(
                "--refit trains anew for the epochs that were best on held-out classes: add --selection=validation "
                "--holdout_classes=0.1"
            )
        if self.moment_embedder and self.selection != "last" and not self.refit:
            raise UserError("--moment_embedder needs the moments of the last epoch: use --selection=last, or --refit")
        if self.generalisation_every and not self.evaluate_train:
            raise UserError(
                "--generalisation_every compares seen with unseen classes: say how many images of training classes are "
                "measured, e.g. --evaluate_train=1 for all"
            )
        if self.selection_metric != "map@r" and self.selection == "last":
            raise UserError(
                f"--selection_metric={self.selection_metric}: --selection=last keeps the last epoch, whatever it "
                "measures; add --selection=validation --holdout_classes=0.1"
            )
        if 1 not in self.recall_ks() and self.selection != "last" and self.selection_metric == "recall@1":
            raise UserError(f"--selection={self.selection} goes by recall@1: add 1 to --ks={self.ks}")

    def recall_ks(self) -> tuple[int, ...]:
        """The K of Recall@K."""
        return integers(self.ks, "--ks", required=True)
