"""Command lines: their flags, flag files, help, and messages that name flags.

And running a command: signals, errors as one line, the exit status, and progress on the error stream.
"""

import contextlib
import dataclasses
import glob
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from absl import flags
from absl import logging as absl_logging

from tfdml.effects import Effect, in_vain
from tfdml.errors import UserError, redact_text, short_message, user_errors
from tfdml.io.files import GO_ON, as_named, exists, is_disk_full, local_copy, unwritable
from tfdml.training.callbacks import SIGNALS, Stopped
from tfdml.training.settings import meanings
from tfdml_command import drop_output, nearest
from tfdml_command.configs import rows, shipped

# By argument, in every command.
_FLAG_OF = {"options": "dataset_options"}
_SWITCHES = {"True": "", "False": "no"}
KINDS: dict[Any, str] = {bool: "bool", int: "integer", float: "float", str: "string", list: "list"}
KINDS |= {float | None: "float", Sequence[str]: "list"}
# In every command: read from a local copy, where they are URLs of a store. Other paths are opened where they are.
_COPIED = ("model", "compare", "embedder", "embeddings", "gallery", "stack_on")
_ARGUMENT = re.compile(r"`([a-z]\w*)(?:=([^`]*))?`")


class Flags(flags.FlagValues):
    """The flags of one command. A flag's value is an attribute, and the flag itself an item.

    Example:
        >>> values = Flags()
        >>> values.define("k", 10, "How many neighbors.", lower_bound=1)
        >>> values.parse(["--k=3"])
        >>> values.k
        3
    """

    def define(
        self, name: str, default: Any, text: str, choices: Sequence[str] = (), *, kind: str = "", **options: Any
    ) -> None:
        """Define a flag.

        Args:
            name: The flag's name.
            default: Its value where the command line does not set it.
            text: Its help.
            choices: The values that a text may have; empty: any.
            kind: What comes after `DEFINE_` in the name of absl's function; by default that of the default value. Or
                `paths`, for paths and patterns.
            **options: Further arguments of absl's function, such as `lower_bound`.
        """
        if kind == "paths":
            flag = _Paths(flags.ArgumentParser[str](), flags.ArgumentSerializer[str](), name, default, text)
            flags.DEFINE_flag(flag, flag_values=self, module_name="tfdml")
            return
        kind = kind or ("enum" if choices else KINDS[type(default)])
        rest = ([choices] if choices else []) + [text]
        getattr(flags, f"DEFINE_{kind}")(name, default, *rest, flag_values=self, module_name="tfdml", **options)

    def define_settings(self, settings: type) -> None:
        """Define a flag for each field of a data class, with its default; the docstring of the class has its help."""
        types, meaning = typing.get_type_hints(settings), meanings(settings)
        for field in dataclasses.fields(settings):
            choices = field.metadata.get("choices")
            text = meaning.get(field.name, "") + (f" One of {', '.join(choices)}." if choices else "")
            default = list(field.default) if isinstance(field.default, tuple) else field.default
            self.define(field.name, default, text, kind=KINDS[types[field.name]])

    def settings(self, settings: Any) -> Any:
        """Return a data class of settings with the values of the flags."""
        return settings(**{field.name: self[field.name].value for field in dataclasses.fields(settings)})

    def parse(self, words: Sequence[str]) -> None:
        """Set the flags from a command line without the command, after those of its flag files.

        Raises:
            UserError: As `read_flag_files`, or a word is no flag.
            absl.flags.Error: A flag is unknown, or its value is wrong.
        """
        for name in self:
            self[name].unparse()
        rest = self(["tfdml", *read_flag_files(words)])[1:]
        if rest:
            raise UserError(f"unexpected argument {rest[0]!r}: flags are written --name=value (see --help)")

    def require(self, *names: str) -> None:
        """Refuse a command line that leaves one of these flags empty."""
        for name in names:
            if not self[name].value:
                raise UserError(f"--{name} is missing")


