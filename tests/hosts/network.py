"""Hosts that are network namespaces of this machine: each has an address, a cable to a switch, and no other network."""

import contextlib
import functools
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@functools.cache
def reason_against():
    """Why hosts cannot be made here; empty where they can."""
    if not shutil.which("ip"):
        return "there is no command `ip` (iproute2)"
    try:
        with Network(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.strip()}"


class Network:
    """One to nine hosts and a switch between them. On leaving, their processes are killed and all of it is removed.

    Args:
        count: How many hosts; host i has the address 10.77.0.(i + 1).
    """

    def __init__(self, count):
        self.count = count
        self._name = f"tfdml{os.getpid()}-{time.monotonic_ns() % 10**6}"
        self._started = []

    def __enter__(self):
        self._remove_what_is_left()
        with contextlib.ExitStack() as undo:
            undo.callback(self.__exit__)
            switch = self._namespace("switch")
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", switch, "link", "set", "switch", "up")
            for host in range(self.count):
                name = self._namespace(host)
                _ip("netns", "add", name)
                cable = ("link", "add", f"cable{host}", "netns", switch, "type", "veth")
                _ip(*cable, "peer", "name", "cable", "netns", name)
                _ip("-n", switch, "link", "set", f"cable{host}", "master", "switch", "up")
                _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "cable")
                for device in ("cable", "lo"):
                    _ip("-n", name, "link", "set", device, "up")
                _ip("-n", name, "route", "add", "default", "dev", "cable")  # Ray asks which address it leads to
            undo.pop_all()
        return self

    def __exit__(self, *_):
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for host in ("switch", *range(self.count)):
            self.kill(host)
            subprocess.run(["ip", "netns", "delete", self._namespace(host)], check=False, capture_output=True)

    @staticmethod
    def _remove_what_is_left():
        """Remove the namespaces of processes that were killed before they could."""
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        for name, pid in re.findall(r"^(tfdml(\d+)-\S+)", listed, re.MULTILINE):
            if not pathlib.Path(f"/proc/{pid}").exists():
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def _namespace(self, host):
        return f"{self._name}-{host}"

    def address(self, host):
        """The address of a host."""
        return f"10.77.0.{host + 1}"

    def start(self, host, words, out, **environment):
        """Start a command on a host, in a process group of its own.

        Args:
            host: Its number.
            words: The command.
            out: File that both its streams are appended to.
            environment: Variables next to those of this process.
        """
        with open(out, "ab") as stream:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._namespace(host), *map(str, words)],
                cwd=ROOT,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def processes(self, host):
        """The process ids on a host."""
        found = subprocess.run(["ip", "netns", "pids", self._namespace(host)], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def kill(self, host):
        """Kill all processes of a host, as when its power fails."""
        for pid in self.processes(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def cut(self, host):
        """Cut the cable of a host, as a pulled plug does: both ends notice nothing but silence."""
        _ip("-n", self._namespace("switch"), "link", "set", f"cable{host}", "nomaster")

    def mend(self, host):
        """Mend the cable of a host."""
        _ip("-n", self._namespace("switch"), "link", "set", f"cable{host}", "master", "switch")
