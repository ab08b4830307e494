"""Every command line of README, docs and the commands' own help has flags that exist, have an
effect, and take their values; those of the pages that a new user follows run, on small data."""

import ast
import itertools
import re
import sys
import types

import pytest

from tests.backbones.hub_networks import preset
from tests.cli import commands
from tests.docs import world
from tests.docs.pages import PAGES, ROOT, blocks, command_lines
from tfdml.io import files
from tfdml.objectives.terms import build_objectives
from tfdml.registry import VARIABLE

# Pages whose commands run, or the section of a page after `#`; test_packaging.py runs README's.
RUN = (
    "docs/quickstart.md",
    "docs/shop.md",
    "docs/verification.md",
    "docs/backbones.md#Fine-tune a foundation model",
    "docs/export.md#Run on a phone",
    "export/README.md",
)
# Of them these are not run: a server, and searches among images that tests/cli/test_evaluate.py
# has.
NOT_RUN = re.compile(r"serve|--known=|--watch=|--set_pairs=")
# The reader's own, that commands name.
FILES = "photos, car.jpg, queries/car.jpg"
# Put behind a command that trains or audits; the last value of a flag counts.
FEW_STEPS = ["--classes_per_batch=2", "--images_per_class=2", "--epochs=1", "--steps_per_epoch=2"]
SMALL = ["--backbone=conv4(width=8)", "--weights=none", "--resize=32", "--image_size=28"]
GLYPHS = ["--dataset_options=images_per_class=4, size=32"]
_OBJECTIVES = re.compile(r"--objectives=(?P<quote>['\"])(?P<text>.+?)(?P=quote)")


def test_command_lines_parse(monkeypatch):
    """Of a whole command line every flag must have an effect; what `--objectives` names is
    built."""
    monkeypatch.setattr(files, "in_store", lambda path: False)
    monkeypatch.setenv(VARIABLE, "")  # what is named here is not for other tests
    own = types.ModuleType("my_own")
    exec(blocks(ROOT / "docs" / "adding_your_own.md")[0].code, vars(own))
    monkeypatch.setitem(sys.modules, "my_own", own)
    texts = [block.code for block in itertools.chain(*map(blocks, PAGES))]
    for path in (ROOT / "tfdml" / "cli").glob("*.py"):
        texts.append(ast.get_docstring(ast.parse(path.read_text())) or "")
    lines = command_lines("\n".join(texts))
    for page in PAGES:
        for match in _OBJECTIVES.finditer(page.read_text()):
            lines.append(["train", f"--objectives={match['text']}", "..."])
    assert len(lines) > 60
    faults = []
    for name, *words in lines:
        command = commands.load(name)
        given = [word for word in words if "..." not in word]
        try:
            (command.parse if given == words else command.flags.parse)(given)
            if name == "train" and command.flags.objectives:
                build_objectives(command.flags.objectives, num_classes=4)
        except Exception as error:
            faults.append(f"{name} {words}: {error}")
    assert not faults, "\n".join(faults)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    world.write_named(f"{FILES}, runs/cars, runs/cars_jrd", tmp_path)
    preset(tmp_path / "presets" / "dinov2_small", "dinov2")
    for words in small_commands(page):
        commands.printed(*(word.replace("/data/galleries", str(tmp_path)) for word in words))


def small_commands(page):
    """Return the commands of a page, made small."""
    name, _, section = page.partition("#")
    codes = [block.code for block in blocks(ROOT / name) if section in ("", block.heading)]
    lines = command_lines("\n".join(codes))
    return [made_small(words) for words in lines if not NOT_RUN.search(" ".join(words))]


def made_small(words):
    """Return a command that does on small data, without a download, what the page's does."""
    given = " ".join(words)
    words = [word.replace("hub:dinov2", "hub:presets/dinov2") for word in words]
    if words[0] == "audit":
        words += SMALL
    # A final model has the settings of the measured run.
    elif words[0] == "train" and "--final_of" not in given:
        own = [*SMALL, "--batch_norm=train"]
        words += ["--image_size=32", "--resize=36"] if "hub:" in given else own
        words += FEW_STEPS
    if words[0] in ("train", "embed") and re.search(r"quickstart\.flags|=glyphs", given):
        words += GLYPHS
    # A network that has hardly been trained loses what a better one keeps.
    if words[0] == "export" and "--run_dir" in given:
        words += ["--min_cosine=-1", "--max_recall_drop=1"]
    return words
