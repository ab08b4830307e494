"""Parses command lines with the flags of the commands that they call; run in a process of its own.

    python -m tests.docs.commands < lines.json

In: [[command, [argument, ...], whether these are all its arguments], ...]. Out: {"faults": [[row, what is wrong], ...],
"flags": [every flag of every command]}. `--objectives` is built as well. Every flag of a whole command line must have
an effect.
"""

import json
import sys


def typed(words):
    """The values of flags, as they are written, by name; of several the last."""
    pairs = (word.lstrip("-").partition("=") for word in words if word.startswith("-"))
    return {name: value for name, _, value in pairs}


def main():
    """Answer."""
    from tests.cli.commands import NAMES, load
    from tfdml.io import copies
    from tfdml.training.terms import build_objectives

    copies.in_store = lambda path: False  # nothing is downloaded

    lines, faults = json.load(sys.stdin), []
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
            faults.append([row, str(error)])
    known = sorted({flag for name in NAMES for flag in load(name).flags})
    print("ANSWER" + json.dumps({"faults": faults, "flags": known}))


if __name__ == "__main__":
    main()
