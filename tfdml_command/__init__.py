"""The command `tfdml`. It is a package of its own so that help, `configs` and `doctor` do not load TensorFlow."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence

# Commands that need images or models: modules of `tfdml.cli`.
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
    "completion": "print the completion script of bash or zsh",
}


def main(words: Sequence[str] | None = None) -> None:
    """Run a subcommand, and exit with its status.

    Args:
        words: The subcommand and its flags; by default those of the process.
    """
    name, *rest = (sys.argv[1:] if words is None else words) or ["--help"]
    try:
        _run(name, rest)
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()  # its reader (`| head`) has had enough


def _run(name: str, rest: list[str]) -> None:
    if name in ("--help", "-h", "help"):
        print(_help())
    elif name == "--version":
        print(importlib.metadata.version("tfdml"))
    elif name in OTHERS:
        if name == "completion":
            _load_tensorflow(name)
        if status := importlib.import_module(f"tfdml_command.{name}").main(rest):
            sys.exit(status)
    elif name in STAGES:
        if unknown := unknown_flag(rest):
            sys.exit(
                _fail(name, f"there is no flag --{unknown}; {nearest(unknown, flag_names(), f'tfdml {name} --help')}")
            )
        _load_tensorflow(name)
        from tfdml.cli.command_line import run

        run(importlib.import_module(f"tfdml.cli.{name}").COMMAND, rest)
    else:
        sys.exit(_fail("tfdml", f"there is no command {name!r}; {nearest(name, [*STAGES, *OTHERS], 'tfdml --help')}"))


def flag_names() -> set[str]:
    """Return the names that flags of the commands may have, read from the source: to import it takes seconds."""
    spec = importlib.util.find_spec("tfdml")
    folders = spec.submodule_search_locations if spec else None
    sources = [
        path.read_text(encoding="utf-8") for folder in folders or () for path in pathlib.Path(folder).rglob("*.py")
    ]
    pattern = re.compile(r"""\.(?:define|DEFINE_alias)\(\s*"(\w+)"|^    (\w+): .+ = """, re.MULTILINE)
    names = {name for text in sources for pair in pattern.findall(text) for name in pair if name}
    return names | {"help", "h", "flagfile"}


def unknown_flag(words: Iterable[str]) -> str:
    """Return the first flag of a command line that no command has; empty where there is none."""
    names = flag_names()
    flags = (word.lstrip("-").partition("=")[0] for word in words if word.startswith("--"))
    return next((flag for flag in flags if not names & {flag, flag.removeprefix("no")}), "")


def nearest(name: str, names: Iterable[str], where: str) -> str:
    """Return the end of a message about an unknown name: the nearest of the known ones, or where they are listed."""
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]}?" if near else f"see {where}"


def drop_output() -> None:
    """Drop what could not be printed, which is not tried again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _help() -> str:
    lines = ["usage: tfdml COMMAND [--flag=value ...]", ""]
    lines += [f"  {name:<12}{text}" for name, text in {**STAGES, **OTHERS}.items()]
    return "\n".join([*lines, "", "tfdml COMMAND --help shows examples and the flags of a command."])


def _fail(name: str, message: str) -> int:
    print(f"{name}: error: {message}", file=sys.stderr)
    return 2


def _load_tensorflow(name: str) -> None:
    """Load TensorFlow for a command; where it cannot be loaded, exit with one line."""
    # Until the command handles it, Ctrl-C ends the process.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.environ.get("KERAS_BACKEND") == "jax" and not importlib.util.find_spec("jax"):
        sys.exit(_fail(name, "KERAS_BACKEND=jax needs JAX: pip install 'tfdml[jax]'"))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        with quiet_errors():
            import tensorflow as tf

            tf.config.list_physical_devices()
    except ImportError as error:
        sys.exit(_fail(name, f"TensorFlow cannot be loaded ({' '.join(str(error).split())}); run tfdml doctor"))


@contextlib.contextmanager
def quiet_errors() -> Iterator[None]:
    """Hold back what libraries write to the error stream as they load; it is shown if the block fails."""
    sys.stderr.flush()
    error_stream = os.dup(2)
    with tempfile.TemporaryFile() as output:
        os.dup2(output.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            os.dup2(error_stream, 2)
            os.close(error_stream)
            if failed:
                output.seek(0)
                sys.stderr.write(output.read().decode(errors="replace"))
