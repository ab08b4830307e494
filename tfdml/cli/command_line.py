"""Command lines: their flags, flag files, help, and messages that name flags."""

import dataclasses
import logging
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from tfdml.effects import Effect, in_vain
from tfdml.errors import UserError
from tfdml.training.settings import meanings
from tfdml_command.configs import shipped

# By argument, in every command.
_FLAG_OF = {"options": "dataset_options"}
_SWITCHES = {"True": "", "False": "no"}
KINDS: dict[Any, str] = {bool: "bool", int: "integer", float: "float", str: "string", list: "list"}
KINDS |= {float | None: "float", Sequence[str]: "list"}
_ARGUMENT = re.compile(r"`([a-z]\w*)(?:=([^`]*))?`")


class Flags(flags.FlagValues):
    """The flags of one command. A flag's value is an attribute, and the flag itself an item.

    Example:
        >>> values = Flags()
        >>> values.define("k", 10, "How many neighbours.", lower_bound=1)
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
            kind: What comes after `DEFINE_` in the name of absl's function; by default that of the default value.
            **options: Further arguments of absl's function, such as `lower_bound`.
        """
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
        return as_flags(super().format(record), self._command.flags, self._command.flag_of)


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
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{word!r} is not UTF-8 text; rename what it names") from error
        name, equals, path = word.strip().partition("=")
        if name in ("--flagfile", "-flagfile"):
            found += _read_flag_file((path if equals else next(rest, "")).strip(), including)
        else:
            found.append(word)
    return found


def _read_flag_file(path: str, including: tuple[str, ...]) -> list[str]:
    file = os.path.expanduser(path)
    if including and os.path.isfile(beside := os.path.join(os.path.dirname(including[-1]), file)):
        file = beside
    elif not os.path.exists(file):
        file = str(shipped(path) or file)
    true = os.path.realpath(file)
    if true in including:
        raise UserError(f"--flagfile={path}: the file includes itself; take that line out")
    try:
        with open(file, encoding="utf-8") as opened:
            lines = opened.read().splitlines()
    except OSError as error:
        raise UserError(f"--flagfile={path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"--flagfile={path} is no UTF-8 text; write one flag a line, --name=value") from error
    if any("\0" in line for line in lines):
        raise UserError(f"--flagfile={path} is no text; write one flag a line, --name=value")
    kept = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith(("#", "//"))]
    return read_flag_files(kept, (*including, true))
