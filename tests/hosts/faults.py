"""Faults of hosts and cables in the middle of a training run: what each host prints, when, and how the run ends.

Each fault starts a run on several hosts, waits for a moment of it, and breaks something there. Then the run resumes,
and must end with the weights of a run of one process that nothing disturbed.
"""

import dataclasses
import json
import signal
import sys
import time

import numpy as np
from PIL import Image

from tests.hosts.network import Network

PORT = 2222
FLAGS = (
    *("--dataset=folder", "--image_size=16", "--resize=16", "--noflip", "--backbone=conv4(width=4)"),
    *("--batch_norm=statistics", "--embedding_dim=8", "--objectives=contrastive", "--classes_per_batch=3"),
    *("--images_per_class=4", "--epochs=2", "--steps_per_epoch=3", "--checkpoint_steps=1", "--optimizer=sgd"),
    *("--learning_rate=0.01", "--noreport", "--cache=false"),
)
STEPS = 6


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is done to a run.

    Args:
        host: Where.
        moment: When: of `tests.hosts.trainer`.
        done: `kill`, `cut`, or nothing, where the host itself is wrong.
        hosts: How many train.
        seconds: Within how many seconds every host must have ended.
        lines: What the last line of each host holds; None of one that is killed.
        resumed: How many hosts resume; 0 where the run never began.
    """

    host: int
    moment: str
    done: str
    hosts: int = 2
    seconds: int = 90
    lines: tuple = ()
    resumed: int = 2


_LOST = "another worker ended or cannot be reached"
FAULTS = {
    "kill_chief": Fault(0, "step:4", "kill", lines=(None, _LOST)),
    "cut_in_checkpoint": Fault(0, "checkpoint:4", "cut", lines=(_LOST, _LOST)),
    "other_version": Fault(1, "version:0.0.1", "", lines=(_LOST, "0.0.1"), resumed=0),
}


def write_images(folder):
    """Write 24 classes of 6 images of 16 x 16 pixels."""
    for number in range(144):
        noise = np.random.default_rng(number).integers(0, 60, (16, 16, 3))
        path = folder / f"{number // 6:02d}" / f"{number % 6}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((noise + 8 * (number // 6)).astype(np.uint8)).save(path)


class Trial:
    """A folder with images, and the runs on them.

    Args:
        folder: Where all of it is written.
    """

    def __init__(self, folder):
        self.folder = folder
        write_images(folder / "images")
        with Network(1) as network:
            assert self._wait(self._start(network, "reference", 1), 300)[0] == [0], self.lines("reference", 1)
        self.expected = self.weights("reference")

    def weights(self, name):
        """The arrays of the last checkpoint."""
        with np.load(self.folder / name / "run" / "checkpoints" / f"step-{STEPS:08d}.npz") as file:
            return {key: file[key] for key in file.files if not key.startswith(("state", "metrics/"))}

    def _start(self, network, name, count, fault=None, resume=False):
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        addresses = [f"{network.address(host)}:{PORT}" for host in range(count)]
        started = []
        for host in range(count):
            here = fault is not None and host == fault.host
            flags = [*FLAGS, f"--data_dir={self.folder / 'images'}", *["--resume"] * resume]
            # The run folder of the chief is seen by no other host.
            flags += [f"--run_dir={folder / ('run' if host == 0 else f'none{host}')}"]
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": host}}
            words = [sys.executable, "-m", "tests.hosts.trainer", fault.moment if here else "none", folder, *flags]
            environment = {"TF_CONFIG": json.dumps(task)} if count > 1 else {}
            started.append(network.start(host, words, self._log(name, host), **environment))
        return started

    def _log(self, name, host):
        return self.folder / name / f"host{host}.log"

    def lines(self, name, count):
        """The last line that each host printed."""
        texts = [self._log(name, host).read_text(errors="replace").strip() for host in range(count)]
        return [text.splitlines()[-1] if text else "" for text in texts]

    def _difference(self, found):
        """The largest difference of an array's entry to that of the undisturbed run, of the array's largest entry."""
        assert set(found) == set(self.expected)
        scales = {key: max(1e-4, np.abs(value).max(initial=0)) for key, value in self.expected.items()}
        return max(
            float(np.abs(found[key] - self.expected[key]).max(initial=0) / scale) for key, scale in scales.items()
        )

    @staticmethod
    def _wait(processes, seconds):
        """The status of each, None of one that has not ended in time; and the seconds until the last ended."""
        started = time.monotonic()
        while any(one.poll() is None for one in processes) and time.monotonic() < started + seconds:
            time.sleep(0.1)
        return [one.poll() for one in processes], time.monotonic() - started

    def run(self, name):
        """Make a fault happen, and resume; a dictionary of what was seen."""
        fault, folder = FAULTS[name], self.folder / name
        with Network(max(fault.hosts, fault.resumed)) as network:
            processes = self._start(network, name, fault.hosts, fault)
            limit = 240
            if fault.done:
                while not (folder / "there").exists():
                    assert all(one.poll() is None for one in processes), self.lines(name, fault.hosts)
                    time.sleep(0.05)
                if fault.done == "kill":
                    processes[fault.host].send_signal(signal.SIGKILL)
                else:
                    network.cut(fault.host)
                    (folder / "continue").touch()
                limit = fault.seconds
            statuses, seconds = self._wait(processes, limit)
            seen = {"statuses": statuses, "seconds": seconds, "lines": self.lines(name, fault.hosts)}
            if fault.resumed and None not in statuses:
                network.mend(fault.host)
                again = self._start(network, name, fault.resumed, resume=True)
                seen["resumed"] = self._wait(again, 300)[0]
            if set(seen.get("resumed", statuses)) == {0}:
                seen["difference"] = self._difference(self.weights(name))
        return seen
