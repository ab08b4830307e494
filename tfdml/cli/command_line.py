"""Command lines: their flags, help, and messages that name flags.

And running a command: signals, errors as one line, the exit status, and progress on the error
stream.
"""

import dataclasses
import logging
import os
import re
import signal
import sys
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from absl import flags
from absl import logging as absl_logging

from tfdml.data.policies import modules_of
from tfdml.errors import UserError, redact_text, short_message, user_errors
from tfdml.flags import Effect, in_vain, read_flag_files, typed_words
from tfdml.io.files import as_named, local_copy
from tfdml.registry import allow_modules, import_modules, module_names
from tfdml.training.interruption import Interruption
from tfdml.training.settings import Settings, flag_name, meanings

# What comes after `DEFINE_` in the name of absl's function, by the type of a field.
_KINDS: dict[Any, str] = {
    bool: "bool",
    int: "integer",
    float: "float",
    float | None: "float",
    str: "string",
}
# In every command: read from a local copy, where they are URLs of a store. Other paths are opened
# where they are.
_COPIED = ("model", "compare", "embedder", "embeddings", "gallery", "stack_on")
# By argument, in every command.
_FLAG_OF = {"options": "dataset_options"}
_Class = TypeVar("_Class")


class CommandFlags(Settings):
    """The flags of a command, or a part of them; a field without a default is a flag that must be
    given."""

    stored = False