class _Paths(flags.MultiFlag):
    """Paths and patterns: the flag is repeated, or has commas; the name of an existing file may have commas, too."""

    def _parse(self, arguments: Any) -> list[str]:
        texts = super()._parse(arguments)
        if texts and not any(texts):
            raise UserError(f"--{self.name}= names nothing: leave the flag out, or name what it is to take")
        return [path for text in texts for path in ([text] if exists(text) else text.split(",")) if path]


@dataclasses.dataclass(frozen=True)
class Command:
    """What one subcommand of `tfdml` is.

    Args:
        name: Its name, put before errors.
        work: Does the work.
        flags: Its flags.
        usage: What `--help` prints before the flags: the docstring of its module.
        effects: By flag, the condition for it to have an effect; flags that always have one are left out. A flag in
            vain on the command line is an error. One in a flag file is reset to its default with a warning, since the
            file may be meant for other values of the other flags.
        flag_of: The flags whose names are not those of the arguments that they set, by argument: see `as_flags`.
        sections: Flags that `--help` lists together, by the heading; the others follow.
        values: The values that conditions are checked with; by default those of the flags.
    """

    name: str
    work: Callable[[Flags], None]
    flags: Flags
    usage: str | None
    effects: Mapping[str, Effect] = dataclasses.field(default_factory=dict)
    flag_of: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sections: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    values: Callable[[Flags], Mapping[str, Any]] = Flags.flag_values_dict

    def parse(self, words: Sequence[str]) -> None:
        """Set the flags from a command line without the command; refuse flags without an effect.

        Raises:
            UserError: As `Flags.parse`, or a flag on the command line has no effect next to the others.
            absl.flags.Error: As `Flags.parse`.
        """
        self.flags.parse(words)
        for flag in (self.flags[name] for name in _COPIED if name in self.flags):
            value: Any = flag.value
            flag.value = list(map(local_copy, value)) if isinstance(value, list) else local_copy(value)
        # `--data_dir=` is as good as none.
        present = [name for name in self.flags if self.flags[name].present and self.flags[name].value not in ("", [])]
        typed = {word.lstrip("-").partition("=")[0] for word in words if word.startswith("-")}
        for name, message in in_vain(self.effects, self.values(self.flags), present).items():
            flag = self.flags[name]
            if typed & {name, f"no{name}"}:
                raise UserError(message)
            # A run's flags.txt holds every setting.
            if flag.value != flag.default:
                print(f"{self.name}: warning: in a flag file, and ignored: {message}", file=sys.stderr)
            flag.unparse()

    def help(self) -> str:
        """Return the usage, and every flag with its default."""
        listed = {name for names in self.sections.values() for name in names}
        lines = [(self.usage or "").strip(), ""]
        for title, names in self.sections.items():
            lines += [f"{title}:", *(_flag_help(self.flags[name]) for name in names), ""]
        text = "Read flags from a file, one a line; flags after it override it. It may name others, relative to itself."
        lines += ["Other flags:" if self.sections else "Flags:", f"  --flagfile=PATH\n      {text}"]
        return "\n".join(lines + [_flag_help(self.flags[name]) for name in self.flags if name not in listed])


def _flag_help(flag: flags.Flag) -> str:
    prefix = "--[no]" if flag.boolean else "--"
    default = "" if flag.default in (None, "") else f" Default: {flag.default_as_str}."
    return f"  {prefix}{flag.name}\n      {flag.help.strip()}{default}"


