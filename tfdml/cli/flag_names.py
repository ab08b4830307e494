"""Messages of the library for the command line: arguments, which they name as Python has them, become flags."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping

from absl import flags

# By argument, in every command.
_FLAG_OF = {"options": "dataset_options"}
_SWITCHES = {"True": "", "False": "no"}
_ARGUMENT = re.compile(r"`([a-z]\w*)(?:=([^`]*))?`")


def as_flags(message: str, flag_of: Mapping[str, str] | None = None) -> str:
    """A message with the arguments that it names in backticks written as flags.

    `batch_size` becomes --batch_size, `bad_images='skip'` becomes --bad_images=skip, and `allow_extra=True`
    --allow_extra. What is no flag of this command stays as it is.

    Args:
        message: The message.
        flag_of: The flags whose names are not those of the arguments that they set, by argument.

    Example:
        >>> as_flags("`batch_size=0` is too small")
        '--batch_size=0 is too small'
    """
    known = own_flags()

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


def own_flags() -> dict[str, flags.Flag]:
    """The flags that tfdml defines for the command at work, by name."""
    # Under `python -m tfdml.cli.train` the command's own module is called __main__.
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    ours = ("tfdml", "__main__") if spec is not None and spec.name.startswith("tfdml.") else ("tfdml",)
    modules = flags.FLAGS.flags_by_module_dict().items()
    return {flag.name: flag for module, members in modules if module.startswith(ours) for flag in members}


class Formatter(logging.Formatter):
    """Log lines in which arguments are written as flags."""

    def __init__(self, flag_of: Mapping[str, str] | None):
        super().__init__()
        self._flag_of = flag_of

    def format(self, record: logging.LogRecord) -> str:
        """A line."""
        return as_flags(super().format(record), self._flag_of)
