"""What every command shares: flags in, one clear line out when the user can mend what is wrong."""

from __future__ import annotations

import logging as python_logging
import os
import sys
from collections.abc import Callable, Sequence

from absl import flags, logging

from tfdml.errors import UserError


def run(command: Callable[[], None], name: str, usage: str, argv: Sequence[str] | None = None) -> None:
    """Parse the flags, call `command`, and exit with status 0, or 2 for what the user can mend.

    Args:
        command: The command's work; it reads `absl.flags.FLAGS`.
        name: The command's name, put before errors.
        usage: What `--help` prints before the flags.
        argv: The command line; by default the process's own.
    """
    argv = list(sys.argv if argv is None else argv)
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().setFormatter(None)
    for library in ("tensorflow", "faiss", "faiss.loader", "jax"):
        python_logging.getLogger(library).setLevel(python_logging.ERROR)
    try:
        if any(argument in ("--help", "-h", "-help") for argument in argv[1:]):
            print(usage.strip() + "\n\nFlags:\n" + _flags_help())
            sys.exit(0)
        rest = flags.FLAGS(argv)
        if len(rest) > 1:
            raise UserError(f"unexpected argument {rest[1]!r}: flags are written --name=value (see --help)")
        command()
    except flags.Error as error:
        _fail(name, f"{' '.join(str(error).split())} (see --help)")
    except UserError as error:
        _fail(name, str(error))
    except BrokenPipeError:
        # The reader of our output (`| head`) has had enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)


def _fail(name: str, message: str) -> None:
    print(f"{name}: error: {message}", file=sys.stderr)
    sys.exit(2)


def _flags_help() -> str:
    lines = ["  --flagfile=PATH\n      Read flags from a file, one a line; flags after it override it."]
    for module, members in flags.FLAGS.flags_by_module_dict().items():
        if not module.startswith("tfdml"):
            continue
        for flag in members:
            prefix = "--[no]" if flag.boolean else "--"
            default = "" if flag.default in (None, "") else f" Default: {flag.default_as_str}."
            lines.append(f"  {prefix}{flag.name}\n      {flag.help.strip()}{default}")
    return "\n".join(lines)
