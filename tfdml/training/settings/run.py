"""The run's folder, seed, devices and checkpoints."""

from __future__ import annotations

import dataclasses

from tfdml.errors import UserError
from tfdml.training.settings.fields import Settings, choice, not_negative, positive


@dataclasses.dataclass(frozen=True)
class RunSettings(Settings):
    """Where a run is written, and what makes it repeatable and resumable.

    Raises:
        UserError: A value is out of range, or the folder is not named.

    Example:
        >>> RunSettings(run_dir="runs/first", seed=3).seed
        3
    """

    run_dir: str = choice("", "Folder of the run; must not exist yet, unless --resume.")
    seed: int = choice(0, "Seed of weights, batches and augmentation.", check=not_negative)
    deterministic: bool = choice(
        True,
        "On a CPU, run one operation at a time (each on all cores), so that the same run gives the same bits. Without "
        "it training is up to a fifth faster, and runs may differ in the last digits.",
    )
    logical_devices: int = choice(
        0, "Split the CPU into this many logical devices and train on all; 0: the GPUs there are.", check=not_negative
    )
    checkpoint_steps: int = choice(0, "Checkpoint every this many steps, besides each epoch.", check=not_negative)
    keep_checkpoints: int = choice(2, "How many checkpoints stay.", check=positive)

    def __post_init__(self):
        super().__post_init__()
        if not self.run_dir:
            raise UserError("--run_dir is missing: name the folder that the run shall write, e.g. --run_dir=runs/first")
