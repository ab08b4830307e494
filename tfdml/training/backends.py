"""What of a training run goes with which backend of Keras, told before anything begins."""

from __future__ import annotations

import os

import keras

from tfdml.errors import UserError
from tfdml.training.jax_devices import processes
from tfdml.training.settings import RunSettings
from tfdml.training.workers import from_environment

BACKENDS = ("tensorflow", "jax")


def check_backend(run: RunSettings) -> None:
    """Refuse a backend that does not train, and settings that mean nothing on the one that is set.

    Args:
        run: The devices.

    Raises:
        UserError: `KERAS_BACKEND` names another backend; or a flag or variable belongs to the other one.

    Example:
        >>> check_backend(RunSettings(run_dir="runs/first"))
    """
    backend = keras.backend.backend()
    if backend not in BACKENDS:
        raise UserError(f"KERAS_BACKEND={backend}: training runs on {' or '.join(BACKENDS)}")
    if backend == "tensorflow":
        if os.environ.get("KERAS_DISTRIBUTION_NUM_PROCESSES"):
            raise UserError(
                "KERAS_DISTRIBUTION_NUM_PROCESSES names processes of JAX, and this is TensorFlow: set "
                "KERAS_BACKEND=jax, or unset it"
            )
        return
    if os.environ.get("TF_CONFIG"):
        raise UserError(
            "TF_CONFIG names workers of TensorFlow, and KERAS_BACKEND is jax: name processes by "
            "KERAS_DISTRIBUTION_JOB_ADDRESSES, _NUM_PROCESSES and _PROCESS_ID, or unset it"
        )
    if processes().count > 1 and run.stops_on() - {"nan"}:
        raise UserError(
            f"--stop_on={run.stop_on}: several processes of JAX, of which one looks, do not end together; leave it "
            "out, and read the alarms of watch.json"
        )
    if not run.deterministic:
        raise UserError("--nodeterministic is for TensorFlow; on JAX a step gives the same bits as it is: leave it out")


def require_one_process(flag: str) -> None:
    """Refuse what trains several runs one after another where several processes train together.

    Args:
        flag: What asks for it.

    Raises:
        UserError: This process is one of several.

    Example:
        >>> require_one_process("seeds")
    """
    if len(from_environment()[1]) > 1 or processes().count > 1:
        raise UserError(f"--{flag} trains run after run in one process: leave it out where several train together")


def check_same_backend(recorded: str | None) -> None:
    """Refuse to continue a run on another backend than the one that began it.

    Args:
        recorded: What the run's folder says; None if it says nothing.

    Raises:
        UserError: It is another.

    Example:
        >>> check_same_backend("tensorflow")
    """
    backend = keras.backend.backend()
    if recorded not in (None, backend):
        raise UserError(
            f"--resume: the run was started on {recorded} and this is {backend}, which rounds otherwise: set "
            f"KERAS_BACKEND={recorded}, or start a new run, from these weights with --start_from"
        )
