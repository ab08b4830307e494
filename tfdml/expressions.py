"""The readable syntax of objectives, backbones, policies and options: names with arguments, and
weighted sums of them.

    am_softmax(scale=20, margin=0.1) + 0.4 * jrs(levels=[pooled, embedding])
    mobilenetv2(alpha=0.35)

Values are numbers, `true`, `false`, `none`, quoted or bare words, lists, and calls such as
`gaussian_mixture(multipliers=[0.5, 1, 2])`. `Call`, `Arguments` and `Terms` are what texts are
parsed to, and their `str` is a text that parses to the same.
"""

from __future__ import annotations

import ast
import dataclasses
import keyword
import math
import re
from collections.abc import Iterator
from typing import Any

from tfdml.errors import UserError

#: Begins the name of a preset of KerasHub, which may be the path of a folder.
HUB = "hub:"
# Words that Python keeps for itself, such as `class`, outside of quotes.
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_KEYWORDS = "|".join(set(keyword.kwlist) - {"True", "False", "None"})
_RESERVED = re.compile(rf"({_QUOTED})|\b({_KEYWORDS})\b")
# The longest flag files of ours have objectives of half this length.
_LONGEST = 200
_WORDS = {"true": True, "false": False, "none": None}
_PLAIN = (str, bool, int, float, type(None))
# What is not finite has no digits of its own.
_INFINITY = "1e999"
_EXAMPLE = "write e.g. 'name(key=1, other=[a, b]) + 0.5 * name'"


class Arguments(dict[str, Any]):
    """Arguments by name, as text `size=32, by_class=false`; they stay as they are.

    Example:
        >>> Arguments.parse("size=32, by_class=false", "dataset_options")
        {'size': 32, 'by_class': False}
        >>> str(Arguments(size=32, by_class=False))
        'size=32, by_class=false'
    """

    @classmethod
    def parse(cls, text: str, argument: str) -> Arguments:
        """Parse `key=value, ...`; nothing gives no arguments.

        Args:
            text: The text.
            argument: The argument that it is, for messages.

        Raises:
            UserError: The text is not of this form.
        """
        if not text.strip():
            return cls()
        return _call(_expression(f"options({text})", text, argument), text, argument).arguments

    def __hash__(self) -> int:  # type: ignore[override]  # defaults of settings have one
        return hash(str(self))

    def __str__(self) -> str:
        return ", ".join(f"{name}={value_text(value)}" for name, value in self.items())


@dataclasses.dataclass(frozen=True)
class Call:
    """A name with keyword arguments.

    Example:
        >>> Call.parse("mobilenetv2(alpha=0.35)", "backbone")
        Call(name='mobilenetv2', arguments={'alpha': 0.35})
        >>> str(Call("mobilenetv2", Arguments(alpha=0.35)))
        'mobilenetv2(alpha=0.35)'
    """

    name: str
    arguments: Arguments = dataclasses.field(default_factory=Arguments)

    @classmethod
    def parse(cls, text: str, argument: str) -> Call:
        """Parse `name` or `name(key=value, ...)`; a name that begins with `HUB` is all of the text.

        Args:
            text: The text.
            argument: The argument that it is, for messages.

        Raises:
            UserError: The text is not of this form.
        """
        if text.startswith(HUB):
            return cls(text)  # a folder may have any name
        return _call(_expression(text, text, argument), text, argument)

    def __str__(self) -> str:
        return f"{self.name}({self.arguments})" if self.arguments else self.name


