"""Parses command lines with the flags of the commands that they call; run in a process of its own.

    python -m tests.docs.commands < lines.json

In: [[command, [argument, ...], whether these are all its arguments], ...]. Out: {"faults": [[row, what is wrong], ...],
"flags": [every flag of every command]}. `--objectives` is built as well. Every flag of a whole command line must have
an effect.
"""

import importlib
import json
import sys

from absl import flags

COMMANDS = ("embed", "evaluate", "export", "index", "prepare", "train")


def typed(words):
    """The values of flags, as they are written, by name; of several the last."""
    pairs = (word.lstrip("-").partition("=") for word in words if word.startswith("-"))
    return {name: value for name, _, value in pairs}


def _load(command):
    """Define the flags of one command and of no other."""
    for module, members in list(flags.FLAGS.flags_by_module_dict().items()):
        if module.startswith("tfdml.cli"):
            flags.FLAGS.remove_flag_values([flag.name for flag in members])
    for module in [name for name in sys.modules if name.startswith("tfdml.cli")]:
        del sys.modules[module]
    importlib.import_module(f"tfdml.cli.{command}")
    if command == "evaluate":
        # `--compare A B` is two words there.
        return sys.modules["tfdml.cli.evaluate"].joined_runs
    return list


def main():
    """Answer."""
    from tfdml.cli import flag_files
    from tfdml.training.terms import build_objectives

    lines, faults, known = json.load(sys.stdin), [], set()
    for command in COMMANDS:
        prepared = _load(command)
        check_effects = sys.modules["tfdml.cli.main"].check_effects
        known.update(flags.FLAGS)
        for row, (name, arguments, whole) in enumerate(lines):
            if name != command:
                continue
            flags.FLAGS.unparse_flags()
            for flag in flags.FLAGS:
                flags.FLAGS[flag].unparse()
            try:
                words = prepared(arguments)
                rest = flags.FLAGS([name, *flag_files.read(words)])[1:]
                if whole:
                    check_effects(sys.modules[f"tfdml.cli.{command}"].EFFECTS, words, name)
                if rest:
                    faults.append([row, f"{rest[0]} is no flag"])
                if command == "train" and flags.FLAGS.objectives:
                    build_objectives(flags.FLAGS.objectives, num_classes=4)
            except Exception as error:
                faults.append([row, str(error)])
    print("ANSWER" + json.dumps({"faults": faults, "flags": sorted(known)}))


if __name__ == "__main__":
    main()
