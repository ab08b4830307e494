"""The run's folder, seed, devices and checkpoints."""

from __future__ import annotations

import dataclasses

from tfdml.errors import UserError
from tfdml.training.settings.fields import LARGEST_INTEGER, Settings, choice, not_negative, positive

_MOST_SEEDS = 1000


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
    seeds: str = choice(
        "",
        "Train a run for each of several seeds, in seed_N of --run_dir, and report their mean with intervals: how "
        "many, from --seed on (3), or which (0,1,2).",
    )
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
        self.seed_list()

    def seed_list(self) -> tuple[int, ...]:
        """The seeds of `seeds`; empty where `seed` is the only one.

        Raises:
            UserError: They are no two or more different numbers.

        Example:
            >>> RunSettings(run_dir="runs/first", seeds="3").seed_list()
            (0, 1, 2)
        """
        if not self.seeds.strip():
            return ()
        try:
            found = [int(part) for part in self.seeds.split(",")]
        except ValueError:
            found = []
        if len(found) == 1:
            found = list(range(self.seed, self.seed + min(found[0], _MOST_SEEDS + 1)))
        if not 2 <= len(set(found)) == len(found) <= _MOST_SEEDS or min(found) < 0 or max(found) > LARGEST_INTEGER:
            raise UserError(
                f"--seeds={self.seeds}: say how many, 2 to {_MOST_SEEDS}, or which, as different numbers with commas, "
                "e.g. --seeds=3 or --seeds=0,1,2"
            )
        return tuple(found)
