"""Settings: declared once, as fields, and read from text once, at the edge.

`option` makes a field with its `Rules`, `Settings` checks them, and `Choice` is a family of named
settings, such as the samplings, to which `choice` adds one. `unmet` says which settings have no
effect, and `define_flags` makes a flag of each. Only absl's flags are imported: what a setting
builds is written where TensorFlow may be imported.
"""

from __future__ import annotations

import dataclasses
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

from absl import flags

from tfdml.errors import UserError, choice_hint, redact_text, user_errors
from tfdml.expressions import Arguments, Call

# Counts and seeds beyond this do not fit the 32-bit integers of TensorFlow and Keras.
LARGEST_INTEGER = 2**31 - 1
# The largest float32, in which numbers are computed.
_LARGEST_NUMBER = 3.4028234663852886e38
_BOOLEANS = {"true": True, "false": False}
_COLORS = {"black": (0, 0, 0), "white": (255, 255, 255)}
_Settings = TypeVar("_Settings", bound="Settings")
_Chosen = TypeVar("_Chosen", bound="Choice")


class Rules(NamedTuple):
    """What one setting may be.

    Args:
        help: What it means, in `--help`.
        above: A value below its smallest.
        at_least: Its smallest value.
        at_most: Its largest value.
        below: A value above its largest.
        also: A value out of these bounds that has a meaning of its own.
        words: The words that it may be; empty for any.
        requires: What it needs to have an effect: see `holds`.
        flag: The name of its flag, where that is another.
        paths: Whether it is of paths and patterns, whose flag is repeated or has commas.
    """

    help: str
    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    below: float | None = None
    also: float | None = None
    words: tuple[str, ...] = ()
    requires: str = ""
    flag: str = ""
    paths: bool = False

    def meaning(self) -> str:
        """Return the help, with the words that it may be."""
        return f"{self.help} One of {', '.join(self.words)}." if self.words else self.help

    def fault(self, value: Any) -> str:
        """Return what is wrong with a value; empty where nothing is."""
        if value is None or (self.also is not None and value == self.also):
            return ""
        if self.words and value not in self.words:
            return f"must be one of {', '.join(self.words)}"
        if self.above is not None and value <= self.above:
            return f"must be above {self.above:g}"
        if self.at_least is not None and value < self.at_least:
            return f"must be at least {self.at_least:g}"
        if self.at_most is not None and value > self.at_most:
            return f"must be at most {self.at_most:,.15g}"
        if self.below is not None and value >= self.below:
            return f"must be below {self.below:g}"
        return ""


def option(default: Any = dataclasses.MISSING, **rules: Any) -> Any:
    """Return a field of settings.

    Args:
        default: Its default; without one it must be given.
        **rules: Those of `Rules`.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Heads(Settings):
        ...     heads: int = option(8, help="How many.", at_least=1)
        >>> Heads(heads=0)
        Traceback (most recent call last):
        tfdml.errors.UserError: heads=0: must be at least 1
    """
    return dataclasses.field(default=default, metadata={"rules": Rules(**rules)})


def changed(settings: type[Settings], name: str, **changes: Any) -> Any:
    """Return the field of settings with other rules or, as `default`, another default, for settings
    that inherit it."""
    fields = {field.name: field for field in dataclasses.fields(settings)}
    default = changes.pop("default", fields[name].default)
    rules = fields[name].metadata["rules"]._replace(**changes)
    return dataclasses.field(default=default, metadata={"rules": rules})


class Condition(property):
    """A property of settings that others require, with the words for it."""

    words = ""


def condition(words: str) -> Callable[[Callable[[Any], bool]], Condition]:
    """Return the decorator of a property that settings may require.

    Args:
        words: The condition, as a user would meet it.
    """

    def make(holds: Callable[[Any], bool]) -> Condition:
        made = Condition(holds)
        made.words = words
        return made

    return make


