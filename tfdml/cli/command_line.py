"""Command lines: their flags, help, and messages that name flags.

Running a command: signals, errors as one line, the exit status, and progress on the error stream. And the flags by
which commands name a model and the images that it embeds.
"""

import dataclasses
import functools
import logging
import os
import re
import signal
import sys
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from absl import flags
from absl import logging as absl_logging

from tfdml import data
from tfdml.data.dataset import ImageDataset, check
from tfdml.effects import in_vain, needs
from tfdml.embeddings.backends import EmbeddingBackend, load_backend
from tfdml.errors import UserError, redact_text, short_message
from tfdml.expressions import parse_arguments
from tfdml.flag_files import read_flag_files
from tfdml.io.files import as_named, local_copy
from tfdml.registry import import_modules
from tfdml.training import RunFolder, workers
from tfdml.training.callbacks import Interruption
from tfdml.training.images import vector_splits
from tfdml.training.settings import Settings, choice, flag_name, meanings, not_negative, positive

# What comes after `DEFINE_` in the name of absl's function, by the type of a field.
_KINDS: dict[Any, str] = {bool: "bool", int: "integer", float: "float", float | None: "float", str: "string"}
# In every command: read from a local copy, where they are URLs of a store. Other paths are opened where they are.
_COPIED = ("model", "compare", "embedder", "embeddings", "gallery", "stack_on")
# By argument, in every command.
_FLAG_OF = {"options": "dataset_options"}
# Between two lines of progress.
_SECONDS = 10
_Class = TypeVar("_Class")


class CommandFlags(Settings):
    """The flags of a command, or a part of them; a field without a default is a flag that must be given."""

    stored = False