class Flags(flags.FlagValues):
    """The flags of one command: one for each field of its settings. A flag's value is an attribute,
    the flag an item.

    Args:
        *classes: Data classes, whose docstrings say what they and their fields mean; see `choice`.
        effects: By flag, the condition for it to have an effect, next to those of the fields.

    Attributes:
        effects: The conditions; flags that always have an effect are left out.

    Example:
        >>> from tfdml.cli.index import IndexFlags
        >>> values = Flags(IndexFlags)
        >>> values.parse(["--to=lancedb:///data/galleries", "--embeddings=embeddings/cars"])
        >>> values.settings(IndexFlags).embeddings
        'embeddings/cars'
    """

    def __init__(self, *classes: Any, effects: Mapping[str, Effect] = {}):
        super().__init__()
        self.__dict__["effects"] = dict(effects)  # an attribute that is set is a flag
        for each in classes:
            title = (
                (each.__doc__ or "").partition("\n")[0].rstrip(".")
            )  # under which `--help` lists its flags
            place: dict[str, Any] = {"flag_values": self, "module_name": title}
            types, texts = typing.get_type_hints(each), meanings(each)
            for field in dataclasses.fields(each):
                name, text, kind, rules = (
                    flag_name(field.name),
                    texts[field.name],
                    types[field.name],
                    field.metadata,
                )
                if "choices" in rules:
                    text += f" One of {', '.join(rules['choices'])}."
                default = "" if field.default is dataclasses.MISSING else field.default
                if rules.get("paths"):
                    words = flags.ArgumentParser[str](), flags.ArgumentSerializer[str]()
                    flags.DEFINE_flag(_Paths(*words, name, list(default), text), **place)
                elif kind == Sequence[str]:
                    flags.DEFINE_list(name, list(default), text, **place)
                else:
                    getattr(flags, f"DEFINE_{_KINDS[kind]}")(name, default, text, **place)
                if "effect" in rules:
                    self.effects.setdefault(name, rules["effect"])
        if "import" not in self:
            text = "Modules of your own, with commas, that register what flags name."
            flags.DEFINE_string("import", "", text, flag_values=self, module_name="Your own code")

    def settings(self, kind: type[_Class]) -> _Class:
        """Return a data class of settings with the values of the flags.

        Raises:
            UserError: A flag without a default is not given; or as the class.
        """
        fields = {field.name: field.default for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        for name, default in fields.items():
            if default is dataclasses.MISSING and not self[name].value:
                raise UserError(f"--{name} is missing")
        return kind(**{name: self[flag_name(name)].value for name in fields})

    def parse(self, words: Sequence[str]) -> None:
        """Set the flags from a command line without the command, after those of its flag files.

        Raises:
            UserError: As `read_flag_files`, or a word is no flag, or no UTF-8 text.
            absl.flags.Error: A flag is unknown, or its value is wrong.
        """
        for name in self:
            self[name].unparse()
        for word in words:
            with user_errors(
                UnicodeEncodeError, f"{word!r} is not UTF-8 text; rename what it names"
            ):
                word.encode()
        rest = self(["tfdml", *read_flag_files(words)])[1:]
        if rest:
            raise UserError(
                f"unexpected argument {rest[0]!r}: flags are written --name=value (see --help)"
            )


class _Paths(flags.MultiFlag):
    """Paths and patterns: the flag is repeated, or has commas; the name of an existing file may
    have commas, too."""

    def _parse(self, arguments: Any) -> list[str]:
        texts = super()._parse(arguments)
        return [
            path
            for text in texts
            for path in ([text] if os.path.exists(text) else text.split(","))
            if path
        ]


@dataclasses.dataclass(frozen=True)
class Command:
    """What one subcommand of `tfdml` is.

    A flag without an effect next to the others is an error on the command line. In a flag file,
    which may be meant for other values of the other flags, it is reset to its default with a
    warning.

    Args:
        name: Its name, put before errors.
        work: Does the work.
        flags: Its flags.
        usage: What `--help` prints before the flags: the docstring of its module.
        flag_of: The flags whose names are not those of the arguments that they set, by argument:
            see `as_flags`.
        values: The values that conditions are checked with; by default those of the flags.
    """

    name: str
    work: Callable[[Flags], None]
    flags: Flags
    usage: str | None
    flag_of: Mapping[str, str] = dataclasses.field(default_factory=dict)
    values: Callable[[Flags], Mapping[str, Any]] = Flags.flag_values_dict

    def parse(self, words: Sequence[str]) -> None:
        """Set the flags from a command line without the command; refuse flags without an effect.

        Raises:
            UserError: As `Flags.parse`, or a flag on the command line has no effect next to the
                others.
            absl.flags.Error: As `Flags.parse`.
        """
        self.flags.parse(typed_words(words))
        import_modules()
        allow_modules(self._modules())
        self.flags.parse(words)
        import_modules(str(self.flags["import"].value))
        for flag in (self.flags[name] for name in _COPIED if name in self.flags):
            value: Any = flag.value
            flag.value = (
                list(map(local_copy, value)) if isinstance(value, list) else local_copy(value)
            )
        # `--data_dir=` is as good as none.
        present = [
            name
            for name in self.flags
            if self.flags[name].present and self.flags[name].value not in ("", [])
        ]
        typed = {word.lstrip("-").partition("=")[0] for word in words if word.startswith("-")}
        for name, message in in_vain(self.flags.effects, self.values(self.flags), present).items():
            flag = self.flags[name]
            if typed & {name, f"no{name}"}:
                raise UserError(message)
            # A run's flags.txt holds every setting.
            if flag.value != flag.default:
                print(
                    f"{self.name}: warning: in a flag file, and ignored: {message}", file=sys.stderr
                )
            flag.unparse()

    def _modules(self) -> list[str]:
        """Return the modules that the flags name, as they are set."""
        values = self.flags.flag_values_dict()
        modules = module_names(values["import"])
        if log_to := values.get("log_to"):
            modules.append(log_to.rpartition(".")[0])
        return [*modules, *modules_of(values.get("policy") or "")]

    def help(self) -> str:
        """Return the usage, and every flag with its default."""
        text = (
            "Read flags from a file, one a line; flags after it override it. It may name others, "
            "relative to itself."
        )
        lines = [(self.usage or "").strip(), "", f"  --flagfile=PATH\n      {text}"]
        for title, group in self.flags.flags_by_module_dict().items():
            lines += ["", f"{title}:"]
            for flag in group:
                default = "" if flag.default in (None, "") else f" Default: {flag.default_as_str}."
                lines.append(
                    f"  --{'[no]' * flag.boolean}{flag.name}\n      {flag.help.strip()}{default}"
                )
        return "\n".join(lines)

    def error_text(self, error: UserError) -> str:
        """Return the text of an error, with flags in place of its arguments."""
        named = {"imports": "import", **_FLAG_OF, **self.flag_of}
        names = {name: f"--{name}" for name in self.flags}
        names.update({argument: f"--{flag}" for argument, flag in named.items()})
        return self.as_flags(error.text(names))

    def as_flags(self, message: str) -> str:
        """Return a message with the arguments that it names in backticks written as flags.

        A fifth of the messages of the library name two arguments or more, which an exception with
        one argument and its value could not carry.

        Example:
            >>> from tfdml.cli.index import IndexFlags
            >>> Command("try", print, Flags(IndexFlags),
            ...     "").as_flags("`truncate_dim=-1` is too small")
            '--truncate_dim=-1 is too small'
        """

        def written(match: re.Match[str]) -> str:
            argument, equals, value = match[1].partition("=")
            name = {**_FLAG_OF, **self.flag_of}.get(argument, argument)
            if name not in self.flags:
                return match[0]
            if value in ("True", "False"):
                return f"--{'no' * (value == 'False')}{name}"
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            return f"--{name}{equals}{value[1:-1] if quoted else value}"

        return re.sub(r"`([a-z]\w*(?:=[^`]*)?)`", written, message)


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
        return self._command.as_flags(redact_text(as_named(super().format(record))))


def run(command: Command, words: Sequence[str]) -> None:
    """Parse the flags, do the command's work, and exit.

    The status is 0; 2 for what the user can mend; 128 and the signal's number where a signal ended
    the process (130, 143, 129 for SIGINT, SIGTERM, SIGHUP), once what it was writing is cleaned up.

    Args:
        command: The command.
        words: The command line without the command.
    """
    flags.FLAGS.mark_as_parsed()  # absl's own, which its logging waits for
    absl_logging.use_absl_handler()
    absl_logging.set_verbosity(absl_logging.INFO)
    absl_logging.get_absl_handler().setFormatter(Formatter(command))
    for library in ("tensorflow", "faiss", "faiss.loader", "jax"):
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        with Interruption():
            if any(word in ("--help", "-h", "-help") for word in words):
                print(command.help())
            else:
                command.parse(words)
                command.work(command.flags)
            sys.stdout.flush()
    except flags.Error as error:
        _fail(command, f"{short_message(error, longest=1000)} (see --help)")
    except UserError as error:
        _fail(command, command.error_text(error))
    except KeyboardInterrupt as error:
        number = signal.Signals(getattr(error, "number", signal.SIGINT))
        reason = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
        print(f"{command.name}: {reason}", file=sys.stderr)
        sys.exit(128 + number)
    except OSError as error:
        if not error.filename:
            raise
        # A path that is too long, a folder that may not be read, a full disk: no fault of ours,
        # whoever opened it.
        _fail(command, f"{error.filename}: {error.strerror or error}")
    sys.exit(0)


def _fail(command: Command, message: str) -> None:
    print(
        f"{command.name}: error: {redact_text(as_named(' '.join(message.splitlines())))}",
        file=sys.stderr,
    )
    sys.exit(2)


class Progress:
    """One line of what is done and how fast, rewritten; now and then a new one where the error
    stream is no terminal.

    Args:
        total: How many images there are.
        done: How many were done before.
    """

    def __init__(self, total: int = 0, done: int = 0):
        self._live = sys.stderr.isatty()
        self._total, self._first = total, done
        self._last = self._started = time.monotonic()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        if self._live and self._last > self._started:
            print(file=sys.stderr)

    def rate(self, done: int) -> str:
        """Return the images a second since the start, in words."""
        return (
            f"{(done - self._first) / max(time.monotonic() - self._started, 1e-9):,.0f} images a "
            "second"
        )

    def images(self, done: int, total: int | None = None, bad: int = 0) -> None:
        """Show that so many images are done, of so many, with so many bad ones among them."""
        faults = f", {bad:,} bad" if bad else ""
        self._show(f"{done:,} of {total or self._total:,} images{faults}, {self.rate(done)}")

    def bytes(self, what: str, done: int, total: int) -> None:
        """Show that so many bytes are done."""
        self._show(f"{what}: {done / 2**20:,.0f} of {total / 2**20:,.0f} MB")

    def _show(self, text: str) -> None:
        if time.monotonic() - self._last >= (0.5 if self._live else 20.0):
            self._last = time.monotonic()
            print(
                f"\r{text:<79}" if self._live else text,
                end="" if self._live else "\n",
                file=sys.stderr,
                flush=True,
            )
