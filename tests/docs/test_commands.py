"""Every command line of README, docs and the commands' own help has flags that exist, with values
that they take."""

import ast
import re
import shlex
import sys
import types

from tests.cli.commands import load
from tests.docs.examples import PAGES, ROOT, blocks
from tfdml.cli import STAGES
from tfdml.io import files
from tfdml.objectives.terms import build_objectives
from tfdml.registry import VARIABLE

OF_ALL = {"flagfile", "help"}
# Flags of TF Serving, which the page on serving names.
OF_SERVERS = {"enable_batching"}
_COMMAND = re.compile(
    rf"^\s*(?:tfdml (?P<command>{'|'.join(STAGES)})|python -m "
    r"(?P<script>(?:benchmarks|tools)\.\w+)|"
    r"make (?P<target>[\w-]+))\b"
)
_FLAG_IN_TEXT = re.compile(r"`--(?:no)?([a-z]\w*)")
_OBJECTIVES = re.compile(r"--objectives=(?P<quote>['\"])(?P<text>.+?)(?P=quote)")


def joined_lines(text):
    """The lines of a block, those that end with a backslash joined with the next."""
    return re.sub(r"\s*\\\n\s*", " ", text).splitlines()


def _arguments(line):
    """The words of a command line, without what is said of it after three spaces or `#`."""
    words = shlex.split(re.split(r"\s{3,}|\s#\s", line.strip())[0])
    return [word for word in words[2:] if not re.fullmatch(r"(--\w+=)?\.\.\.", word)]


def _texts():
    """(where, text) of everything that holds command lines."""
    for page in PAGES:
        yield from (
            (f"{page.relative_to(ROOT)}:{block.line}", block.code) for block in blocks(page)
        )
    for path in sorted((ROOT / "tfdml" / "cli").glob("*.py")):
        yield str(path.relative_to(ROOT)), ast.get_docstring(ast.parse(path.read_text())) or ""


def _command_lines():
    return [
        (where, line, match)
        for where, text in _texts()
        for line in joined_lines(text)
        if (match := _COMMAND.match(line))
    ]


def test_command_lines_parse(monkeypatch):
    """Of a whole command line every flag must have an effect; what `--objectives` names is
    built."""
    monkeypatch.setattr(files, "in_store", lambda path: False)
    monkeypatch.setenv(VARIABLE, "")  # what is named here is not for other tests
    own = types.ModuleType("my_own")
    exec(blocks(ROOT / "docs" / "adding_your_own.md")[0].code, vars(own))
    monkeypatch.setitem(sys.modules, "my_own", own)
    lines = [
        (match["command"], _arguments(line), "..." not in line)
        for _, line, match in _command_lines()
        if match["command"]
    ]
    for page in PAGES:
        found = _OBJECTIVES.finditer(page.read_text())
        lines += [("train", [f"--objectives={match['text']}"], False) for match in found]
    assert len(lines) > 60
    faults = []
    for name, arguments, whole in lines:
        command = load(name)
        try:
            (command.parse if whole else command.flags.parse)(arguments)
            if name == "train" and command.flags.objectives:
                build_objectives(command.flags.objectives, num_classes=4)
        except Exception as error:
            faults.append(f"{name} {arguments}: {error}")
    assert not faults, "\n".join(faults)


def test_flags_named_in_the_text_exist():
    sources = [
        ROOT / "export" / "client.py",
        *(ROOT / "benchmarks").glob("*.py"),
        *(ROOT / "tools").glob("*.py"),
    ]
    others = set(re.findall(r'"--(\w+)"', "".join(path.read_text() for path in sources)))
    known = {*(flag for name in STAGES for flag in load(name).flags), *others, *OF_ALL, *OF_SERVERS}
    for page in PAGES:
        assert not {*_FLAG_IN_TEXT.findall(page.read_text())} - known, page.name


def test_flags_of_the_benchmarks_and_tools_exist():
    for where, line, match in _command_lines():
        if match["script"]:
            source = (ROOT / f"{match['script'].replace('.', '/')}.py").read_text()
            for flag in set(re.findall(r"\s--(\w+)", line)) - {"json"}:
                assert f'"--{flag}"' in source, f"{where}: {line}"


def test_targets_of_make_exist():
    makefile = (ROOT / "Makefile").read_text()
    for where, line, match in _command_lines():
        if match["target"]:
            assert re.search(rf"^{match['target']}:", makefile, re.MULTILINE), f"{where}: {line}"


def test_extras_that_are_named_exist():
    setup = (ROOT / "setup.cfg").read_text()
    for page in PAGES:
        for extra in re.findall(r"tfdml\[(\w+)\]", page.read_text()):
            assert re.search(rf"^{extra} =$", setup, re.MULTILINE), f"{page.name}: {extra}"
