"""Parses command lines with the flags of the commands that they call."""

import sys
import types

from tests.cli.commands import NAMES, load
from tests.docs.examples import PAGES, blocks
from tfdml.io import files
from tfdml.objectives.terms import build_objectives


def typed(words):
    """The values of flags, as they are written, by name; of several the last."""
    pairs = (word.lstrip("-").partition("=") for word in words if word.startswith("-"))
    return {name: value for name, _, value in pairs}


def parse(lines, monkeypatch):
    """Parse command lines; `--objectives` is built as well.

    Args:
        lines: (command, arguments, whether these are all its arguments). Then every flag must have an effect.
        monkeypatch: Has nothing downloaded.

    Returns:
        {"faults": [(row, what is wrong), ...], "flags": every flag of every command}.
    """
    monkeypatch.setattr(files, "in_store", lambda path: False)
    if "my_own" not in sys.modules:
        own = types.ModuleType("my_own")
        page = next(page for page in PAGES if page.name == "adding_your_own.md")
        exec(blocks(page)[0].code, vars(own))
        sys.modules["my_own"] = own
    faults = []
    for row, (name, arguments, whole) in enumerate(lines):
        command = load(name)
        try:
            if whole:
                command.parse(arguments)
            else:
                command.flags.parse(arguments)
            if name == "train" and command.flags.objectives:
                build_objectives(command.flags.objectives, num_classes=4)
        except Exception as error:
            faults.append((row, str(error)))
    return {"faults": faults, "flags": sorted({flag for name in NAMES for flag in load(name).flags})}
