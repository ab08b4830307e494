"""A session of Ray, joined or started on this machine and then ended with the work; what its processes report."""

import contextlib
import logging
import os
import signal
import threading
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from absl import logging as absl_logging

from tfdml.errors import REASON, UserError, quiet_errors, short_message, user_errors

LOCAL = "local"
_POLL_SECONDS = 0.5
# After so long without a result it is looked for a host that could have one.
_PATIENCE_SECONDS = 60
# Before Ray is imported: it neither reports its use nor warns of what the next release will do, its C++ code prints
# nothing, and its workers, which do the command's work, are not put behind all other processes.
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
    with user_errors(ImportError, f"`cluster` needs Ray: pip install 'tfdml[ray]' ({REASON})"):
        import ray
    return ray


@contextlib.contextmanager
def ray_session(address: str = LOCAL, *, cpus: int | None = None, object_store_bytes: int | None = None) -> Iterator:
    """Ray, ready for work, with nothing on the error stream that is not ours.

    Args:
        address: `"local"`: a Ray of its own on this machine, which ends with the block, and with this process however
            it ends. `"ray://host:10001"` (Ray's client) or `"host:6379"`: a cluster that runs, and stays.
        cpus: Of a local one: how many CPUs its workers may take; None: all.
        object_store_bytes: Of a local one: the memory for what workers pass on; None: as Ray chooses.

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
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == LOCAL:
        # Its workers import the tfdml that this process has, wherever it lies.
        paths = [str(Path(__file__).resolve().parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
        options |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": object_store_bytes}
    else:
        options["address"] = address
    # Ray's own handler would end the process before it has tidied up.
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with quiet_errors(), warnings.catch_warnings(action="ignore"):
            ray.init(**options)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        why = short_message(error, "last" if "Initialization failure" in str(error) else "first")
        if address == LOCAL:
            raise UserError(f"Ray cannot be started here: {why}") from error
        advice = "set RAY_AUTH_MODE and RAY_AUTH_TOKEN as there, and start the command on a host of it or by ray://"
        raise UserError(f"`cluster={address}` cannot be joined: {why}; {advice}") from error
    with contextlib.suppress(ValueError):  # outside the main thread there is none to set
        signal.signal(signal.SIGTERM, on_sigterm)
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        yield ray
    except Exception as error:
        if not address.startswith("ray://") or (ray.is_initialized() and not isinstance(error, ConnectionError)):
            raise
        advice = "start the command again (train with --resume), or on a host of the cluster by HOST:PORT"
        why = f"{advice}: {short_message(error, longest=100)}"
        raise UserError(f"`cluster={address}`: the connection is lost, and with it the work there: {why}") from error
    finally:
        ray.shutdown()


def as_user_error(error: BaseException) -> UserError | None:
    """Return the `UserError` that a worker raised, from what Ray made of it; None where it was something else.

    Example:
        >>> as_user_error(RuntimeError("lost")) is None
        True
    """
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        if isinstance(found, UserError):
            # Ray makes an exception of two classes, whose text is that of its traceback.
            inner = getattr(found, "cause", None)
            return UserError(str(inner if isinstance(inner, UserError) else found))
        seen.append(found)
        found = getattr(found, "cause", None) or found.__cause__
    return None


def lost_hosts(ray: Any) -> str:
    """Return a sentence with the addresses of the hosts that the cluster has lost; empty where there are none."""
    nodes = ray.nodes()
    alive = {node["NodeManagerAddress"] for node in nodes if node["Alive"]}
    lost = sorted({node["NodeManagerAddress"] for node in nodes} - alive)
    return f"the cluster has lost {', '.join(lost)}" if lost else ""


def first_ready(ray: Any, references: Collection[Any], cpus: int = 1) -> Any:
    """Wait for one of several results.

    Args:
        ray: The module.
        references: The results that are to come.
        cpus: What each of them takes of a host.

    Returns:
        The reference of a result that is there.

    Raises:
        UserError: None came within a minute, and no host of the cluster has so many CPUs.
    """
    while not (ready := ray.wait(list(references), num_returns=1, timeout=_PATIENCE_SECONDS)[0]):
        if not any(node["Alive"] and node["Resources"].get("CPU", 0) >= cpus for node in ray.nodes()):
            advice = "start `ray start` there again, and the same command, which resumes"
            why = lost_hosts(ray) or "none has joined"
            raise UserError(f"no host of the cluster has {cpus} CPUs: {why}; {advice}")
    return ready[0]


class Outbox:
    """What the workers report to the process that started the run; an actor."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._told: dict[str, Any] = {}

    def write(self, line: str) -> None:
        """Add a line of the log."""
        self._lines.append(line)

    def lines(self) -> list[str]:
        """Return the lines since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def tell(self, name: str, value: Any) -> None:
        """Leave the `"result"`, or an `"error"` that another start would meet again."""
        self._told.setdefault(name, value)

    def read(self, name: str) -> Any:
        """Return what was reported; None where nothing was."""
        return self._told.get(name)


@contextlib.contextmanager
def outbox_shown(ray: Any) -> Iterator[Any]:
    """Log what the workers write, as long as the block lasts; yields the actor that they write to.

    It runs on the host that this process has joined the cluster by, which outlives the loss of every other.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    outbox = ray.remote(Outbox).options(num_cpus=0, scheduling_strategy=here).remote()
    ended = threading.Event()

    def show() -> None:
        last = False
        while not last:
            last = ended.wait(_POLL_SECONDS)
            with contextlib.suppress(ConnectionError):  # which the block meets too
                for line in ray.get(outbox.lines.remote()) if ray.is_initialized() else ():
                    absl_logging.info("%s", line)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield outbox
    finally:
        ended.set()
        thread.join()


class ToOutbox(logging.Handler):
    """Sends what a process logs.

    Args:
        outbox: The actor.
    """

    def __init__(self, outbox: Any):
        super().__init__()
        self.outbox = outbox

    def emit(self, record: logging.LogRecord) -> None:
        """Send a line."""
        self.outbox.write.remote(record.getMessage())

    @classmethod
    def install(cls, outbox: Any) -> None:
        """Send what this process logs from now on."""
        absl_logging.set_verbosity(absl_logging.INFO)
        logging.getLogger("absl").addHandler(cls(outbox))
