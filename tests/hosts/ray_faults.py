"""Faults of a Ray cluster on hosts that are network namespaces: what the command prints, when, and how it ends.

    python -m tests.hosts.ray_faults [--only=NAME] [--json=FILE]     a table of all faults; some 20 minutes on two cores

A head without CPUs, two nodes of one CPU, and a host outside of the cluster. Commands of tfdml join it by address, on
the head, or by `ray://`, from outside. In the middle of each something is broken. What does not end well by itself is
started again as the documentation says, and the result must be that of a command of one process.
"""

import dataclasses
import pathlib
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time

import numpy as np
import pyarrow.parquet as pq

from tests.hosts.faults import FLAGS, Trial
from tests.hosts.network import ROOT, Network
from tools.numbers import Results, command_line

HEAD, NODE, DRIVER = 0, 2, 3
# The token is of this cluster alone, which ends with the trial. A lost node is noticed in seconds.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}


class RayCluster:
    """A head on host 0 and two nodes on the hosts 1 and 2; host 3 has no part of Ray. All of it ends on leaving.

    Args:
        folder: Where logs are written.
    """

    def __init__(self, folder):
        self.folder = folder
        self.network = Network(4)
        self._nodes = {}

    def __enter__(self):
        self._temporary = tempfile.mkdtemp(prefix="ray")  # short: paths of sockets have 107 characters at most
        self.network.__enter__()
        try:
            self._join(HEAD)
            self.repair()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.network.__exit__()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _log(self, host):
        return self.folder / f"ray{host}.log"

    def _join(self, *hosts):
        """Start Ray on hosts, and wait until all have joined."""
        for host in hosts:
            words = [pathlib.Path(sys.executable).with_name("ray"), "start", "--block", "--include-log-monitor=false"]
            words += [f"--node-ip-address={self.network.address(host)}", "--object-store-memory=100000000"]
            words += [f"--temp-dir={self._temporary}/{host}", f"--num-cpus={0 if host == HEAD else 1}"]
            more = ["--head", "--port=6379", "--ray-client-server-port=10001", "--include-dashboard=false"]
            words += more if host == HEAD else [f"--address={self.network.address(HEAD)}:6379"]
            self._log(host).unlink(missing_ok=True)
            self._nodes[host] = self.network.start(host, words, self._log(host), **_ENVIRONMENT)
        end = time.monotonic() + 120
        for host in hosts:
            while "Ray runtime started" not in self._log(host).read_text():
                assert self._nodes[host].poll() is None and time.monotonic() < end, (  # noqa: PT018
                    self._log(host).read_text()
                )
                time.sleep(0.1)

    def lose(self, host):
        """Kill all processes of a node."""
        self.network.kill(host)
        self._nodes[host].wait()

    def repair(self):
        """Mend all cables, and start the nodes that are lost."""
        for host in (1, NODE, DRIVER):
            self.network.mend(host)
        self._join(*[host for host in (1, NODE) if host not in self._nodes or self._nodes[host].poll() is not None])

    def start(self, words, log, client):
        """Start a command of tfdml: outside of the cluster by `ray://`, or on the head by its address."""
        cluster = f"ray://{self.network.address(HEAD)}:10001" if client else f"{self.network.address(HEAD)}:6379"
        words = [sys.executable, "-m", "tfdml", *words, f"--cluster={cluster}"]
        return self.network.start(DRIVER if client else HEAD, words, log, **_ENVIRONMENT)

    def runs(self, title):
        """Whether a process of this title runs on the node that will be lost."""
        texts = [pathlib.Path(f"/proc/{pid}/cmdline") for pid in self.network.processes(NODE)]
        return any(title in text.read_text() for text in texts if text.exists())


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is done to a command.

    Args:
        work: `train` or `embed`.
        client: Whether it joins the cluster by `ray://`.
        done: `kill node`, `cut node`, `kill driver`, `cut driver`, or nothing.
        back: Whether the node comes back before the command has ended.
        status: Of the command: -9 if killed, 2 if it ends with a message, 0 if it finishes by itself.
        line: What its log holds.
        seconds: Within how many seconds after the fault it must have ended.
    """

    work: str
    client: bool
    done: str = ""
    back: bool = False
    status: int = 0
    line: str = ""
    seconds: int = 240

    @property
    def title(self):
        """In the table."""
        done = {
            "": "none",
            "kill node": "a node is killed",
            "cut node": "a node's cable is cut",
            "kill driver": "the command is killed",
            "cut driver": "the command's cable is cut",
        }[self.done]
        return f"`tfdml {self.work}` by {'`ray://`' if self.client else 'address'}: {done}" + (
            ", and comes back" * self.back
        )


_LOST = "10.77.0.3"
FAULTS = {
    "train": Fault("train", False),
    "train_client": Fault("train", True),
    "train_node_back": Fault("train", False, "kill node", back=True),
    "train_node_lost": Fault("train", False, "kill node", status=2, line=_LOST),
    "train_node_cut": Fault("train", False, "cut node", status=2, line=_LOST),
    "train_driver_killed": Fault("train", False, "kill driver", status=-9),
    "train_client_killed": Fault("train", True, "kill driver", status=-9),
    "train_client_cut": Fault("train", True, "cut driver", status=2, line="ray://10.77.0.1:10001"),
    "embed_node_lost": Fault("embed", True, "kill node", line=_LOST),
    "embed_node_cut": Fault("embed", False, "cut node", line=_LOST),
    "embed_client_killed": Fault("embed", True, "kill driver", status=-9),
    "embed_client_cut": Fault("embed", True, "cut driver", status=2, line="ray://10.77.0.1:10001"),
}


class RayTrial(Trial):
    """Commands on a cluster, each compared with the same one of one process.

    Args:
        folder: Where all of it is written.
        cluster: The `RayCluster`.
    """

    def __init__(self, folder, cluster):
        super().__init__(folder)
        self.cluster = cluster
        self.reference = None

    def words(self, work, name):
        """The command, without the cluster."""
        out = self.folder / name
        train = ["train", *FLAGS, f"--data_dir={self.folder / 'images'}", "--evaluate_every=0", f"--run_dir={out}/run"]
        train += ["--max_failures=1"]
        embed = ["embed", f"--model={self.folder}/reference/run/embedder.keras", "--rows_per_file=4"]
        return {
            "train": [*train, "--workers=2"],
            "embed": [*embed, f"--input={self.folder}/images/*/*.png", f"--out={out}/run", "--actors=2"],
        }[work]

    def is_middle(self, work, name):
        """Whether a command has come half of its way."""
        run = self.folder / name / "run"
        return {
            "train": lambda: any(run.parent.glob("run.ray/run/*/checkpoints/step-00000003.npz")),
            "embed": lambda: len(list(run.glob("part-*"))) > 3,
        }[work]()

    def table(self, name):
        """The rows that `tfdml embed` has written."""
        return pq.read_table(sorted((self.folder / name / "run").glob("part-*")))

    def difference(self, work, name):
        """Of the weights or the embeddings from those of one process."""
        if work == "train":
            return self._difference(self.weights(name))
        if self.reference is None:
            (self.folder / "alone").mkdir()
            words = [word for word in self.words(work, "alone") if not word.startswith("--actors")]
            words = [sys.executable, "-m", "tfdml", *words, "--cluster=local"]
            log = self.folder / "alone.log"
            process = self.cluster.network.start(HEAD, words, log, **_ENVIRONMENT)
            assert process.wait(300) == 0, log.read_text()
            self.reference = self.table("alone")
        # As many threads as a process has CPUs may add in another order.
        tables = self.table(name), self.reference
        vectors = [np.stack(table["embedding"].to_numpy()) for table in tables]
        rows, expected = (table.drop_columns("embedding") for table in tables)
        return float(np.abs(vectors[0] - vectors[1]).max()) if rows == expected else 1.0

    def run(self, name):
        """Make a fault happen, and start the command again if it has not finished; a dictionary of what was seen."""
        fault, folder, network = FAULTS[name], self.folder / name, self.cluster.network
        folder.mkdir()
        log, words = folder / "log", self.words(fault.work, name)
        process = self.cluster.start(words, log, fault.client)
        host = NODE if fault.done.endswith("node") else DRIVER
        if fault.done:
            end = time.monotonic() + 240
            while not self.is_middle(fault.work, name):
                assert process.poll() is None and time.monotonic() < end, log.read_text()  # noqa: PT018
                time.sleep(0.02)
            if fault.done.startswith("cut"):
                network.cut(host)
            elif host == NODE:
                self.cluster.lose(host)
            else:
                process.send_signal(signal.SIGKILL)
        begun = time.monotonic()
        if fault.back:
            self.cluster.repair()
        (status,), _ = self._wait([process], fault.seconds)
        seen = {"status": status, "seconds": time.monotonic() - begun, "log": log.read_text()}
        if fault.done == "cut node":
            self.cluster.lose(NODE)  # Ray ends a node that comes back after it was given up
        self.cluster.repair()
        if status != 0:
            resume = ["--resume"] * (fault.work == "train")
            (seen["resumed"],), _ = self._wait([self.cluster.start([*words, *resume], log, fault.client)], 240)
        seen["difference"] = self.difference(fault.work, name)
        return seen


def main():
    """Print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--only", default="", help="names of faults")
    arguments = parser.parse_args()
    columns = ("fault", "seconds until it ends", "what it prints", "started again", "largest difference")
    row = Results(arguments.json).table("faults", *columns)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        with RayCluster(folder) as cluster:
            trial = RayTrial(folder, cluster)
            for name in arguments.only.split(",") if arguments.only else FAULTS:
                fault, seen = FAULTS[name], trial.run(name)
                print(name, seen["log"], file=sys.stderr, flush=True)
                lines = [
                    line for line in seen["log"].splitlines() if "error: " in line or " has lost a process" in line
                ]
                printed = (
                    re.split(r"[:;] (?:The|Client|Ray Client) ", lines[-1])[0].replace(str(folder), "") if lines else ""
                )
                again = "" if "resumed" not in seen else "yes" if seen["resumed"] == 0 else f"failed: {seen['resumed']}"
                difference = f"{seen['difference']:.0e}" if seen["difference"] else "0"
                row(fault.title, f"{seen['seconds']:.0f}" if fault.done else "", printed, again, difference)


if __name__ == "__main__":
    main()