@dataclasses.dataclass(frozen=True)
class Settings:
    """Base of settings: frozen dataclasses whose fields are made by `option`.

    A field is a `bool`, `int`, `float`, `str`, a tuple of these, or of a type that parses texts,
    such as `Choice`, `Color` and `tfdml.expressions.Terms`. With `| None` it may be missing.

    Attributes:
        stored: Whether a run stores the values, so that they may hold no password.
        title: What `--help` writes above the flags.

    Raises:
        UserError: A value is of another type, or breaks its rules.
    """

    stored: ClassVar[bool] = True
    title: ClassVar[str] = ""

    def __post_init__(self):
        kinds = _types(type(self))
        for name, field in fields_of(type(self)).items():
            self._set(field, kinds[name], getattr(self, name))

    @classmethod
    def draft(cls: type[_Settings], given: Mapping[str, Any]) -> _Settings:
        """Return settings that are not yet checked together, to see which of them have an effect.

        Args:
            given: Settings by name; the others have their default, or none.
        """
        draft = object.__new__(cls)
        kinds = _types(cls)
        for name, field in fields_of(cls).items():
            value = given.get(name, field.default)
            if value is dataclasses.MISSING:
                object.__setattr__(draft, name, None)
            else:
                draft._set(field, kinds[name], value)
        return draft

    def _set(self, field: dataclasses.Field, kind: Any, value: Any) -> None:
        name = flag_name(field)
        value = read(value, kind, field.metadata["rules"], name)
        object.__setattr__(self, field.name, value)
        if self.stored and redact_text(flag_text(value)) != flag_text(value):
            raise UserError(
                "has a user or password, which a run would store: use the environment",
                **{name: flag_text(value)},
            )


def fields_of(settings: type[Settings]) -> dict[str, dataclasses.Field]:
    """Return the fields of settings, by name."""
    return {field.name: field for field in dataclasses.fields(settings)}


def flag_name(field: dataclasses.Field) -> str:
    """Return the name of the flag of a setting."""
    return field.metadata["rules"].flag or field.name


def _types(settings: type[Settings]) -> dict[str, Any]:
    return typing.get_type_hints(settings)


def read(value: Any, kind: Any, rules: Rules, argument: str) -> Any:
    """Return a value as one of a type within its rules; of texts, what they are parsed to.

    Raises:
        UserError: It is none; the message names the argument.
    """
    try:
        result = _read(value, kind, argument)
    except _WrongTypeError as error:
        raise UserError(f"must be {error}", **{argument: value}) from None
    for item in result if type(result) is tuple else [result]:
        if fault := rules.fault(item):
            raise UserError(fault, **{argument: value})
    return result


class _WrongTypeError(Exception):
    """A value is of another type; the message is what it must be."""


def _read(value: Any, kind: Any, argument: str) -> Any:
    if isinstance(kind, types.UnionType):
        (required,) = (part for part in typing.get_args(kind) if part is not types.NoneType)
        missing = value is None or (isinstance(value, str) and not value.strip())
        return None if missing else _read(value, required, argument)
    if typing.get_origin(kind) is tuple:
        return _read_tuple(value, typing.get_args(kind)[0], argument)
    if kind in _CHECKS:
        return _CHECKS[kind](value)
    if isinstance(value, kind):
        return value
    if not isinstance(value, str):
        raise _WrongTypeError("text")
    return kind.parse(_text(value), argument)


def _read_tuple(value: Any, kind: Any, argument: str) -> tuple[Any, ...]:
    if not isinstance(value, str):
        if not isinstance(value, Iterable):
            raise _WrongTypeError("a list")
        return tuple(_read(item, kind, argument) for item in value)
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if kind is not int:
        return tuple(parts)
    try:
        return tuple(_integer(int(part)) for part in parts)
    except ValueError:
        raise _WrongTypeError("integers with commas, e.g. 1,2,4") from None


def _boolean(value: Any) -> bool:
    # NumPy's own stand in for Python's.
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise _WrongTypeError("true or false")