class Flags(flags.FlagValues):
    """The flags of one command: one for each field of its settings. A flag's value is an attribute, the flag an item.

    Args:
        *classes: Data classes, whose docstrings say what they and their fields mean; see `choice`.

    Attributes:
        effects: By flag, the condition for it to have an effect; flags that always have one are left out.

    Example:
        >>> from tfdml.cli.index import IndexFlags
        >>> values = Flags(IndexFlags)
        >>> values.parse(["--to=lancedb:///data/galleries", "--embeddings=embeddings/cars"])
        >>> values.settings(IndexFlags).embeddings
        'embeddings/cars'
    """

    def __init__(self, *classes: Any):
        super().__init__()
        self.__dict__["effects"] = {}  # an attribute that is set is a flag
        for each in classes:
            title = (each.__doc__ or "").partition("\n")[0].rstrip(".")  # under which `--help` lists its flags
            place: dict[str, Any] = {"flag_values": self, "module_name": title}
            types, texts = typing.get_type_hints(each), meanings(each)
            for field in dataclasses.fields(each):
                name, text, kind, rules = flag_name(field.name), texts[field.name], types[field.name], field.metadata
                if "choices" in rules:
                    text += f" One of {', '.join(rules['choices'])}."
                default = "" if field.default is dataclasses.MISSING else field.default
                if kind == Sequence[str]:
                    flags.DEFINE_list(name, list(default), text, **place)
                else:
                    getattr(flags, f"DEFINE_{_KINDS[kind]}")(name, default, text, **place)
                if "effect" in rules:
                    self.effects[name] = rules["effect"]
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
            UserError: As `read_flag_files`, or a word is no flag.
            absl.flags.Error: A flag is unknown, or its value is wrong.
        """
        for name in self:
            self[name].unparse()
        rest = self(["tfdml", *read_flag_files(words)])[1:]
        if rest:
            raise UserError(f"unexpected argument {rest[0]!r}: flags are written --name=value (see --help)")


@dataclasses.dataclass(frozen=True)
class Command:
    """What one subcommand of `tfdml` is.

    A flag without an effect next to the others is an error on the command line. In a flag file, which may be meant for
    other values of the other flags, it is reset to its default with a warning.

    Args:
        name: Its name, put before errors.
        work: Does the work.
        flags: Its flags.
        usage: What `--help` prints before the flags: the docstring of its module.
        flag_of: The flags whose names are not those of the arguments that they set, by argument: see `as_flags`.
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
            UserError: As `Flags.parse`, or a flag on the command line has no effect next to the others.
            absl.flags.Error: As `Flags.parse`.
        """
        self.flags.parse(words)
        import_modules(str(self.flags["import"].value))
        for flag in (self.flags[name] for name in _COPIED if name in self.flags):
            value: Any = flag.value
            flag.value = list(map(local_copy, value)) if isinstance(value, list) else local_copy(value)
        # `--data_dir=` is as good as none.
        present = [name for name in self.flags if self.flags[name].present and self.flags[name].value not in ("", [])]
        typed = {word.lstrip("-").partition("=")[0] for word in words if word.startswith("-")}
        for name, message in in_vain(self.flags.effects, self.values(self.flags), present).items():
            flag = self.flags[name]
            if typed & {name, f"no{name}"}:
                raise UserError(message)
            # A run's flags.txt holds every setting.
            if flag.value != flag.default:
                print(f"{self.name}: warning: in a flag file, and ignored: {message}", file=sys.stderr)
            flag.unparse()

    def help(self) -> str:
        """Return the usage, and every flag with its default."""
        text = "Read flags from a file, one a line; flags after it override it. It may name others, relative to itself."
        lines = [(self.usage or "").strip(), "", f"  --flagfile=PATH\n      {text}"]
        for title, group in self.flags.flags_by_module_dict().items():
            lines += ["", f"{title}:"]
            for flag in group:
                default = "" if flag.default in (None, "") else f" Default: {flag.default_as_str}."
                lines.append(f"  --{'[no]' * flag.boolean}{flag.name}\n      {flag.help.strip()}{default}")
        return "\n".join(lines)

    def as_flags(self, message: str) -> str:
        """Return a message with the arguments that it names in backticks written as flags.

        Example:
            >>> from tfdml.cli.index import IndexFlags
            >>> Command("try", print, Flags(IndexFlags), "").as_flags("`truncate_dim=-1` is too small")
            '--truncate_dim=-1 is too small'
        """

        names = {**_FLAG_OF, **self.flag_of}

        def written(match: re.Match[str]) -> str:
            name = names.get(match[1], match[1])
            return f"--{name}{match[2]}" if name in self.flags else match[0]

        return re.sub(r"`([a-z]\w*)((?:=[^`]*)?)`", written, message)


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
    absl_logging.get_absl_handler().setFormatter(logging.Formatter())
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
        _fail(command, command.as_flags(str(error)))
    except KeyboardInterrupt as error:
        number = signal.Signals(getattr(error, "number", signal.SIGINT))
        reason = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
        print(f"{command.name}: {reason}", file=sys.stderr)
        sys.exit(128 + number)
    except OSError as error:
        if not error.filename:
            raise
        # A path that is too long, a folder that may not be read, a full disk: no fault of ours, whoever opened it.
        _fail(command, f"{error.filename}: {error.strerror or error}")
    sys.exit(0)


def _fail(command: Command, message: str) -> None:
    print(f"{command.name}: error: {redact_text(as_named(' '.join(message.splitlines())))}", file=sys.stderr)
    sys.exit(2)


class Progress:
    """Prints what is done and how fast, a line every ten seconds on the error stream.

    Args:
        done: How many images were done before.
    """

    def __init__(self, done: int = 0):
        self._first = done
        self._last = self._started = time.monotonic()

    def rate(self, done: int) -> str:
        """Return the images a second since the start, in words."""
        return f"{(done - self._first) / max(time.monotonic() - self._started, 1e-9):,.0f} images a second"

    def images(self, done: int, total: int, bad: int = 0) -> None:
        """Show that so many images are done, of so many, with so many bad ones among them."""
        faults = f", {bad:,} bad" if bad else ""
        self._show(f"{done:,} of {total:,} images{faults}, {self.rate(done)}")

    def bytes(self, what: str, done: int, total: int) -> None:
        """Show that so many bytes are done."""
        self._show(f"{what}: {done / 2**20:,.0f} of {total / 2**20:,.0f} MB")

    def _show(self, text: str) -> None:
        if time.monotonic() - self._last >= _SECONDS:
            self._last = time.monotonic()
            print(text, file=sys.stderr, flush=True)


# Models and images


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFlags(CommandFlags):
    """What embeds images.

    Args:
        model: What embeds: a run folder or a .keras file; a SavedModel, or a folder of its versions, of which the
            newest is taken; or a .tflite or .onnx file, whose view is in its export's model_card.json.
        batch_size: Images per batch.
        truncate_dim: Keep the first N dimensions, scaled to length 1; 0: all.
    """

    model: str = ""
    batch_size: int = choice(100, check=positive, effect=needs("model"))
    truncate_dim: int = choice(0, check=not_negative, effect=needs("model"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFlags(ModelFlags):
    """What embeds which images.

    Args:
        dataset: Data set, as in tfdml train; for a run folder, its own.
        features: Stored embeddings, for a head; without roles, all are of the test split.
        data_dir: Where the unpacked data set lies.
        dataset_options: Options of the data set, as in tfdml train.
        bad_images: Images that cannot be decoded: skip decodes all first.
    """

    dataset: str = ""
    features: str = ""
    data_dir: str = ""
    dataset_options: str = ""
    bad_images: str = choice("error", choices=("error", "skip"))


@dataclasses.dataclass(frozen=True)
class DataChoice:
    """Which data set the flags mean.

    Args:
        name: Its name.
        directory: Where it lies; empty: nowhere.
        options: As in `--dataset_options`.
        bad_images: `error`, or `skip` to leave out the images that cannot be decoded, of which each is tried.
        features: Stored embeddings in the place of images.
        trained_on: Whether a head was trained on them, and they have the splits of its training.
    """

    name: str
    directory: str
    options: str
    bad_images: str = "error"
    features: str = ""
    trained_on: bool = False

    @functools.cached_property
    def _vectors(self) -> dict[str, ImageDataset]:
        options: dict[str, Any] = {} if self.trained_on else {"test_fraction": None}
        options |= parse_arguments(self.options, "--dataset_options")
        return vector_splits(self.features, self.directory, **options)

    def parts(self, split: str) -> list[ImageDataset]:
        """Return a split or, of all images, those for training and for testing."""
        if split != "all":
            return [self.load(split)]
        return list(self._vectors.values()) if self.features else [self.load("train"), self.load("test")]

    def load(self, split: str) -> ImageDataset:
        """One split."""
        if self.features:
            side = self._vectors.get("train" if split == "train" else "test")
            if side is None or split in ("query", "gallery"):
                raise UserError(f"--features={self.features} has no {split} images: name another --split")
            return side
        arguments = parse_arguments(self.options, "--dataset_options")
        dataset = data.load(self.name, self.directory or None, split, **arguments)
        return check(dataset, self.bad_images, "decode" if self.bad_images == "skip" else "headers")


def data_choice(flags: DataFlags) -> DataChoice:
    """Return the data set of the flags, or that of the run folder that they name.

    Raises:
        UserError: Neither names one, or there is no such model.
    """
    model = flags.model
    _check_model(model)
    if flags.dataset and flags.features:
        raise UserError("--dataset names images and --features stored embeddings: name one of them")
    if flags.dataset:
        return DataChoice(flags.dataset, flags.data_dir, flags.dataset_options, flags.bad_images)

    stored = RunFolder(model).load_experiment() if (Path(model) / "flags.txt").is_file() else None
    features = flags.features or (stored.features if stored else "")
    # By name, as the file of its training may have moved: to take its training classes for new ones would be worse.
    if features and (stored is None or not stored.features or Path(features).stem != stored.data_name):
        return DataChoice(Path(features).stem, flags.data_dir, flags.dataset_options, features=features)
    if stored is None:
        raise UserError("--dataset or --features is missing: only a run folder knows its own")
    directory, options = flags.data_dir or stored.data_dir, flags.dataset_options or stored.dataset_options
    return DataChoice(stored.data_name, directory, options, flags.bad_images, features, trained_on=True)


def _check_model(model: str) -> None:
    if "://" not in model and not os.path.exists(os.path.expanduser(model or ".")):
        raise UserError(f"--model={model}: there is no such file or folder")


def load_source(flags: ModelFlags) -> EmbeddingBackend:
    """Return the model of the flags, loaded."""
    if not flags.model:
        raise UserError("--model is missing")
    model = os.path.expanduser(flags.model)
    _check_model(model)
    if Path(model).suffix == ".keras" or (Path(model) / "embedder.keras").is_file():
        # So that a pass that was stopped and continued gives the bits of an uninterrupted one.
        workers.one_operation_at_a_time()
    return load_backend(model, truncate_dim=flags.truncate_dim)
