"""The readable syntax of objectives, backbones and policies: names with arguments, and weighted
sums of them.

    am_softmax(scale=20, margin=0.1) + 0.4 * jrs(levels=[pooled, embedding])
    mobilenetv2(alpha=0.35)

Values are numbers, `true`, `false`, `none`, quoted or bare words, lists, and calls such as
`gaussian_mixture(multipliers=[0.5, 1, 2])`.
"""

import ast
import dataclasses
import keyword
import re
from typing import Any

from tfdml.errors import UserError

# Words that Python keeps for itself, such as `class`, outside of quotes.
_RESERVED = re.compile(
    rf"""('[^']*'|"[^"]*")|\b({"|".join(set(keyword.kwlist) - {"True", "False", "None"})})\b"""
)
# The longest flag files of ours have objectives of half this length.
_LONGEST = 200
_WORDS = {"true": True, "false": False, "none": None}


@dataclasses.dataclass(frozen=True)
class Call:
    """A name with keyword arguments."""

    name: str
    arguments: dict[str, Any]


def parse_call(text: str, flag: str) -> Call:
    """Parse `name` or `name(key=value, ...)`.

    Raises:
        UserError: The text is not of this form; the message names `flag`.

    Example:
        >>> parse_call("mobilenetv2(alpha=0.35)", "--backbone")
        Call(name='mobilenetv2', arguments={'alpha': 0.35})
    """
    return _call(_expression(text, flag), text, flag)


def parse_arguments(text: str, flag: str) -> dict[str, Any]:
    """Parse `key=value, ...`; nothing gives no arguments.

    Raises:
        UserError: The text is not of this form; the message names `flag`.

    Example:
        >>> parse_arguments("size=32, by_class=false", "--dataset_options")
        {'size': 32, 'by_class': False}
    """
    return (
        _call(_expression(text, flag, f"options({text})"), text, flag).arguments
        if text.strip()
        else {}
    )


def parse_sum(text: str, flag: str) -> list[tuple[float, Call]]:
    """Parse a sum of calls, each with an optional factor: `a + 0.5 * b(x=1)`.

    Returns:
        (weight, call) in the order written.

    Raises:
        UserError: The text is not of this form; the message names `flag`.
    """
    terms: list[tuple[float, Call]] = []
    nodes = [(_expression(text, flag), 1.0)]
    while nodes:
        node, sign = nodes.pop()
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            nodes += [
                (node.right, sign if isinstance(node.op, ast.Add) else -sign),
                (node.left, sign),
            ]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            factor, call = node.left, node.right
            if not isinstance(call, ast.Call | ast.Name | ast.Attribute):
                factor, call = call, factor
            weight = _value(factor, text, flag)
            if not isinstance(weight, (int, float)) or isinstance(weight, bool):
                raise _error(text, flag, f"the factor {ast.unparse(factor)!r} is not a number")
            terms.append((sign * weight, _call(call, text, flag)))
        else:
            terms.append((sign, _call(node, text, flag)))
    return terms


def shortened(text: str) -> str:
    """Return a text for a message, which is to stay a line that can be read: cut where it is very
    long.

    Example:
        >>> len(shortened("am_softmax + " * 1000))
        200
    """
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."


def _expression(text: str, flag: str, source: str = "") -> ast.expr:
    try:
        quoted = _RESERVED.sub(
            lambda match: match[1] or repr(match[2]), " ".join((source or text).split())
        )
        return ast.parse(quoted, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _error(text, flag, "it cannot be read") from error


def _call(node: ast.expr, text: str, flag: str) -> Call:
    if isinstance(node, ast.Name | ast.Attribute):
        return Call(ast.unparse(node), {})
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)):
        raise _error(text, flag, f"{ast.unparse(node)!r} is not a name with arguments")
    name = ast.unparse(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise _error(text, flag, f"arguments of {name} must be written name=value")
    arguments: dict[str, Any] = {}
    for argument in node.keywords:
        if str(argument.arg) in arguments:
            raise _error(text, flag, f"{argument.arg} of {name} is given twice")
        arguments[str(argument.arg)] = _value(argument.value, text, flag)
    return Call(name, arguments)


def _value(node: ast.expr, text: str, flag: str) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return _WORDS.get(node.id.lower(), node.id)
    if (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.Constant)
    ):
        value = node.operand.value
        if isinstance(value, (int, float)):
            return -value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item, text, flag) for item in node.elts]
    if isinstance(node, ast.Call):
        return _call(node, text, flag)
    raise _error(text, flag, f"{ast.unparse(node)!r} is not a value")


def _error(text: str, flag: str, what: str) -> UserError:
    argument = f"{flag}={shortened(text)!r}"
    argument = argument if flag.startswith("--") else f"`{argument}`"
    return UserError(f"{argument}: {what}; write e.g. 'name(key=1, other=[a, b]) + 0.5 * name'")
