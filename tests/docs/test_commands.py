"""Every command line of README, docs and the commands' own help has flags that exist, with values
that they take, and every training command is planned by `--dry_run`.

For a plan data sets are small trees in the official layouts, and the network is a small one without
weights: all else, such as the terms, the batches, the schedule and how flags go together, is what
the page shows.
"""

import re
import sys
import types

import pytest

from tests.cli import commands
from tests.data.trees import write_tree
from tests.docs.pages import PAGES, ROOT, blocks, command_lines
from tfdml.flags import parse_flags, read_flag_files
from tfdml.io import files
from tfdml.objectives.terms import build_objectives
from tfdml.registry import VARIABLE

_OBJECTIVES = re.compile(r"--objectives=(?P<quote>['\"])(?P<text>.+?)(?P=quote)")
# What a page leaves out, or a machine does not have.
SMALL = "--backbone=conv4(width=4) --weights=none --image_size=32 --resize=36 --batch_norm=train"
# Classes to train on; images of each.
TREES = {"cars196": (98, 2), "omniglot": (40, 5), "cub200": (60, 5)}
# What is not there: a run to resume or to repeat, networks of KerasHub, a module and lists of the
# user's own. tests/data/readers and tests/cli read lists with each column.
NOT_HERE = {"--resume", "--final_of", "--pooling", "--drop", "--import", "--features"}
# What makes no other dry run.
OF_PLACE = {"--run_dir", "--data_dir", "--weights", "--out", "--model", "--dry_run"}


def test_command_lines_parse(monkeypatch):
    """Of a whole command line every flag must have an effect; what `--objectives` names is
    built."""
    monkeypatch.setattr(files, "in_store", lambda path: False)
    monkeypatch.setenv(VARIABLE, "")  # what is named here is not for other tests
    own = types.ModuleType("my_own")
    exec(blocks(ROOT / "docs" / "adding_your_own.md")[0].code, vars(own))
    monkeypatch.setitem(sys.modules, "my_own", own)
    lines = command_lines()
    for page in PAGES:
        for match in _OBJECTIVES.finditer(page.read_text()):
            lines.append((page.name, "train", [f"--objectives={match['text']}"], False))
    assert len(lines) > 60
    faults = []
    for where, name, words, whole in lines:
        command = commands.load(name)
        try:
            (command.parse if whole else command.flags.parse)(words)
            if name == "train" and command.flags.objectives:
                build_objectives(command.flags.objectives, num_classes=4)
        except Exception as error:
            faults.append(f"{where}: {name} {words}: {error}")
    assert not faults, "\n".join(faults)


def training_commands():
    """Return those of the pages, each once, without fragments and those of `NOT_HERE`."""
    found = {}
    for where, name, words, whole in command_lines():
        names = {word.partition("=")[0] for word in words}
        if "--dataset=list" in words or not names & {"--flagfile", "--dataset"} or names & NOT_HERE:
            continue
        if name == "train" and whole:
            key = frozenset(word for word in words if word.partition("=")[0] not in OF_PLACE)
            found.setdefault(key, pytest.param(words, id=f"{where} {words[0][2:40]}"))
    return [*found.values()]


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """A folder with each data set, and photos in class folders."""
    folder = tmp_path_factory.mktemp("data")
    for name, (classes, images) in TREES.items():
        write_tree(name, folder / name, classes, 5, images)
    (folder / "folder").symlink_to(folder / "cub200" / "images")
    return folder


@pytest.mark.one_quick_case
@pytest.mark.parametrize("words", training_commands())
def test_a_training_command_is_planned(words, trees, tmp_path):
    chosen = parse_flags("\n".join(read_flag_files(words)))
    name = chosen.get("dataset", "glyphs")
    options = "images_per_class=2, size=32" if name == "glyphs" else "check_counts=false"
    words = [word for word in words if word.partition("=")[0] not in ("--data_dir", "--start_from")]
    words += [] if name == "glyphs" else [f"--data_dir={trees / name}"]
    words += [] if name == "folder" else [f"--dataset_options={options}"]
    where = [f"--run_dir={tmp_path / 'run'}", "--dry_run"]
    status, output, errors = commands.run("train", *words, *SMALL.split(), *where)
    assert status == 0, errors
    assert "--objectives=" in output
    assert not list(tmp_path.iterdir())
