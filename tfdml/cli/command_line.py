"""Command lines: their flags, help, and messages that name flags.

And running a command: signals, errors as one line, the exit status, and progress on the error
stream.
"""

import dataclasses
import difflib
import importlib.util
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, ClassVar, TypeVar

from absl import flags
from absl import logging as absl_logging

from tfdml.errors import (
    ERROR_TEXT,
    UserError,
    quiet_errors,
    short_message,
    user_errors,
)
from tfdml.flags import read_flag_files, typed_words
from tfdml.io.files import local_copy, printable
from tfdml.options import Settings, define_flags, fields_of, flag_name, flag_text, unmet
from tfdml.registry import allow_modules, import_modules, module_names
from tfdml.training.interruption import Interruption

# In every command: read from a local copy, where they are URLs of a store. Other paths are opened
# where they are.
_COPIED = ("model", "compare", "embedder", "embeddings", "gallery", "stack_on")
# What absl adds to the help of a flag that may be given several times.
_REPEATED = ";\n    repeat this option to specify a list of values"
# By argument, in every command.
_FLAG_OF = {"options": "dataset_options"}
_Class = TypeVar("_Class", bound=Settings)


@dataclasses.dataclass(frozen=True)
class CommandFlags(Settings):
    """The settings of a command, or a part of them; a field without a default is a flag that must
    be given."""

    stored: ClassVar[bool] = False


class Flags(flags.FlagValues):
    """The flags of one command: one for each field of its settings. A flag's value is an attribute,
    the flag an item.

    Args:
        *kinds: The settings; see `tfdml.options.option`.

    Example:
        >>> from tfdml.cli.index import IndexFlags
        >>> values = Flags(IndexFlags)
        >>> values.parse(["--to=lancedb:///data/galleries", "--embeddings=embeddings/cars"])
        >>> values.settings(IndexFlags).embeddings
        'embeddings/cars'
    """

    def __init__(self, *kinds: type[Settings]):
        super().__init__()
        self.__dict__["kinds"] = kinds  # an attribute that is set is a flag
        for kind in kinds:
            define_flags(kind, self)
        if "import" not in self:
            text = "Modules of your own, with commas, that register what flags name."
            flags.DEFINE_string("import", "", text, flag_values=self, module_name="Your own code")

    def values(self, kind: type[Settings]) -> dict[str, Any]:
        """Return the values of the flags of settings, by setting; those that must be given and are
        not are left out."""
        values = {}
        for name, field in fields_of(kind).items():
            flag = self[flag_name(field)]
            if flag.value or field.default is not dataclasses.MISSING:
                values[name] = flag.value
        return values

    def given(self, kind: type[Settings]) -> dict[str, Any]:
        """Return those that the command line or a flag file sets."""
        names = [name for name, field in fields_of(kind).items() if self[flag_name(field)].present]
        return {name: value for name, value in self.values(kind).items() if name in names}

    def read_texts(self) -> None:
        """Parse what is set, once: its flags then have the values of the settings.

        Raises:
            UserError: A text is none of its type.
        """
        for kind in self.kinds:
            given = self.given(kind)
            draft = kind.draft(given)
            for name in given:
                self[flag_name(fields_of(kind)[name])].value = getattr(draft, name)

    def settings(self, kind: type[_Class]) -> _Class:
        """Return settings with the values of the flags.

        Raises:
            UserError: A flag without a default is not given; or as the class.
        """
        values = self.values(kind)
        for name in fields_of(kind):
            if name not in values:
                raise UserError("is missing", **{name: ...})
        return kind(**values)

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


def _drafts(values: Flags) -> list[Settings]:
    return [kind.draft(values.values(kind)) for kind in values.kinds]


def _settings(values: Flags) -> list[Settings]:
    return [values.settings(kind) for kind in values.kinds]


