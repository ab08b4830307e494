"""The command `tfdml`, and its subcommands that need no TensorFlow; the others are imported when they are called."""

from __future__ import annotations

import importlib
import inspect
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfdml import flag_files
from tfdml.errors import quiet_errors, short_message
from tfdml.version import __version__, installed

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
    "audit": "find near-duplicates, wrong labels and outliers of a data set",
    "demo": "try a model on a local web page",
    "export": "write a run as SavedModel, LiteRT, ONNX or a retriever",
    "serve": "serve an exported model over HTTP",
}
OTHERS = {
    "configs": "list the flag files that come with tfdml",
    "doctor": "check this installation",
}


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
        commands = "\n".join(f"  {command:<12}{text}" for command, text in {**STAGES, **OTHERS}.items())
        print(f"usage: tfdml COMMAND [--flag=value ...]\n\n{commands}\n")
        print("tfdml COMMAND --help shows examples and the flags of a command.")
    elif name == "--version":
        print(__version__)
    elif name in OTHERS:
        return configs(rest) if name == "configs" else doctor(rest)
    elif name not in STAGES:
        return _fail("tfdml", f"there is no command {name!r}; see tfdml --help")
    elif error := _load_tensorflow():
        return _fail(name, error)
    else:
        from tfdml.cli.command_line import run

        run(load(name), rest)
    return 0


def _fail(name: str, message: str) -> int:
    print(f"{name}: error: {message}", file=sys.stderr)
    return 2


def _load_tensorflow() -> str:
    """Load TensorFlow and Keras without their messages; return what prevents it, or nothing."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        with quiet_errors():
            import tensorflow as tf

            tf.config.list_physical_devices()
            importlib.import_module("keras")
    except ImportError as error:
        return f"TensorFlow or Keras cannot be loaded ({short_message(error)}); run tfdml doctor"
    return ""


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
    files = [name for name in flag_files.names() if not words or any(word in name for word in words)]
    texts = {name: (flag_files.folder().parent / name).read_text(encoding="utf-8") for name in files}
    width = max(map(len, files), default=0)
    for name, text in texts.items():
        print(f"{name:<{width}}  {text.partition(chr(10))[0].lstrip('# ')}")
    if len(files) == 1:
        print(f"\n{texts[files[0]]}", end="")
    if not files:
        print(f"configs: error: no flag file has {' or '.join(words)} in its name", file=sys.stderr)
    return 0 if files else 2


def doctor(words: Sequence[str]) -> int:
    """Check this installation: versions, devices and a short training.

    tfdml doctor

    The last line is the verdict. The exit status is 0 where training works, and 1 where it does not.
    """
    if words:
        print(inspect.getdoc(doctor))
        return 0 if words[0] in ("--help", "-h") else 2
    packages = installed(("tfdml", "tensorflow", "keras", "numpy"))
    print(f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} CPUs")
    print(", ".join(f"{name} {version}" for name, version in packages.items()))
    try:
        loss = _trial()
    except Exception as error:
        loss = float("nan")
        print(f"problem: a training step fails: {short_message(error, named=True)}")
    works = loss == loss
    print("tfdml works here." if works else "tfdml does not work here yet.")
    return 0 if works else 1


def _trial() -> float:
    """Train three steps on noise; return the loss."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdml

    images = np.random.default_rng(0).integers(0, 256, (32, 32, 32, 3), dtype=np.uint8)
    embedder = tfdml.models.Embedder("conv4", embedding_dim=32, image_size=32)
    learner = tfdml.models.MetricLearner(embedder, tfdml.losses.ContrastiveLoss())
    learner.compile("adam")
    for _ in range(3):
        loss = float(learner.train_on_batch(images, np.arange(32) // 4, return_dict=True)["loss"])
    devices = [device.device_type for device in tf.config.list_physical_devices()]
    print(f"trained with {keras.backend.backend()} on {', '.join(devices)}: loss {loss:.4f}")
    if shutil.which("nvidia-smi") and "GPU" not in devices:
        print("note: there is an NVIDIA driver, but TensorFlow sees no GPU: pip install 'tfdml[gpu]'")
    return loss
