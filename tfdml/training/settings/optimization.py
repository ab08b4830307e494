"""Objectives, optimiser and schedule."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdml.errors import UserError
from tfdml.training.expressions import parse_terms
from tfdml.training.optimizers import CLIPPED, FORMS, OPTIMIZERS, check_form
from tfdml.training.schedules import SCHEDULES, rate_schedule
from tfdml.training.settings.fields import Settings, choice, fraction, integers, not_negative, positive


def _rate(value) -> bool:
    return value == -1 or value >= 0


def _epsilon(value) -> bool:
    return value == -1 or value > 0


@dataclasses.dataclass(frozen=True)
class OptimizationSettings(Settings):
    """What is minimised, how, and for how long.

    Raises:
        UserError: A value is out of range, or text cannot be read.

    Example:
        >>> OptimizationSettings(learning_rate=1e-3, backbone_rate=1e-5).learning_rates()
        {'backbone': 1e-05, 'projection': 0.001, 'objectives': 0.001}
    """

    objectives: str = choice(
        "am_softmax",
        "Terms of the loss: e.g. 'am_softmax(margin=0.05) + 0.4 * jrs'. A factor may be auto, e.g. 'contrastive + "
        "auto(share=0.03) * ecaml': the first 100 steps measure it, so that the gradient is this share of that of the "
        "terms with numbers.",
    )
    epochs: int = choice(12, "Number of epochs.", check=not_negative)
    steps_per_epoch: int = choice(0, "Steps per epoch; 0 for one pass over the training images.", check=not_negative)
    optimizer: str = choice("adam", "Optimiser.", choices=OPTIMIZERS)
    optimizer_form: str = choice(
        "keras",
        "Whose formulas the optimiser follows: those of Keras, TensorFlow and Caffe, or PyTorch's. They differ in "
        "where epsilon is added (adam, adamw, rmsprop) and, when the rate drops, in momentum (sgd).",
        choices=FORMS,
    )
    learning_rate: float = choice(1e-4, "Base learning rate.", check=positive)
    backbone_rate: float = choice(
        -1.0, "Learning rate of the backbone; -1: the base rate, 0: it does not train.", check=_rate
    )
    projection_rate: float = choice(-1.0, "Learning rate of the projection; -1: the base rate.", check=_rate)
    objective_rate: float = choice(
        -1.0, "Learning rate of the objectives' own weights; -1: the base rate.", check=_rate
    )
    schedule: str = choice(
        "step",
        "How the rates fall: in steps, by --drop_epochs, or along half a cosine or a line to --final_rate at the end.",
        choices=SCHEDULES,
    )
    warm_up_epochs: float = choice(0.0, "Epochs, or a part of one, in which the rates rise evenly.", check=not_negative)
    final_rate: float = choice(
        0.0, "Which share of the rates is left at the end, with --schedule=cosine or linear.", check=fraction
    )
    drop_epochs: str = choice("", "Epochs after which every rate drops, e.g. '8' or '20,40'.")
    drop_factor: float = choice(0.1, "What each drop multiplies the rates by.", check=positive)
    layer_decay: float = choice(
        1.0,
        "What the backbone's rate is multiplied by from each of 12 groups of its layers to the one below; 1: one rate.",
        check=lambda value: 0 < value <= 1,
    )
    unfreeze_epochs: str = choice(
        "",
        "Epochs after which the backbone trains: '2' for all of it, '1,2,4' for its upper, middle and lower third in "
        "turn. By default all of it trains from the start.",
    )
    weight_decay: float = choice(
        0.0,
        "Weight decay: coupled (added to the gradient), decoupled for adamw, lion and muon.",
        check=not_negative,
    )
    epsilon: float = choice(
        -1.0,
        "Adam's, RMSprop's and Muon's epsilon; -1: 1e-7 in keras form and 1e-8 in pytorch form, their defaults (Caffe: "
        "1e-8).",
        check=_epsilon,
    )
    momentum: float = choice(0.9, "SGD's momentum.", check=fraction)
    clip_norm: float = choice(0.0, "Largest norm of the gradient; 0: no clipping.", check=not_negative)
    clip: str = choice(
        "all",
        "What --clip_norm bounds: the whole gradient, or that of backbone, projection and objectives each by itself.",
        choices=CLIPPED,
    )
    ema: float = choice(
        0.0,
        "Which share of its old value the running average of each weight keeps in a step, e.g. 0.999: the averages are "
        "evaluated and kept. 0: none.",
        check=fraction,
    )
    cross_batch_memory: int = choice(
        0,
        "Give every loss over pairs in --objectives a memory of this many embeddings of earlier batches to compare "
        "with (XBM); 0: none.",
        check=not_negative,
    )
    xbm_start: int = choice(
        0, "For this many steps nothing is remembered, while embeddings change fast.", check=not_negative
    )
    gradient_cache: int = choice(
        0,
        "Keep the activations of this many images of the batch (of each device) at a time: batches beyond the memory, "
        "for one more pass forward; 0: of all at once.",
        check=not_negative,
    )

    def __post_init__(self):
        super().__post_init__()
        self.drop_steps(1)
        self.unfreeze_steps(1)
        if self.schedule != "step" and self.drop_epochs:
            raise UserError(f"--drop_epochs={self.drop_epochs} goes with --schedule=step, not with {self.schedule}")
        if self.schedule == "step" and self.final_rate:
            raise UserError(f"--final_rate={self.final_rate:g} goes with --schedule=cosine or linear")
        if self.warm_up_epochs and self.warm_up_epochs >= self.epochs:
            raise UserError(f"--warm_up_epochs={self.warm_up_epochs:g} leaves none of --epochs={self.epochs}")
        check_form(self.optimizer, self.optimizer_form, "--optimizer_form")
        parse_terms(self.objectives, "--objectives")
        if self.xbm_start and not self.cross_batch_memory:
            raise UserError(f"--xbm_start={self.xbm_start} needs --cross_batch_memory, e.g. --cross_batch_memory=4096")

    def drop_steps(self, steps_per_epoch: int) -> list[int]:
        """The steps at which the rates drop."""
        return self._steps("drop_epochs", steps_per_epoch)

    def unfreeze_steps(self, steps_per_epoch: int) -> list[int]:
        """The steps from which parts of the backbone train, from above; none where all does from the start."""
        return self._steps("unfreeze_epochs", steps_per_epoch)

    def _steps(self, flag: str, steps_per_epoch: int) -> list[int]:
        text = getattr(self, flag)
        epochs = integers(text, f"--{flag}")
        if list(epochs) != sorted(set(epochs)):
            raise UserError(f"--{flag}={text}: the epochs must ascend")
        return [epoch * steps_per_epoch for epoch in epochs]

    def rate_schedule(self, steps_per_epoch: int) -> Any:
        """The base rate along the run: a number, or a Keras schedule."""
        return rate_schedule(
            self.schedule,
            self.learning_rate,
            self.epochs * steps_per_epoch,
            round(self.warm_up_epochs * steps_per_epoch),
            self.drop_steps(steps_per_epoch),
            self.drop_factor,
            self.final_rate,
        )

    def learning_rates(self) -> dict[str, float]:
        """The rate of each part at the first step."""
        rates = {"backbone": self.backbone_rate, "projection": self.projection_rate, "objectives": self.objective_rate}
        return {part: self.learning_rate if rate < 0 else rate for part, rate in rates.items()}
