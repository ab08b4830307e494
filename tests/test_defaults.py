"""The defaults of public arguments are those of their documentation. They, and the numbers of
constants, are those that are recorded: `python -m tests.test_defaults` writes
`tests/defaults.json`."""

import ast
import inspect
import json
import pathlib
import re

import pytest

import tfdml

PATH = pathlib.Path(__file__).with_name("defaults.json")
PACKAGE = pathlib.Path(tfdml.__file__).parent
# How many new arguments and constants may wait for the next record.
MOST_NEW = 60
_ENTRY = re.compile(r"^ {4}(\*{0,2}\w+): (.*?)(?=^ {4}\S|^\S|\Z)", re.MULTILINE | re.DOTALL)
_LITERAL = r"(?<![\w-])`?(\"\w+\"|-?\d+(?:\.\d+)?(?:e-?\d+)?|True|False)`?"
# "by default 512", "default 0.1", "0 by default", `"mean"` (default), "32 (default)".
_STATED = (
    re.compile(rf"(?:by default|[(,;] default) {_LITERAL}(?=[\s.,;:)]|$)"),
    re.compile(rf"{_LITERAL}(?:,? by default| \((?:[^()]*, )?default[):])"),
)


def _defaults_of(arguments):
    """The default of each argument that has one, as it is written."""
    positional = [*arguments.posonlyargs, *arguments.args]
    late = positional[len(positional) - len(arguments.defaults) :]
    pairs = [*zip(late, arguments.defaults, strict=True)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {argument.arg: default for argument, default in pairs if default is not None}


def _field_default(node):
    """The default of a field of a dataclass; of a setting the first argument of `option`, or of
    what declares several alike."""
    value = node.value
    if isinstance(value, ast.Call):
        return value.args[0] if value.args else None
    return value


def _documented(node, owner=""):
    """Each public function and class with its docstring and its defaults."""
    for child in node.body:
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            fields = [field for field in child.body if isinstance(field, ast.AnnAssign)]
            own = {ast.unparse(field.target): _field_default(field) for field in fields}
            for method in child.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    own = _defaults_of(method.args)
            given = {name: default for name, default in own.items() if default is not None}
            yield f"{owner}{child.name}", ast.get_docstring(child) or "", given
            yield from _documented(child, f"{child.name}.")
        elif isinstance(child, ast.FunctionDef) and not child.name.startswith("_"):
            yield f"{owner}{child.name}", ast.get_docstring(child) or "", _defaults_of(child.args)


def _public():
    for file in sorted(PACKAGE.rglob("*.py")):
        yield from _documented(ast.parse(file.read_text()))


def _constants():
    """The numbers in each constant of a module, such as a table of channels."""
    for file in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                parts = [each for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
                numbers = [each.value for each in parts if isinstance(each.value, int | float)]
                yield f"{module}.{ast.unparse(target)}", " ".join(map(str, numbers))


def recorded():
    """The defaults as they are now, by argument, and the numbers of constants; several functions
    may have one name."""
    defaults = {name: {numbers} for name, numbers in _constants() if numbers}
    for name, _, given in _public():
        for argument, default in given.items():
            defaults.setdefault(f"{name}.{argument}", set()).add(ast.unparse(default))
    return {name: " or ".join(sorted(values)) for name, values in sorted(defaults.items())}


def stated(docstring):
    """The default that a docstring states of an argument, by argument."""
    arguments = inspect.cleandoc(docstring).partition("\nArgs:\n")[2]
    for name, text in _ENTRY.findall(re.split(r"^\w+:\n", arguments, flags=re.MULTILINE)[0]):
        found = [pattern.search(" ".join(text.split())) for pattern in _STATED]
        if any(found):
            yield name, next(match for match in found if match)[1]


def test_stated_defaults_are_those_of_the_signature():
    checked = 0
    for name, docstring, given in _public():
        for argument, text in stated(docstring):
            default = given.get(argument)
            # None stands for what the function finds out.
            if isinstance(default, ast.Constant) and default.value is not None:
                checked += 1
                assert default.value == ast.literal_eval(text), f"{name}: {argument}"
    assert checked >= 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("size: How many, by default 512. 0: all.", "512"),
        ("size: 32 on Cars-196 (default), and 64.", None),
        ('mode: `"sum"` (the sum, default), `"mean"`.', '"sum"'),
        ("rate: 0.5 by default.", "0.5"),
        ("name: By default that of the class.", None),
    ],
)
def test_how_a_default_is_stated(text, expected):
    found = dict(stated(f"Do.\n\nArgs:\n    {text}\n\nRaises:\n    UserError: By default 3."))
    assert found.get(text.partition(":")[0]) == expected


def test_no_default_and_no_constant_changes_by_chance():
    before = json.loads(PATH.read_text())
    now = recorded()
    changed = {name: now[name] for name in before if name in now and now[name] != before[name]}
    assert not changed, "if it is meant, run python -m tests.test_defaults"
    assert len(now.keys() - before.keys()) <= MOST_NEW, "run python -m tests.test_defaults"


if __name__ == "__main__":
    PATH.write_text(json.dumps(recorded(), indent=0, ensure_ascii=False) + "\n")