def as_flags(message: str, known: Flags, flag_of: Mapping[str, str] | None = None) -> str:
    """Return a message with the arguments that it names in backticks written as flags.

    `batch_size` becomes --batch_size, `bad_images='skip'` becomes --bad_images=skip, and `allow_extra=True`
    --allow_extra. What is no flag of the command stays as it is.

    Args:
        message: The message.
        known: The flags of the command.
        flag_of: The flags whose names are not those of the arguments that they set, by argument.

    Example:
        >>> values = Flags()
        >>> values.define("batch_size", 100, "Images per batch.")
        >>> as_flags("`batch_size=0` is too small", values)
        '--batch_size=0 is too small'
    """

    def written(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        name = {**_FLAG_OF, **(flag_of or {})}.get(name, name)
        if name not in known:
            return match[0]
        if value is None:
            return f"--{name}"
        if value in _SWITCHES and known[name].boolean:
            return f"--{_SWITCHES[value]}{name}"
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        return f"--{name}={value[1:-1] if quoted else value}"

    return _ARGUMENT.sub(written, message)


def once() -> Callable[[logging.LogRecord], bool]:
    """Return a filter that passes each warning once: a list that is read for each split warns each time."""
    warnings: set[str] = set()

    def passes(record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        text = record.getMessage()
        is_new = text not in warnings
        warnings.add(text)
        return is_new

    return passes


class Formatter(logging.Formatter):
    """Writes log lines in which arguments are flags.

    Args:
        command: The command that logs.
    """

    def __init__(self, command: Command):
        super().__init__()
        self._command = command

    def format(self, record: logging.LogRecord) -> str:
        """Return a line."""
        return as_flags(redact_text(as_named(super().format(record))), self._command.flags, self._command.flag_of)


def read_flag_files(words: Sequence[str], including: tuple[str, ...] = ()) -> list[str]:
    """Arguments in which the flags of a flag file stand in the place of its name.

    A file that a flag file names is looked for next to it, and then from the working folder. `configs/...` that is not
    there is one of the files that come with the package.

    Args:
        words: A command line without the command, or the lines of a flag file.
        including: The flag files through which they were reached.

    Raises:
        UserError: An argument is not UTF-8; or a flag file cannot be read, is no text, or includes itself.
    """
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        with user_errors(UnicodeEncodeError, f"{word!r} is not UTF-8 text; rename what it names"):
            word.encode()
        name, equals, path = word.strip().partition("=")
        if name in ("--flagfile", "-flagfile"):
            found += _read_flag_file((path if equals else next(rest, "")).strip(), including)
        else:
            found.append(word)
    return found


def _read_flag_file(path: str, including: tuple[str, ...]) -> list[str]:
    file = os.path.expanduser(local_copy(path))
    if including:
        # Next to the file that names it, which may be a copy.
        beside = local_copy(as_named(os.path.join(os.path.dirname(including[-1]), file)))
    if including and os.path.isfile(beside):
        file = beside
    elif not os.path.exists(file):
        file = str(shipped(path) or file)
    true = os.path.realpath(file)
    if true in including:
        raise UserError(f"--flagfile={path}: the file includes itself; take that line out")
    try:
        with open(file, encoding="utf-8") as opened:
            lines = opened.read().splitlines()
    except FileNotFoundError as error:
        siblings = glob.glob(os.path.join(glob.escape(os.path.dirname(path)), "*"))
        near = nearest(path, [*siblings, *(row["flag file"] for row in rows())], "tfdml configs")
        raise UserError(f"--flagfile={path}: there is no such file; {near}") from error
    except OSError as error:
        raise UserError(f"--flagfile={path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"--flagfile={path} is no UTF-8 text; write one flag a line, --name=value") from error
    if any("\0" in line for line in lines):
        raise UserError(f"--flagfile={path} is no text; write one flag a line, --name=value")
    kept = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith(("#", "//"))]
    return read_flag_files(kept, (*including, true))


def run(command: Command, words: Sequence[str]) -> None:
    """Parse the flags, do the command's work, and exit.

    The status is 0; 2 for what the user can mend; 128 and the signal's number where a signal ended the process (130,
    143, 129 for SIGINT, SIGTERM, SIGHUP), once what it was writing is cleaned up.

    Args:
        command: The command.
        words: The command line without the command.
    """
    flags.FLAGS.mark_as_parsed()  # absl's own, which its logging waits for
    absl_logging.use_absl_handler()
    absl_logging.set_verbosity(absl_logging.INFO)
    handler = absl_logging.get_absl_handler()
    handler.setFormatter(Formatter(command))
    handler.filters = [once()]
    for library in ("tensorflow", "faiss", "faiss.loader", "jax"):
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        with signals_as_exceptions(command.name):
            if any(word in ("--help", "-h", "-help") for word in words):
                print(command.help())
            else:
                command.parse(words)
                command.work(command.flags)
            sys.stdout.flush()
    except flags.Error as error:
        _fail(command, f"{short_message(error, longest=1000)} (see --help)")
    except UserError as error:
        _fail(command, as_flags(str(error), command.flags, command.flag_of))
    except KeyboardInterrupt as error:
        number = signal.Signals(getattr(error, "number", signal.SIGINT))
        reason = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
        print(f"{command.name}: {reason}", file=sys.stderr)
        sys.exit(128 + number)
    except Exception as error:
        if is_disk_full(error):
            _fail(command, _full_disk(error))
        if not isinstance(error, OSError) or not error.filename:
            raise
        # A path that is too long, a folder that may not be read: no fault of ours, whoever opened it.
        _fail(command, f"{error.filename}: {error.strerror or error}")
    sys.exit(0)


def _full_disk(error: Exception) -> str:
    """Return the message where a library met a full disk, or our output goes to one."""
    try:
        sys.stdout.flush()
    except OSError:
        drop_output()
        return f"the output cannot be written: the disk is full; {GO_ON}"
    path = getattr(error, "filename", None)
    if isinstance(path, str):
        return str(unwritable(path, error))
    return f"the disk is full ({short_message(error)}); {GO_ON}"


def _fail(command: Command, message: str) -> None:
    print(f"{command.name}: error: {redact_text(as_named(' '.join(message.splitlines())))}", file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def signals_as_exceptions(name: str) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise `Stopped` in the block, so that what it holds is cleaned up.

    A second signal ends the process at once, even where the main thread is deep in a library. A signal that the process
    was started to ignore, as by `nohup`, stays ignored. Outside the main thread nothing is changed.

    Args:
        name: The command's name, put before the message.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    threading.Thread(target=_end_at_second, args=(receiver, name), daemon=True).start()
    wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, _raise)
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        sender.close()  # which ends the thread


def _raise(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


def _end_at_second(receiver: socket.socket, name: str) -> None:
    """Wait for two signals, of which Python sends the numbers the moment they come."""
    numbers: list[int] = []
    with receiver:
        while byte := receiver.recv(1):
            numbers += [byte[0]] if byte[0] in SIGNALS else []
            if len(numbers) == 2:
                os.write(2, f"{name}: ended at once\n".encode())
                os._exit(128 + numbers[1])


class Progress:
    """One line of what is done and how fast, rewritten; now and then a new one where the error stream is no terminal.

    Args:
        total: How many images there are.
        done: How many were done before.
    """

    def __init__(self, total: int = 0, done: int = 0):
        self._live = sys.stderr.isatty()
        self._total, self._first = total, done
        self._last = self._started = time.monotonic()
        self._width = 0

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            print(file=sys.stderr)

    def rate(self, done: int) -> str:
        """Return the images a second since the start, in words."""
        return f"{(done - self._first) / max(time.monotonic() - self._started, 1e-9):,.0f} images a second"

    def images(self, done: int, total: int | None = None, bad: int | None = None) -> None:
        """Show that so many images are done, of so many, with so many bad ones among them."""
        faults = "" if bad is None else f" {bad:,} bad,"
        self._show(f"{done:,} of {total or self._total:,} images,{faults} {self.rate(done)}")

    def bytes(self, what: str, done: int, total: int) -> None:
        """Show that so many bytes are done."""
        of = f" of {total / 2**20:,.0f}" if total else ""
        self._show(f"{what}: {done / 2**20:,.0f}{of} MB")

    def _show(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last < (0.5 if self._live else 20.0):
            return
        self._last = now
        if self._live:
            text, self._width = f"\r{text:<{self._width}}", len(text)
        print(text, end="" if self._live else "\n", file=sys.stderr, flush=True)