@dataclasses.dataclass(frozen=True)
class Command:
    """What one subcommand of `tfdml` is.

    A flag without an effect next to the others is an error on the command line. In a flag file,
    which may be meant for other values of the other flags, it is reset to its default with a
    warning.

    Args:
        name: Its name, put before errors.
        work: Does the work, of its settings.
        flags: Its flags.
        usage: What `--help` prints before the flags: the docstring of its module.
        flag_of: The flags whose names are not those of the arguments that they set, by argument:
            `folder` is `--out` of a command that writes one.
        drafts: Returns the settings that say which flags have an effect; by default those of the
            flags.
        settings: Returns the arguments of `work`; by default the settings of the flags.
        needs_tensorflow: Whether the work always needs TensorFlow, which is loaded before.
    """

    name: str
    work: Callable[..., None]
    flags: Flags
    usage: str | None
    flag_of: Mapping[str, str] = dataclasses.field(default_factory=dict)
    drafts: Callable[[Flags], Sequence[Settings]] = _drafts
    settings: Callable[[Flags], Sequence[Any]] = _settings
    needs_tensorflow: bool = True

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
        self.flags.read_texts()
        typed = {word.lstrip("-").partition("=")[0] for word in words if word.startswith("-")}
        for draft in self.drafts(self.flags):
            self._refuse_in_vain(draft, typed)

    def _refuse_in_vain(self, draft: Settings, typed: Set[str]) -> None:
        """Refuse the typed flags that have no effect, and reset those of flag files."""
        for name, error in unmet(draft, self.flags.given(type(draft))):
            field = fields_of(type(draft))[name]
            flag = self.flags[flag_name(field)]
            if not flag_text(flag.value):  # `--data_dir=` is as good as none
                continue
            if not typed.isdisjoint({flag.name, f"no{flag.name}"}):
                raise error
            # A run's flags.txt holds every setting.
            if flag.value != field.default:
                text = self.error_text(error)
                print(f"{self.name}: warning: in a flag file, and ignored: {text}", file=sys.stderr)
            flag.unparse()

    def _modules(self) -> list[str]:
        """Return the modules that the flags name, as they are set."""
        values = self.flags.flag_values_dict()
        modules = module_names(values["import"])
        if log_to := values.get("log_to"):
            modules.append(log_to.rpartition(".")[0])
        if policy := values.get("policy"):
            load_tensorflow()
            from tfdml.data.policies import modules_of

            modules += modules_of(policy)
        return modules

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
                text = flag.help.removesuffix(_REPEATED).strip()
                meaning, *choices = text.splitlines()
                is_empty = flag.default in (None, "", [])
                default = "" if is_empty else f" Default: {flag.default_as_str}."
                lines.append(f"  --{'[no]' * flag.boolean}{flag.name}\n      {meaning}{default}")
                lines += [f"        {choice}" for choice in choices]
        return "\n".join(lines)

    def error_text(self, error: UserError) -> str:
        """Return the text of an error, with flags in place of its arguments."""
        named = {"imports": "import", **_FLAG_OF, **self.flag_of}
        names = {name: f"--{name}" for name in self.flags}
        names.update({argument: f"--{flag}" for argument, flag in named.items()})
        return error.text(names)


class RedactingFormatter(logging.Formatter):
    """Writes log lines without passwords, and paths as they are named."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a line."""
        return printable(super().format(record))


def run(command: Command, words: Sequence[str]) -> None:
    """Parse the flags, do the command's work, and exit.

    The status is 0; 2 for what the user can mend; 3 where watched queries have
    shifted; 128 and the signal's number where a signal ended the process (130, 143, 129 for SIGINT,
    SIGTERM, SIGHUP), once what it was writing is cleaned up.

    Args:
        command: The command.
        words: The command line without the command.
    """
    flags.FLAGS.mark_as_parsed()  # absl's own, which its logging waits for
    absl_logging.use_absl_handler()
    absl_logging.set_verbosity(absl_logging.INFO)
    absl_logging.get_absl_handler().setFormatter(RedactingFormatter())
    for library in ("tensorflow", "faiss", "faiss.loader", "jax"):
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        with Interruption():
            if any(word in ("--help", "-h", "-help") for word in words):
                print(command.help())
            else:
                command.parse(words)
                settings = command.settings(command.flags)
                if command.needs_tensorflow:
                    load_tensorflow()
                command.work(*settings)
            sys.stdout.flush()
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, list(command.flags), 1)
        hint = f"did you mean {near[0]}?" if near else f"see tfdml {command.name} --help"
        _fail(command, f"there is no flag --{error.flagname}; {hint}")
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


def load_tensorflow() -> None:
    """Load TensorFlow without its messages.

    Raises:
        UserError: It cannot be loaded.
    """
    if "tensorflow" in sys.modules and sys.modules["tensorflow"] is not None:
        return
    if os.environ.get("KERAS_BACKEND") == "jax" and not importlib.util.find_spec("jax"):
        raise UserError("KERAS_BACKEND=jax needs JAX: pip install 'tfdml[jax]'")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    print("loading TensorFlow", file=sys.stderr, flush=True)
    cannot = f"TensorFlow cannot be loaded ({ERROR_TEXT}); run tfdml doctor"
    with user_errors(ImportError, cannot), quiet_errors():
        import tensorflow as tf

        tf.config.list_physical_devices()


def _fail(command: Command, message: str) -> None:
    line = printable(" ".join(message.splitlines()))
    print(f"{command.name}: error: {line}", file=sys.stderr)
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
        seconds = max(time.monotonic() - self._started, 1e-9)
        return f"{(done - self._first) / seconds:,.0f} images a second"

    def images(self, done: int, total: int | None = None, bad: int = 0) -> None:
        """Show that so many images are done, of so many, with so many bad ones among them."""
        count = f"{done:,} of {total or self._total:,} images"
        if bad:
            count += f", {bad:,} bad"
        self._show(f"{count}, {self.rate(done)}")

    def bytes(self, work: str, done: int, total: int) -> None:
        """Show that so many bytes of some work are done."""
        megabytes = f"{done / 2**20:,.0f} of {total / 2**20:,.0f} MB"
        self._show(f"{work}: {megabytes}")

    def _show(self, text: str) -> None:
        if time.monotonic() - self._last >= (0.5 if self._live else 20.0):
            self._last = time.monotonic()
            start, end = (f"\r{text:<79}", "") if self._live else (text, "\n")
            print(start, end=end, file=sys.stderr, flush=True)


def check_web() -> None:
    """Raise a `UserError` where the packages of the extra `web` are not installed."""
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"this needs the package {package}: pip install 'tfdml[web]'")
