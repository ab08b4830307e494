"""What every command shares: flags in, one clear line out when the user can mend what is wrong."""

from __future__ import annotations

import dataclasses
import logging as python_logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags, logging

from tfdml.cli import flag_files, signals
from tfdml.cli.flag_names import Formatter, as_flags, own_flags
from tfdml.effects import Effect, in_vain
from tfdml.errors import UserError, short_message
from tfdml.io.files import GO_ON, is_disk_full, unwritable


@dataclasses.dataclass(frozen=True)
class Effects:
    """Which flags of a command have an effect.

    Args:
        table: By flag, the condition for an effect.
        always: The flags that always have one; together with `table`, all flags of the command.
        values: The values that the command works with; by default those of the flags.
    """

    table: Mapping[str, Effect]
    always: frozenset[str]
    values: Callable[[], Mapping[str, Any]] = lambda: {name: flag.value for name, flag in own_flags().items()}


def run(
    command: Callable[[], None],
    name: str,
    usage: str,
    argv: Sequence[str] | None = None,
    flag_of: Mapping[str, str] | None = None,
    sections: Mapping[str, Sequence[str]] | None = None,
    effects: Effects | None = None,
) -> None:
    """Parse the flags, call `command`, and exit.

    The status is 0; 2 for what the user can mend; 128 and the signal's number where the process was told to end (130,
    143, 129 for SIGINT, SIGTERM, SIGHUP), once what it was writing is cleaned up.

    Args:
        command: The command's work; it reads `absl.flags.FLAGS`.
        name: The command's name, put before errors.
        usage: What `--help` prints before the flags.
        argv: The command line; by default the process's own.
        flag_of: The flags whose names are not those of the arguments that they set, by argument: see `as_flags`.
        sections: Flags that `--help` lists together, by the heading; the others follow.
        effects: Which flags have an effect. A flag in vain on the command line is an error. One in a flag file is
            reset to its default with a warning, since the file may be meant for other values of the other flags.
    """
    argv = list(sys.argv if argv is None else argv)
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().setFormatter(Formatter(flag_of))
    for library in ("tensorflow", "faiss", "faiss.loader", "jax"):
        python_logging.getLogger(library).setLevel(python_logging.ERROR)
    try:
        with signals.raised_as_exceptions(name):
            _run(command, name, usage, argv, sections or {}, effects)
    except flags.Error as error:
        _fail(name, f"{short_message(error, longest=1000)} (see --help)")
    except UserError as error:
        _fail(name, as_flags(str(error), flag_of))
    except BrokenPipeError:
        _drop_output()  # its reader (`| head`) has had enough
    except KeyboardInterrupt as error:
        number = signal.Signals(getattr(error, "number", signal.SIGINT))
        print(f"{name}: {'interrupted' if number == signal.SIGINT else f'ended by {number.name}'}", file=sys.stderr)
        sys.exit(128 + number)
    except Exception as error:
        if is_disk_full(error):
            _fail(name, _full_disk(error))
        if not isinstance(error, OSError) or not error.filename:
            raise
        # A path that is too long, a folder that may not be read: no fault of ours, whoever opened it.
        _fail(name, f"{error.filename}: {error.strerror or error}")
    sys.exit(0)


def _run(
    command: Callable[[], None],
    name: str,
    usage: str,
    argv: list[str],
    sections: Mapping[str, Sequence[str]],
    effects: Effects | None,
) -> None:
    if any(argument in ("--help", "-h", "-help") for argument in argv[1:]):
        print(usage.strip() + "\n\n" + _flags_help(sections))
        return
    rest = flags.FLAGS([*argv[:1], *flag_files.read(argv[1:])])
    if len(rest) > 1:
        raise UserError(f"unexpected argument {rest[1]!r}: flags are written --name=value (see --help)")
    if effects:
        check_effects(effects, argv[1:], name)
    command()
    sys.stdout.flush()


def check_effects(effects: Effects, words: Sequence[str], command: str) -> None:
    """Refuse flags of a parsed command line that have no effect; warn of those in flag files, and reset them.

    Args:
        effects: Which flags have an effect.
        words: The command line without the command, before flag files are read.
        command: The command's name, put before warnings.

    Raises:
        UserError: A flag on the command line has none.
    """
    # `--data_dir=` is as good as none.
    given = {name: flag for name, flag in own_flags().items() if flag.present and flag.value not in ("", [])}
    values = effects.values()
    wrong = in_vain(effects.table, values, given)
    typed = {word.lstrip("-").partition("=")[0] for word in words if word.startswith("-")}
    for name, message in wrong.items():
        if typed & {name, f"no{name}"}:
            raise UserError(message)
        # A run's flags.txt holds every setting.
        if effects.table[name].in_files and given[name].value != given[name].default:
            print(f"{command}: warning: in a flag file, and ignored: {message}", file=sys.stderr)
        if effects.table[name].in_files:
            given[name].unparse()


def _full_disk(error: Exception) -> str:
    """What to tell where a library met a full disk, or our output goes to one."""
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()
        return f"the output cannot be written: the disk is full; {GO_ON}"
    path = getattr(error, "filename", None)
    if isinstance(path, str):
        return str(unwritable(path, error))
    return f"the disk is full ({short_message(error)}); {GO_ON}"


def _drop_output() -> None:
    """What could not be printed is not tried again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(name: str, message: str) -> None:
    print(f"{name}: error: {' '.join(message.splitlines())}", file=sys.stderr)
    sys.exit(2)


def _flags_help(sections: Mapping[str, Sequence[str]]) -> str:
    ours = own_flags()
    listed = {name for names in sections.values() for name in names}
    lines = []
    for title, names in sections.items():
        lines += [f"{title}:", *(_flag_help(ours[name]) for name in names), ""]
    text = "Read flags from a file, one a line; flags after it override it. It may name others, relative to itself."
    lines += ["Other flags:" if sections else "Flags:", f"  --flagfile=PATH\n      {text}"]
    lines += [_flag_help(flag) for name, flag in ours.items() if name not in listed]
    return "\n".join(lines)


def _flag_help(flag: flags.Flag) -> str:
    prefix = "--[no]" if flag.boolean else "--"
    default = "" if flag.default in (None, "") else f" Default: {flag.default_as_str}."
    return f"  {prefix}{flag.name}\n      {flag.help.strip()}{default}"
