"""The command `tfdml`, and its subcommands that need no TensorFlow; the others are imported when
they are called."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tfdml import flags
from tfdml.version import __version__, installed, package_folder

if TYPE_CHECKING:
    from tfdml.cli.command_line import Command

# Commands that need images or models; see `load`.
STAGES = {
    "prepare": "download, check and pack a data set",
    "train": "train an embedder and measure it on classes it has not seen",
    "evaluate": "measure a model, stored embeddings or a gallery; compare runs",
    "embed": "write the embeddings of a data set",
    "index": "write embeddings into a vector database",
    "search": "find the nearest images of a gallery",
    "cluster": "group images without labels",
    "audit": "find near-duplicates, wrong labels and outliers of a data set",
    "demo": "try a model on a local web page",
    "export": "write a run as SavedModel, LiteRT, ONNX or a retriever",
    "serve": "serve an exported model over HTTP",
}
OTHERS = {
    "configs": "list the flag files that come with tfdml",
    "docs": "read the documentation in a browser, without a network",
    "doctor": "check this installation",
}
# Prints what TensorFlow sees, and trains on noise.
_TRIAL = """
import json, sys
sys.path.append(sys.argv[1])
import keras, numpy as np, tensorflow as tf
import tfdml
devices = [device.device_type for device in tf.config.list_physical_devices()]
images = np.random.default_rng(0).integers(0, 256, (32, 32, 32, 3), dtype=np.uint8)
learner = tfdml.models.MetricLearner(
    tfdml.models.Embedder("conv4", embedding_dim=32, image_size=32), tfdml.losses.ContrastiveLoss())
learner.compile("adam")
for _ in range(3):
    loss = float(learner.train_on_batch(images, np.arange(32) // 4, return_dict=True)["loss"])
print("TRIAL", json.dumps([keras.backend.backend(), devices, loss]))
"""


def load(name: str) -> Command:
    """Return a command of `STAGES`."""
    return importlib.import_module(f"tfdml.cli.{name}").COMMAND


def main(words: Sequence[str] | None = None) -> None:
    """Run a subcommand, and exit with its status.

    Args:
        words: The subcommand and its flags; by default those of the process.
    """
    name, *rest = (sys.argv[1:] if words is None else words) or ["--help"]
    try:
        status = _run(name, rest)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (`| head`) has had enough: what is left is dropped
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)


def _run(name: str, rest: list[str]) -> int:
    if name in ("--help", "-h", "help"):
        commands = "\n".join(
            f"  {command:<12}{text}" for command, text in {**STAGES, **OTHERS}.items()
        )
        print(f"usage: tfdml COMMAND [--flag=value ...]\n\n{commands}\n")
        print("tfdml COMMAND --help shows examples and the flags of a command.")
    elif name == "--version":
        print(__version__)
    elif name in OTHERS:
        return {"configs": configs, "docs": docs, "doctor": doctor}[name](rest)
    elif name not in STAGES:
        return _fail(
            "tfdml",
            f"there is no command {name!r}; {_nearest(name, [*STAGES, *OTHERS], 'tfdml --help')}",
        )
    else:
        # Until the command handles it, Ctrl-C ends the process.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from tfdml.cli.command_line import run

        run(load(name), rest)
    return 0


def _nearest(name: str, names: Iterable[str], where: str) -> str:
    """Return the end of a message about an unknown name: the nearest of the known ones, or where
    they are listed."""
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]}?" if near else f"see {where}"


def _fail(name: str, message: str) -> int:
    print(f"{name}: error: {message}", file=sys.stderr)
    return 2


def configs(words: Sequence[str]) -> int:
    """List the flag files that come with tfdml.

    tfdml configs                       all
    tfdml configs sop small             those with one of the words in their name
    tfdml configs sop_jrd               with a single one, print it too

    A command takes them by name from any folder: tfdml train --flagfile=configs/sop_jrd.flags ...
    """
    if {"--help", "-h"} & set(words):
        print(inspect.getdoc(configs))
        return 0
    any_word = "|".join(map(re.escape, words))
    files = [name for name in flags.names() if re.search(any_word, name)]
    texts = {name: (flags.folder().parent / name).read_text(encoding="utf-8") for name in files}
    width = max(map(len, files), default=0)
    for name, text in texts.items():
        print(f"{name:<{width}}  {text.partition(chr(10))[0].lstrip('# ')}")
    if len(files) == 1:
        print(f"\n{texts[files[0]]}", end="")
    if not files:
        print(f"configs: error: no flag file has {' or '.join(words)} in its name", file=sys.stderr)
    return 0 if files else 2


def docs(words: Sequence[str]) -> int:
    """Read the documentation of this version in a browser, without a network.

    tfdml docs           serve the pages to this machine, and open them; Ctrl-C ends it
    tfdml docs --path    print the folder of the pages
    """
    if list(words) not in ([], ["--path"]):
        print(inspect.getdoc(docs))
        return 0 if words[0] in ("--help", "-h") else 2
    pages = package_folder("site")
    if not (pages / "index.html").is_file():
        return _fail(
            "docs",
            "this installation has no pages: make docs writes those of a checkout, and make wheel "
            "a wheel with them",
        )
    if words:
        print(pages)
    else:
        _serve(pages)
    return 0


def _serve(pages: pathlib.Path) -> None:
    """Serve a folder to this machine until Ctrl-C."""
    import functools
    import http.server
    import webbrowser

    class Quiet(http.server.SimpleHTTPRequestHandler):
        """Without a line for each request."""

        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=str(pages))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        address = f"http://127.0.0.1:{server.server_port}/"
        print(f"{pages}\n{address}   Ctrl-C ends it", flush=True)
        webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def doctor(words: Sequence[str]) -> int:
    """Check this installation: versions, devices and a short training.

    tfdml doctor

    The last line is the verdict. The exit status is 0 where training works, and 1 where it does
    not.
    """
    import platform

    if words:
        print(inspect.getdoc(doctor))
        return 0 if words[0] in ("--help", "-h") else 2
    print(f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} CPUs")
    print(
        ", ".join(
            f"{name} {version}"
            for name, version in installed(("tfdml", "tensorflow", "keras", "numpy")).items()
        )
    )
    faults = _trial()
    print("", *(f"problem: {fault}" for fault in faults), sep="\n")
    print("tfdml does not work here yet." if faults else "tfdml works here.")
    return 1 if faults else 0


def _trial() -> list[str]:
    """Train in a process of its own, which may crash where TensorFlow does not fit the processor or
    the driver."""
    import json
    import shutil
    import subprocess

    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    # Without the current folder on the path, but with this package.
    package = str(pathlib.Path(__file__).parents[2])
    command = [sys.executable, "-P", "-c", _TRIAL, package]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("TRIAL ")]
    if done.returncode or not lines:
        reason = (
            done.stderr.strip().splitlines() or [f"the process ended with status {done.returncode}"]
        )[-1]
        return [f"a training step fails: {reason}"]
    backend, devices, loss = json.loads(lines[0].removeprefix("TRIAL "))
    print(f"  trained with {backend} on {', '.join(devices)}: loss {loss:.4f}")
    if shutil.which("nvidia-smi") and "GPU" not in devices:
        print(
            "note: there is an NVIDIA driver, but TensorFlow sees no GPU: pip install 'tfdml[gpu]'"
        )
    return [] if loss == loss else ["the loss of a training step is not a number"]
