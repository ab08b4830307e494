"""The run's folder, seed, devices and checkpoints."""

from __future__ import annotations

import dataclasses

from tfdml.errors import UserError
from tfdml.training.settings.fields import LARGEST_INTEGER, Settings, choice, not_negative, positive

_MOST_SEEDS = 1000
#: What a run is watched for.
ALARMS = ("collapse", "explosion", "nan", "dead_proxies")
#: Libraries that may be told of the epochs: extras of the same names.
LOGGERS = ("wandb", "mlflow")


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
    watch_every: int = choice(
        100,
        "Look at a batch every this many steps: gradients by part and term, how far embeddings spread, alarms; 0: "
        "never.",
        check=not_negative,
    )
    watch_triplets: int = choice(
        8, "With --watch_every: how many of the hardest triplets of an epoch are pictured; 0: none.", check=not_negative
    )
    watch_projector: int = choice(
        0,
        "Write so many embeddings of held-out (else test) images for TensorBoard's projector after each epoch, with "
        "thumbnails; 0: none.",
        check=not_negative,
    )
    stop_on: str = choice(
        "nan",
        "Which alarms end the run, with a checkpoint and status 3: collapse, explosion, dead_proxies, with commas. "
        "What is not finite (nan) always ends it.",
    )
    log_to: str = choice("", "Tell another library of each epoch too: wandb:PROJECT or mlflow:URI.")

    def __post_init__(self):
        super().__post_init__()
        if not self.run_dir:
            raise UserError("--run_dir is missing: name the folder that the run shall write, e.g. --run_dir=runs/first")
        self.seed_list()
        self.stops_on()
        if not self.watch_every and self.stops_on() - {"nan"}:
            raise UserError(f"--stop_on={self.stop_on} needs --watch_every, which is 0: nothing would be seen")
        if self.log_to:
            self.logger()

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

    def stops_on(self) -> frozenset[str]:
        """The kinds of alarms of `stop_on`.

        Raises:
            UserError: There is none of that name.

        Example:
            >>> sorted(RunSettings(run_dir="runs/first", stop_on="collapse, nan").stops_on())
            ['collapse', 'nan']
        """
        kinds = frozenset(part.strip() for part in self.stop_on.split(",") if part.strip())
        for unknown in sorted(kinds - set(ALARMS)):
            raise UserError(
                f"--stop_on={self.stop_on}: there is no alarm {unknown!r}; name some of {', '.join(ALARMS)}"
            )
        return kinds

    def logger(self) -> tuple[str, str]:
        """The library of `log_to`, and what of it is meant.

        Raises:
            UserError: It names none.

        Example:
            >>> RunSettings(run_dir="runs/first", log_to="mlflow:sqlite:///runs.db").logger()
            ('mlflow', 'sqlite:///runs.db')
        """
        name, _, rest = self.log_to.partition(":")
        if name not in LOGGERS or not rest:
            raise UserError(
                f"--log_to={self.log_to}: name wandb:PROJECT or mlflow:URI, e.g. wandb:cars or mlflow:sqlite:///runs.db"
            )
        return name, rest
