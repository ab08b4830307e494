"""Loggers of other libraries: Weights & Biases and MLflow, through their own Keras callbacks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras

from tfdml.errors import UserError


class Logger:
    """Hands each epoch's numbers to a Keras callback of another library, which is not given to `fit`.

    So it receives the metrics on unseen classes too, and the epoch before training, which `fit` does not know.

    Args:
        target: `wandb:PROJECT` or `mlflow:URI`, as the settings check it.
        run_dir: The run's folder; its name is the run's.
        flags: The run's flags, by name.

    Raises:
        UserError: The library is not installed, or it refuses.
    """

    def __init__(self, target: str, run_dir: Path, flags: Mapping[str, Any]):
        service, _, rest = target.partition(":")
        try:
            self._callback, self._name, self._close = _MAKE[service](rest, run_dir, flags)
        except ImportError as error:
            raise UserError(
                f"--log_to={target}: {error.name or service} is not installed: pip install 'tfdml[{service}]'"
            ) from error
        except (
            Exception
        ) as error:  # a server that is not there, a project that is not theirs: what they raise is theirs
            raise UserError(f"--log_to={target}: {service} refuses: {error}") from error

    def begin(self, learner: keras.Model) -> None:
        """Tell of the model."""
        self._callback.set_model(learner)
        self._callback.on_train_begin()

    def record(self, record: Mapping[str, Any]) -> None:
        """Tell of an epoch, as `metrics.jsonl` has it."""
        numbers = {self._name(name): value for name, value in flat(record).items()}
        self._callback.on_epoch_end(int(record["epoch"]), numbers)

    def end(self) -> None:
        """Close the run there."""
        self._callback.on_train_end()
        self._close()


def flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the finite numbers of nested mappings, under joined names.

    Example:
        >>> flat({"step": 7, "test": {"recall@1": 0.5, "protocol": "zero-shot"}})
        {'step': 7.0, 'test/recall@1': 0.5}
    """
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{prefix}{name}/"))
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            found[f"{prefix}{name}"] = float(value)
    return found


_Made = tuple[keras.callbacks.Callback, Callable[[str], str], Callable[[], None]]


def _wandb(project: str, run_dir: Path, flags: Mapping[str, Any]) -> _Made:
    import wandb
    from wandb.integration.keras import WandbMetricsLogger

    # The same id on --resume: the run there goes on.
    name = run_dir.resolve().name
    wandb.init(project=project, name=name, id=_run_id(run_dir), resume="allow", config=dict(flags), dir=str(run_dir))
    return WandbMetricsLogger(), str, wandb.finish


def _mlflow(uri: str, run_dir: Path, flags: Mapping[str, Any]) -> _Made:
    import mlflow
    from mlflow.keras import MlflowCallback

    mlflow.set_tracking_uri(uri)
    if uri.startswith("sqlite:///") and mlflow.get_experiment_by_name("tfdml") is None:
        # By default files go to the folder in which the command happens to run.
        beside = Path(uri.removeprefix("sqlite:///")).resolve().parent / "mlruns"
        mlflow.create_experiment("tfdml", artifact_location=beside.as_uri())
    mlflow.set_experiment("tfdml")
    identity = _run_id(run_dir)
    known = mlflow.search_runs(filter_string=f"tags.tfdml = '{identity}'", output_format="list")
    if known:
        mlflow.start_run(run_id=known[0].info.run_id)
    else:
        mlflow.start_run(run_name=run_dir.resolve().name, tags={"tfdml": identity})
        mlflow.log_params({name: str(value)[:500] for name, value in flags.items()})

    def close() -> None:
        mlflow.flush_async_logging()
        mlflow.end_run()

    # Its names have no @.
    return MlflowCallback(), lambda name: re.sub(r"[^\w\-./ ]", "_at_", name), close


def _run_id(run_dir: Path) -> str:
    """Return an id of the run's folder, the same whenever it goes on."""
    import hashlib

    return hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]


_MAKE: dict[str, Callable[[str, Path, Mapping[str, Any]], _Made]] = {"wandb": _wandb, "mlflow": _mlflow}
