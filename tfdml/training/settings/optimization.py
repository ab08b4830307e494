"""Objectives, optimiser and schedule."""

from __future__ import annotations

import dataclasses

from tfdml.errors import UserError
from tfdml.training.expressions import parse_sum
from tfdml.training.optimizers import FORMS, OPTIMIZERS
from tfdml.training.settings.fields import Settings, choice, fraction, integers, not_negative, positive


def _rate(value) -> bool:
    return value == -1 or value >= 0


@dataclasses.dataclass(frozen=True)
class OptimizationSettings(Settings):
    """What is minimised, how, and for how long.

    Raises:
        UserError: A value is out of range, or text cannot be read.

    Example:
        >>> OptimizationSettings(learning_rate=1e-3, backbone_rate=1e-5).learning_rates()
        {'backbone': 1e-05, 'projection': 0.001, 'objectives': 0.001}
    """

    objectives: str = choice("am_softmax", "Terms of the loss: e.g. 'am_softmax(margin=0.05) + 0.4 * jrs'.")
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
    drop_epochs: str = choice("", "Epochs after which every rate drops, e.g. '8' or '20,40'.")
    drop_factor: float = choice(0.1, "What each drop multiplies the rates by.", check=positive)
    weight_decay: float = choice(
        0.0, "Weight decay: coupled (added to the gradient), decoupled for adamw.", check=not_negative
    )
    epsilon: float = choice(
        1e-7, "Adam's and RMSprop's epsilon. PyTorch's and Caffe's own default is 1e-8.", check=positive
    )
    momentum: float = choice(0.9, "SGD's momentum.", check=fraction)
    clip_norm: float = choice(0.0, "Largest norm of the whole gradient; 0: no clipping.", check=not_negative)
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
        parse_sum(self.objectives, "--objectives")
        if self.xbm_start and not self.cross_batch_memory:
            raise UserError(f"--xbm_start={self.xbm_start} needs --cross_batch_memory, e.g. --cross_batch_memory=4096")

    def drop_steps(self, steps_per_epoch: int) -> list[int]:
        """The steps at which the rates drop."""
        epochs = integers(self.drop_epochs, "--drop_epochs")
        if list(epochs) != sorted(set(epochs)):
            raise UserError(f"--drop_epochs={self.drop_epochs}: the epochs must ascend")
        return [epoch * steps_per_epoch for epoch in epochs]

    def learning_rates(self) -> dict[str, float]:
        """The rate of each part at the first step."""
        rates = {"backbone": self.backbone_rate, "projection": self.projection_rate, "objectives": self.objective_rate}
        return {part: self.learning_rate if rate < 0 else rate for part, rate in rates.items()}