def _integer(value: Any) -> int:
    whole = isinstance(value, numbers.Integral) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole:
        raise _WrongTypeError("an integer")
    if abs(value) > LARGEST_INTEGER:
        raise _WrongTypeError(f"an integer of at most {LARGEST_INTEGER:,}")
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _WrongTypeError("a number")
    real: Any = value  # mypy does not compare numbers.Real
    if not abs(real) <= _LARGEST_NUMBER:  # NaN is not, either
        raise _WrongTypeError("a finite number")
    return float(real)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _WrongTypeError("text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _WrongTypeError("UTF-8 text") from None
    return value


_CHECKS: dict[Any, Callable[[Any], Any]] = {
    bool: _boolean,
    int: _integer,
    float: _number,
    str: _text,
}


def flag_text(value: Any) -> str:
    """Return a setting as it stands in a flag file, from which it reads back.

    Example:
        >>> flag_text(True), flag_text((20, 40)), flag_text(None)
        ('true', '20,40', '')
    """
    if value is None or value is dataclasses.MISSING:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(flag_text, value)) if type(value) is tuple else str(value)


def values_of(settings: Settings) -> dict[str, Any]:
    """Return the values of settings, by name."""
    return {name: getattr(settings, name) for name in fields_of(type(settings))}


def flag_file(settings: Settings) -> str:
    """Return settings as a flag file, whose texts `from_flag_texts` reads back."""
    lines = []
    for name, field in fields_of(type(settings)).items():
        lines.append(f"--{flag_name(field)}={flag_text(getattr(settings, name))}\n")
    return "".join(lines)


def from_flag_texts(kind: type[Settings], texts: Mapping[str, str]) -> dict[str, Any]:
    """Return settings by name from the texts of their flags.

    Args:
        kind: The settings.
        texts: By flag.

    Raises:
        UserError: There is no such setting, or a text is not of its type.
    """
    names = {flag_name(field): name for name, field in fields_of(kind).items()}
    values, kinds = {}, _types(kind)
    for flag, text in texts.items():
        if flag not in names:
            raise UserError(f"flag file: there is no setting --{flag}")
        values[names[flag]] = _plain(text, kinds[names[flag]], flag)
    return values


def _plain(text: str, kind: Any, flag: str) -> Any:
    """Return the number or boolean of a text; other types read texts themselves."""
    if kind not in (bool, int, float):
        return text
    wrong = f"flag file: not of type {kind.__name__}"
    named: dict[str, Any] = {flag: text}
    with user_errors((KeyError, ValueError), wrong, **named):
        return _BOOLEANS[text] if kind is bool else kind(text)