class Terms(tuple[tuple[float, Call], ...]):
    """A sum of calls: (weight, call) in the order written.

    Example:
        >>> terms = Terms.parse("am_softmax + 0.4 * jrs", "objectives")
        >>> [(weight, call.name) for weight, call in terms], str(terms)
        ([(1.0, 'am_softmax'), (0.4, 'jrs')], 'am_softmax + 0.4 * jrs')
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str, argument: str) -> Terms:
        """Parse a sum of calls, each with an optional factor: `a + 0.5 * b(x=1)`.

        Args:
            text: The text.
            argument: The argument that it is, for messages.

        Raises:
            UserError: The text is not of this form.
        """
        return cls(_terms(_expression(text, text, argument), text, argument))

    def __str__(self) -> str:
        text = ""
        for weight, call in self:
            factor = weight
            if text:
                text += " - " if weight < 0 else " + "
                factor = abs(weight)
            if factor != 1:
                text += f"{value_text(factor)} * "
            text += str(call)
        return text


def value_text(value: Any) -> str:
    """Return the text of a value, from which it is parsed again.

    Example:
        >>> value_text([1e-05, True, None, "pooled", "a b"])
        "[1e-05, true, none, pooled, 'a b']"
    """
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, str):
        bare = value.isascii() and value.isidentifier() and value.lower() not in _WORDS
        return value if bare else repr(value)
    if isinstance(value, float):
        return _number_text(value)
    if isinstance(value, Call):
        return f"{value.name}({value.arguments})"  # a bare name would be a word
    return str(value)


def _number_text(value: float) -> str:
    if math.isinf(value):
        return _INFINITY if value > 0 else f"-{_INFINITY}"
    return repr(value).removesuffix(".0")


def shortened(text: str) -> str:
    """Return a text for a message, which is to stay a line that can be read: cut where it is very
    long.

    Example:
        >>> len(shortened("am_softmax + " * 1000))
        200
    """
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."


def _expression(source: str, text: str, argument: str) -> ast.expr:
    try:
        line = " ".join(source.splitlines()).strip()
        quoted = _RESERVED.sub(lambda match: match[1] or repr(match[2]), line)
        return ast.parse(quoted, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _error(text, argument, "it cannot be read") from error


def _terms(node: ast.expr, text: str, argument: str) -> Iterator[tuple[float, Call]]:
    nodes = [(node, 1.0)]
    while nodes:  # from the left; a long sum is deeply nested
        node, sign = nodes.pop()
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            nodes.append((node.right, sign if isinstance(node.op, ast.Add) else -sign))
            nodes.append((node.left, sign))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            weight, call = _product(node, text, argument)
            yield sign * weight, call
        else:
            yield sign, _call(node, text, argument)


def _product(node: ast.BinOp, text: str, argument: str) -> tuple[float, Call]:
    factor, call = node.left, node.right
    if not isinstance(call, ast.Call | ast.Name | ast.Attribute):
        factor, call = call, factor
    weight = _value(factor, text, argument)
    if not isinstance(weight, (int, float)) or isinstance(weight, bool):
        raise _error(text, argument, f"the factor {ast.unparse(factor)!r} is not a number")
    return weight, _call(call, text, argument)


def _call(node: ast.expr, text: str, argument: str) -> Call:
    if isinstance(node, ast.Name | ast.Attribute):
        return Call(ast.unparse(node))
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)):
        raise _error(text, argument, f"{ast.unparse(node)!r} is not a name with arguments")
    name = ast.unparse(node.func)
    if node.args or any(part.arg is None for part in node.keywords):
        raise _error(text, argument, f"arguments of {name} must be written name=value")
    arguments = Arguments()
    for part in node.keywords:
        if str(part.arg) in arguments:
            raise _error(text, argument, f"{part.arg} of {name} is given twice")
        arguments[str(part.arg)] = _value(part.value, text, argument)
    return Call(name, arguments)


def _value(node: ast.expr, text: str, argument: str) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, _PLAIN):
        return node.value
    if isinstance(node, ast.Name):
        return _WORDS.get(node.id.lower(), node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = getattr(node.operand, "value", None)
        if isinstance(value, (int, float)):
            return -value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item, text, argument) for item in node.elts]
    if isinstance(node, ast.Call):
        return _call(node, text, argument)
    raise _error(text, argument, f"{ast.unparse(node)!r} is not a value")


def _error(text: str, argument: str, fault: str) -> UserError:
    return UserError(f"{fault}; {_EXAMPLE}", **{argument: shortened(text)})
