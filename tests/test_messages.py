"""Below the command line and the settings of a training run nothing knows flags: messages name arguments."""

import ast
import dataclasses
import pathlib
import re

import tfdml
from tfdml.training import Experiment

ROOT = pathlib.Path(tfdml.__file__).parent
KNOW_FLAGS = ("cli", "training", "effects.py", "cluster/training.py", "cluster/sweep.py")
# Strings that name a flag all the same, and why.
ALLOWED = {
    "errors.py": ["--batch_size=0"],  # what becomes of an argument in a message
    "report/plots.py": [": var(--"],  # a variable of a style sheet
}


def defined_flags():
    """The flags of all commands."""
    calls = re.compile(r"(?:FLAGS|values)\.define\(\s*\"(\w+)\"")
    own = {name for path in (ROOT / "cli").glob("*.py") for name in calls.findall(path.read_text())}
    return own | {field.name for field in dataclasses.fields(Experiment)}


def named_flags(source, flags):
    """The flags that the strings of a module name, docstrings and f-strings included."""
    found = []
    for node in ast.walk(ast.parse(source)):
        # An f-string that puts a name behind two dashes.
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "" for part in node.values]
            found += [part for part in parts[:-1] if part.endswith("--")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += [
                match[0]
                for match in re.finditer(r"(?<![\w-])--(?:no)?(\w+)(=[^\s`]*)?", node.value)
                if {match[1], f"no{match[1]}"} & flags
            ]
    return found


def test_the_search_finds_flags():
    flags = defined_flags()
    assert {"batch_size", "out", "model", "gallery"} <= flags
    source = """'''See --batch_size.'''; x = f"--{name}={value}"; y = f"use --noflip or --bad_images={z}"; w = "--ink"
"""
    assert sorted(named_flags(source, flags)) == ["--", "--bad_images=", "--batch_size", "--noflip"]


def test_messages_below_training_name_arguments():
    flags = defined_flags()
    named = {}
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        found = [] if name.startswith(KNOW_FLAGS) else named_flags(path.read_text(), flags)
        if found:
            named[name] = found
    assert named == ALLOWED
