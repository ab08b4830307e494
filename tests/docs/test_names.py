"""Every link and every name of code in a page leads to something."""

import ast
import functools
import itertools
import pkgutil
import re

import pytest

from tests.docs.pages import FENCE, PAGES, ROOT, blocks, joined_lines, name_of
from tfdml.cli import STAGES, load

DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
SCRIPTS = [*(path for folder in ("benchmarks", "tools") for path in (ROOT / folder).glob("*.py"))]
# Flags of every command, and of TensorFlow Serving.
OTHER_FLAGS = {"flagfile", "help", "enable_batching"}
# These pages name the classes of other libraries.
COMPARISONS = {"docs/migrating.md", "docs/parity.md"}


@functools.cache
def anchors(page):
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+?)\s*$", FENCE.sub("", page.read_text()), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r"\s+", "-", heading) for heading in words}


def is_link(page, target):
    """Whether a link leads to a file, and to a heading in it; notebooks become pages of the
    site."""
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not anchor or file.suffix != ".md" or not file.exists():
        return file.exists() or file.with_suffix(".ipynb").exists()
    return anchor in anchors(file)


def is_attribute(_, name):
    """Whether a dotted name is a module's or a class's."""
    try:
        pkgutil.resolve_name(re.sub(r"^tf\b", "tensorflow", name))
    except (ImportError, AttributeError):
        return False
    return True


def flags_in(*paths):
    """Return the flags that these files define or read."""
    return {*re.findall(r'"--(\w+)"', "".join(path.read_text() for path in paths))}


@functools.cache
def flags():
    """Return the flags of all commands, tools and benchmarks."""
    of_commands = itertools.chain(*(load(name).flags for name in STAGES))
    return {*of_commands} | flags_in(*SCRIPTS, ROOT / "export" / "client.py") | OTHER_FLAGS


@functools.cache
def words():
    """Return the names in the package's code, and those of losses in settings: `triplet` for
    `TripletLoss`."""
    found = set()
    for path in [*(ROOT / "tfdml").rglob("*.py"), *SCRIPTS]:
        for node in ast.walk(ast.parse(path.read_text())):
            for field in ("name", "id", "attr", "arg"):
                found.update(str(getattr(node, field, "")).split("."))
            if isinstance(node, ast.Constant) and len(str(node.value)) < 60:
                found.update(re.findall(r"\w+", str(node.value)))
    snake = [re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower() for name in found]
    return found | {*snake} | {name.removesuffix("_loss") for name in snake}


def is_name(page, name):
    """Whether a name is one of the code, or of Keras or TensorFlow with its module."""
    known = name_of(page) in COMPARISONS or name.rpartition(".")[2] in words()
    return known or (name.startswith(("keras.", "tf.")) and is_attribute(page, name))


def is_script(_, line):
    """Whether a module of ours is there, with the flags that it is given."""
    module, *given = line.split()
    path = ROOT / f"{module.replace('.', '/')}.py"
    named = {word[2:].partition("=")[0] for word in given if word.startswith("--")} - {"json"}
    return path.exists() and named <= flags_in(path)


def is_target(_, name):
    """Whether it is a target of make."""
    return re.search(rf"^{name}\b.*:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def is_extra(_, name):
    """Whether it is an extra of the package."""
    return f"\n{name} =\n" in (ROOT / "setup.cfg").read_text()


LINK = r"\]\((?!https?:|mailto:|data:)([^)\s]+)\)"
# How each kind of name looks, in prose and in code.
PROSE = {LINK: is_link, r"`((?:\w+\.)*(?:[A-Z]\w*[a-z]\w*|[a-z]\w+(?=\()))": is_name}
CODE = {r"^python -m ((?:benchmarks|tools)\.\w+.*)": is_script, r"^make ([\w-]+)": is_target}
ANYWHERE = {
    r"\b(tfdml(?:\.[A-Za-z_]\w*)+)": is_attribute,
    r"\btfdml\[(\w+)\]": is_extra,
    r"`--(?:no)?([a-z]\w*)": lambda _, name: name in flags(),
}


def imports(code):
    """Yield the names that Python imports from tfdml."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "tfdml":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", *NOTEBOOKS], ids=name_of)
def test_what_a_page_names_is_there(page):
    text = page.read_text()
    prose = text if page.suffix == ".ipynb" else FENCE.sub("", text)
    code = "\n".join(joined_lines("\n".join(block.code for block in blocks(page))))
    python = "\n".join(block.code for block in blocks(page, "python"))
    faults = [name for name in imports(python) if not is_attribute(page, name)]
    for rules, part in ((PROSE, prose), (CODE, code), (ANYWHERE, text)):
        for pattern, exists in rules.items():
            names = re.findall(pattern, part, re.MULTILINE)
            faults += [f"{pattern}: {name}" for name in names if not exists(page, name)]
    assert not faults, "\n".join(faults)


def test_every_page_and_every_public_package_is_in_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert not [
        page for page in DOCS.rglob("*.md") if str(page.relative_to(DOCS)) not in navigation
    ]
    public = re.findall(
        r"^    from tfdml import (\w+)", (ROOT / "tfdml/__init__.py").read_text(), re.M
    )
    assert {*public} == {page.stem for page in (DOCS / "api").glob("*.md")} - {"index"}
