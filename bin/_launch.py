"""Starts a command of tfdml from a checkout, with the environment that `make install` made if there is one."""

import contextlib
import os
import signal
import sys
import tempfile
from importlib.util import find_spec

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@contextlib.contextmanager
def _quiet_start():
    """Hold back what TensorFlow's libraries write to the error stream as they load; shown if loading fails."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            if failed:
                held.seek(0)
                sys.stderr.write(held.read().decode(errors="replace"))


def launch(name):
    python = os.path.join(ROOT, ".venv", "bin", "python")
    if os.path.exists(python) and os.path.dirname(python) != os.path.join(sys.prefix, "bin"):
        os.execv(python, [python, *sys.argv])
    # Until the command itself listens, Ctrl-C just ends the process.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.environ.get("KERAS_BACKEND") == "jax" and not find_spec("jax"):
        print(f"{name}: error: KERAS_BACKEND=jax needs JAX: pip install 'tfdml[jax]'", file=sys.stderr)
        sys.exit(2)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.path.insert(0, ROOT)
    with _quiet_start():
        import tensorflow as tf

        tf.config.list_physical_devices()
    from importlib import import_module

    import_module(f"tfdml.cli.{name}").main()