class Color(tuple[int, int, int]):
    """Red, green and blue of 0 to 255.

    Example:
        >>> Color.parse("white", "pad_color"), str(Color((255, 128, 0)))
        ((255, 255, 255), '255,128,0')
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str, argument: str) -> Color:
        """Parse black, white, or three numbers.

        Raises:
            UserError: It is none of these.
        """
        wrong = "write black, white, or red, green and blue of 0 to 255, e.g. 255,255,255"
        named: dict[str, Any] = {argument: text}
        with user_errors(ValueError, wrong, **named):
            color = cls(_COLORS.get(text.strip().lower()) or map(int, text.split(",")))
        if len(color) != 3 or not all(0 <= part <= 255 for part in color):
            raise UserError(wrong, **named)
        return color

    def __str__(self) -> str:
        names = {color: name for name, color in _COLORS.items()}
        return names.get(self) or ",".join(map(str, self))


@dataclasses.dataclass(frozen=True)
class Choice(Settings):
    """Base of families of named settings: a class that inherits it is a family, and those that
    inherit the family and are decorated by `choice` are what it chooses from.

    Attributes:
        name: The name in texts.
        meaning: What it means, in `--help`.
        choices: Those of the family, by name.

    Example:
        >>> class Greeting(Choice):
        ...     "A family."
        >>> @choice("hello", "A long one.")
        ... @dataclasses.dataclass(frozen=True)
        ... class Hello(Greeting):
        ...     times: int = option(1, help="How often.", at_least=1)
        >>> Greeting.parse("hello(times=2)", "greeting"), str(Hello(times=3)), str(Hello())
        (Hello(times=2), 'hello(times=3)', 'hello')
    """

    name: ClassVar[str] = ""
    meaning: ClassVar[str] = ""
    choices: ClassVar[dict[str, type[Choice]]]

    def __init_subclass__(cls):
        super().__init_subclass__()
        if Choice in cls.__bases__:
            cls.choices = {}

    @classmethod
    def parse(cls, text: str, argument: str) -> Choice:
        """Return the choice of a text, such as `neighbors(every=2)`.

        Raises:
            UserError: The text cannot be read, or there is no such choice or option.
        """
        return cls.of(Call.parse(text, argument), text, argument)

    @classmethod
    def of(cls, call: Call, text: str, argument: str) -> Choice:
        """Return the choice of a name with options; `text` and `argument` are for messages."""
        named: dict[str, Any] = {argument: text}
        if call.name not in cls.choices:
            hint = choice_hint(call.name, cls.choices)
            raise UserError(f"unknown choice {call.name!r}; {hint}", **named)
        chosen = cls.choices[call.name]
        for name in call.arguments:
            if name not in fields_of(chosen):
                hint = choice_hint(name, fields_of(chosen)) if fields_of(chosen) else "it has none"
                raise UserError(f"unknown option {name!r} of {call.name}; {hint}", **named)
        for name, field in fields_of(chosen).items():
            if field.default is dataclasses.MISSING and name not in call.arguments:
                raise UserError(f"{call.name} needs {name}", **named)
        try:
            return chosen(**call.arguments)
        except UserError as error:
            raise UserError(str(error), **named) from None

    def changed(self) -> Arguments:
        """Return the options that are not their defaults."""
        options = Arguments()
        for name, field in fields_of(type(self)).items():
            if getattr(self, name) != field.default:
                options[name] = getattr(self, name)
        return options

    def __str__(self) -> str:
        return str(Call(self.name, self.changed()))

    @classmethod
    def usage(cls) -> str:
        """Return its name with its options and their defaults, and what they mean."""
        defaults, meanings = Arguments(), ""
        for name, field in fields_of(cls).items():
            if field.default is not dataclasses.MISSING:
                defaults[name] = field.default
            meanings += f"\n    {name}: {field.metadata['rules'].meaning()}"
        return f"{Call(cls.name, defaults)}: {cls.meaning}{meanings}"


def choice(name: str, meaning: str) -> Callable[[type[_Chosen]], type[_Chosen]]:
    """Return the decorator that adds settings to the choices of their family.

    Args:
        name: Their name in texts.
        meaning: What they mean, in `--help`.

    Raises:
        UserError: The name belongs to another class.
    """

    def register(cls: type[_Chosen]) -> type[_Chosen]:
        other = cls.choices.get(name, cls)
        # A module that is loaded again, or a cell that is run again, replaces what it defined.
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise UserError(f"the choice {name!r} is {other.__module__}.{other.__qualname__}")
        cls.name, cls.meaning = name, meaning
        cls.choices[name] = cls
        return cls

    return register


def holds(requires: str, settings: Settings) -> bool:
    """Whether settings have what one of them requires.

    Args:
        requires: Parts that are joined by `and`, each of alternatives that are joined by `or`:
            `folds`, where that is set; `no folds`; `schedule=step`, or `=step|cosine`; the name of
            a `Condition`; or `sampling.by_class`, an attribute of a choice.
        settings: The settings.

    Example:
        >>> from tfdml.training.settings import OptimizationSettings
        >>> holds("schedule=step and drop_epochs", OptimizationSettings(drop_epochs="8"))
        True
    """
    return all(_any_holds(part, settings) for part in requires.split(" and ") if part)


def _any_holds(part: str, settings: Settings) -> bool:
    return any(_one_holds(alternative, settings) for alternative in part.split(" or "))


def _one_holds(alternative: str, settings: Settings) -> bool:
    name, equals, words = alternative.removeprefix("no ").partition("=")
    value: Any = settings
    for part in name.split("."):
        value = getattr(value, part)
    if equals:
        word = value.name if isinstance(value, Choice) else flag_text(value)
        return word in words.split("|")
    return bool(value) != alternative.startswith("no ")


def in_words(requires: str, settings: type[Settings]) -> str:
    """Return what a setting requires, as flags."""
    parts = []
    for part in requires.split(" and "):
        parts.append(" or ".join(_one_in_words(one, settings) for one in part.split(" or ")))
    return " and ".join(parts)


def _one_in_words(alternative: str, settings: type[Settings]) -> str:
    negation = "no " if alternative.startswith("no ") else ""
    name, equals, words = alternative.removeprefix("no ").partition("=")
    field, dot, attribute = name.partition(".")
    if isinstance(getattr(settings, name, None), Condition):
        return getattr(settings, name).words
    if dot:
        choices = _types(settings)[field].choices
        words = "|".join(key for key in choices if getattr(choices[key], attribute))
        equals = "="
    return f"{negation}--{field}{equals}{words.replace('|', ' or ')}"


def unmet(settings: Settings, names: Iterable[str]) -> Iterator[tuple[str, UserError]]:
    """Yield the name of each setting that has no effect next to the others, and what to say.

    Args:
        settings: All settings, or a `Settings.draft` of them.
        names: The settings to look at.
    """
    for name in names:
        requires = fields_of(type(settings))[name].metadata["rules"].requires
        if not holds(requires, settings):
            needed = in_words(requires, type(settings))
            message = f"has no effect: it needs {needed}; change that, or leave it out"
            yield name, UserError(message, **{name: flag_text(getattr(settings, name))})


# What makes a flag of a type; the others are texts.
_MAKERS: dict[Any, Callable[..., Any]] = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    float | None: flags.DEFINE_float,
    tuple[str, ...]: flags.DEFINE_list,
}


def define_flags(settings: type[Settings], values: flags.FlagValues) -> None:
    """Define a flag for each setting of a class, under the title of the class that declares it."""
    kinds = _types(settings)
    for name, field in fields_of(settings).items():
        rules = field.metadata["rules"]
        place: dict[str, Any] = {"flag_values": values, "module_name": _title(settings, name)}
        if rules.paths:
            flags.DEFINE_flag(_Paths(flag_name(field), rules.help), **place)
            continue
        make = _MAKERS.get(kinds[name], flags.DEFINE_string)
        default: Any = field.default
        if kinds[name] not in _MAKERS:
            default = flag_text(default)
        elif isinstance(default, tuple):
            default = list(default)
        make(flag_name(field), default, _help(kinds[name], rules), **place)


def _title(settings: type[Settings], name: str) -> str:
    classes: Any = settings.__mro__
    declaring = [cls for cls in classes if name in vars(cls).get("__annotations__", {})]
    return declaring[-1].title


def _help(kind: Any, rules: Rules) -> str:
    for part in (kind, *typing.get_args(kind)):
        if isinstance(part, type) and issubclass(part, Choice):
            return "\n".join([rules.help, *(each.usage() for each in part.choices.values())])
    return rules.meaning()


class _Paths(flags.MultiFlag):
    """Paths and patterns: the flag is repeated, or has commas; the name of an existing file may
    have commas, too."""

    def __init__(self, name: str, meaning: str):
        parser, serializer = flags.ArgumentParser[str](), flags.ArgumentSerializer[str]()
        super().__init__(parser, serializer, name, [], meaning)

    def _parse(self, arguments: Any) -> list[str]:
        paths: list[str] = []
        for text in super()._parse(arguments):
            parts = [text] if os.path.exists(text) else text.split(",")
            paths += filter(None, parts)
        return paths
