"""`tfdml doctor`: what is installed, what is missing, and whether a training step works."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

USAGE = """Check this installation: versions, extras, disk, devices and a short training.

  tfdml doctor

The last line is the verdict. The exit status is 0 where training works, and 1 where it does not."""
# Extras for maintainers of the library.
_NOT_FOR_USERS = {"dev", "docs", "parity"}
_GB = 2**30
# Prints what TensorFlow sees, and trains on noise for about five seconds.
_TRIAL = """
import json, time
import keras, numpy as np, tensorflow as tf
import tfdml
devices = [(device.device_type, tf.config.experimental.get_device_details(device).get("device_name", ""))
           for device in tf.config.list_physical_devices()]
print("DEVICES" + json.dumps([keras.backend.backend(), devices]))
images = np.random.default_rng(0).integers(0, 256, (32, 32, 32, 3), dtype=np.uint8)
learner = tfdml.models.MetricLearner(
    tfdml.models.Embedder("conv4", embedding_dim=32, image_size=32), tfdml.losses.ContrastiveLoss())
learner.compile("adam")
steps = -1  # the first one compiles
while steps < 1 or time.perf_counter() - begin < 5:
    loss = float(learner.train_on_batch(images, np.arange(32) // 4, return_dict=True)["loss"])
    begin = time.perf_counter() if steps < 0 else begin
    steps += 1
print("STEPS" + json.dumps([steps, loss]))
"""


def main(words: Sequence[str]) -> int:
    """Print the findings and the verdict; the exit status."""
    if words:
        print(USAGE)
        return 0 if words[0] in ("--help", "-h") else 2
    print(f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} CPUs")
    required, extras = _requirements()
    faults = []
    print("\nRequired:")
    for name, (version, allowed, good) in required.items():
        print(f"  {name:<22}{version or 'missing':<12}{'' if good else f'needs {allowed}'}".rstrip())
    if bad := [f"{name}{allowed}" for name, (_, allowed, good) in required.items() if not good]:
        faults.append(f"required packages are missing or have another version: pip install {' '.join(map(repr, bad))}")
    print("\nExtras:")
    for extra, missing in extras.items():
        names = ", ".join(missing[:2]) + (f" and {len(missing) - 2} more" if missing[2:] else "")
        state = f"missing {names}: pip install 'tfdml[{extra}]'" if missing else "installed"
        print(f"  {extra:<22}{state}")
    faults += _disk()
    faults += _trial()
    print()
    for fault in faults:
        print(f"problem: {fault}")
    print("tfdml does not work here yet." if faults else "tfdml works here.")
    return 1 if faults else 0


def _requirements() -> tuple[dict[str, tuple[str, str, bool]], dict[str, list[str]]]:
    """Version, allowed versions and whether it is one of them, by required package; missing packages by extra."""
    from packaging.requirements import Requirement

    required = {"tfdml": (_version("tfdml"), "", True)}
    provided = importlib.metadata.metadata("tfdml").get_all("Provides-Extra") or []
    extras: dict[str, list[str]] = {name: [] for name in provided if name not in _NOT_FOR_USERS}
    for requirement in map(Requirement, importlib.metadata.requires("tfdml") or []):
        missing = _missing(requirement)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            required[requirement.name] = _version(requirement.name), str(requirement.specifier), not missing
        else:
            for extra in extras:
                extras[extra] += missing if requirement.marker.evaluate({"extra": extra}) else []
    return required, extras


def _missing(requirement: Requirement) -> list[str]:
    """Return the packages that a requirement lacks: its own, or those of its extras, such as `tensorflow[and-cuda]`."""
    from packaging.requirements import Requirement

    version = _version(requirement.name)
    if not version or not requirement.specifier.contains(version, prereleases=True):
        return [requirement.name]
    environments = [{"extra": extra} for extra in requirement.extras]
    parts = [Requirement(text) for text in importlib.metadata.requires(requirement.name) or []]
    of_extras = [(part.name, part.marker) for part in parts if part.marker and not part.marker.evaluate({"extra": ""})]
    return [name for name, marker in of_extras if any(map(marker.evaluate, environments)) and not _version(name)]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _disk() -> list[str]:
    print("\nDisk:")
    faults = []
    for what, path in (("this folder", os.getcwd()), ("home, for weights", os.path.expanduser("~"))):
        free, writable = shutil.disk_usage(path).free, os.access(path, os.W_OK)
        print(f"  {what:<22}{free / _GB:,.1f} GB free{'' if writable else ', not writable'}")
        if free < _GB:
            faults.append(f"less than 1 GB is free in {path}")
        if not writable:
            faults.append(f"{path} cannot be written")
    return faults


def _trial() -> list[str]:
    """Train in a process of its own, which may crash where TensorFlow does not fit the processor or the driver."""
    print("\nTraining:")
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL], capture_output=True, text=True, timeout=300, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return ["a few training steps took more than five minutes"]
    reports = {line[:5]: json.loads(line[line.index("[") :]) for line in done.stdout.splitlines() if "[" in line}
    kinds = []
    if "DEVIC" in reports:
        backend, devices = reports["DEVIC"]
        kinds = [kind for kind, _ in devices]
        print(f"  backend               {backend}")
        for kind, name in devices:
            print(f"  {kind:<22}{name}".rstrip())
    if shutil.which("nvidia-smi") and "GPU" not in kinds:
        print("  note: there is an NVIDIA driver, but TensorFlow sees no GPU: pip install 'tfdml[gpu]'")
    if done.returncode or "STEPS" not in reports:
        reason = (done.stderr.strip().splitlines() or [f"the process ended with status {done.returncode}"])[-1]
        return [f"a training step fails: {reason}"]
    steps, loss = reports["STEPS"]
    print(f"  steps                 {steps:,} of 32 images in five seconds, loss {loss:.4f}")
    return [] if loss == loss else ["the loss of a training step is not a number"]
