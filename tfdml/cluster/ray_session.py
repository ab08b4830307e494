"""A session of Ray, joined or started on this machine and then ended with the work."""

import contextlib
import logging
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfdml.errors import ERROR_TEXT, UserError, quiet_errors, short_message, user_errors
from tfdml.registry import VARIABLE

LOCAL = "local"
# Before Ray is imported: it neither reports its use nor warns of what the next release will do, its
# C++ code prints nothing, and its workers, which do the command's work, are not put behind all
# other processes.
_SETTINGS = {
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def import_ray() -> Any:
    """Return the module `ray`.

    Raises:
        UserError: It is not installed.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    with user_errors(
        ImportError, f"needs Ray: pip install 'tfdml[ray]' ({ERROR_TEXT})", cluster=...
    ):
        import ray
    return ray


@contextlib.contextmanager
def ray_session(
    address: str = LOCAL,
    *,
    cpus: int | None = None,
    object_store_bytes: int | None = None,
    show_workers: bool = False,
) -> Iterator:
    """Ray, ready for work, with nothing on the error stream that is not ours.

    Args:
        address: `"local"`: a Ray of its own on this machine, which ends with the block, and with
            this process however it ends. `"ray://host:10001"` (Ray's client) or `"host:6379"`: a
            cluster that runs, and stays.
        cpus: Of a local one: how many CPUs its workers may take; None: all.
        object_store_bytes: Of a local one: the memory for what workers pass on; None: as Ray
            chooses.
        show_workers: Print what the workers print.

    Yields:
        The module `ray`. Where this process has a session already, that one, which stays.

    Raises:
        UserError: Ray is not installed, or the cluster cannot be reached.

    Example:
        >>> with ray_session("local", cpus=2) as ray:
        ...     ray.get(ray.put("on every machine of the cluster"))
        'on every machine of the cluster'
    """
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    options = _local_options(cpus, object_store_bytes) if address == LOCAL else _joining(address)
    _start(ray, address, {**options, "log_to_driver": show_workers})
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        yield ray
    except Exception as error:
        is_lost = isinstance(error, ConnectionError) or not ray.is_initialized()
        is_client = address.startswith("ray://")
        if not (is_client and is_lost):
            raise
        advice = (
            "start the command again (train with --resume), or on a host of the cluster by "
            "HOST:PORT"
        )
        why = f"{advice}: {short_message(error, longest=100)}"
        raise UserError(
            f"the connection is lost, and with it the work there: {why}", cluster=address
        ) from error
    finally:
        ray.shutdown()


def _local_options(cpus: int | None, object_store_bytes: int | None) -> dict[str, Any]:
    """Return the options of `ray.init` for a Ray of this process's own, whose workers import the
    tfdml that this process has, wherever it lies."""
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    return {
        "num_cpus": cpus,
        "include_dashboard": False,
        "object_store_memory": object_store_bytes,
    }


def _joining(address: str) -> dict[str, Any]:
    """Return the options of `ray.init` for a cluster that runs. Its workers know the user's modules
    by a variable, which those of a local Ray inherit."""
    return {
        "address": address,
        "runtime_env": {"env_vars": {VARIABLE: os.environ.get(VARIABLE, "")}},
    }


def _start(ray: Any, address: str, options: dict[str, Any]) -> None:
    """Start or join Ray, with the signal handler of this process in place afterwards: Ray's own
    would end the process before it has tidied up."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with quiet_errors(), warnings.catch_warnings(action="ignore"):
            ray.init(logging_level=logging.ERROR, **options)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        why = short_message(error, "last" if "Initialization failure" in str(error) else "first")
        if address == LOCAL:
            raise UserError(f"Ray cannot be started here: {why}") from error
        advice = (
            "set RAY_AUTH_MODE and RAY_AUTH_TOKEN as there, and start the command on a host of it "
            "or by ray://"
        )
        raise UserError(f"cannot be joined: {why}; {advice}", cluster=address) from error
    with contextlib.suppress(ValueError):  # outside the main thread there is none to set
        signal.signal(signal.SIGTERM, on_sigterm)


def as_user_error(error: Any) -> UserError | None:
    """Return the `UserError` that a worker raised, from what Ray made of it; None where it was
    something else.

    Example:
        >>> as_user_error(RuntimeError("lost")) is None
        True
    """
    cause = getattr(error, "cause", None)
    return UserError(str(cause)) if isinstance(cause, UserError) else None
