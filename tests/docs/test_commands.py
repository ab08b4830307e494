"""Every command line of README, docs and the commands' own help has flags that exist, with values
that they take, and every training command is planned by `--dry_run`.

For a plan data sets are small trees in the official layouts, and the network is a small one without
weights: all else, such as the terms, the batches, the schedule and how flags go together, is what
the page shows.
"""

import json
import pathlib
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
TREES = {"cars196": (98, 2), "omniglot": (40, 5), "sop": (12, 2), "cub200": (12, 2)}
# What is not there: a run to resume, networks of KerasHub, a module of the user's own.
NOT_HERE = {"--resume", "--pooling", "--drop", "--import"}
# What makes no other dry run.
OF_PLACE = {"--run_dir", "--data_dir", "--weights", "--out", "--model", "--dry_run"}
# Lists of photos by the names that the page on labels gives them.
LISTS = {
    "list.csv": "path,split",
    "photos.csv": "path,split,label",
    "captions.csv": "path,split,text",
    "market.csv": "path,role,label,group",
    "levels.csv": "path,split,label,super_label",
}


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
        if name == "train" and whole and words and not names & NOT_HERE:
            key = frozenset(word for word in words if word.partition("=")[0] not in OF_PLACE)
            found.setdefault(key, pytest.param(words, id=f"{where} {words[0][2:40]}"))
    return [*found.values()]


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """A folder with each data set, photos in class folders, and lists of them."""
    folder = tmp_path_factory.mktemp("data")
    for name, (classes, images) in TREES.items():
        write_tree(name, folder / name, classes, 5, images)
    write_tree("cub200", folder / "cub", 60, 5, 5)
    (folder / "cub" / "images").rename(folder / "folder")
    write_lists(folder)
    return folder


def write_lists(folder):
    """Write lists of the photos, and pairs of them."""
    photos = [path.relative_to(folder) for path in sorted((folder / "folder").rglob("*.jpg"))]
    rows = []
    for row, photo in enumerate(photos):
        name, split = photo.parent.name, "train" if row < len(photos) * 2 // 3 else "test"
        role = split if split == "train" else ("query", "gallery")[row % 2]
        values = {"path": photo, "split": split, "label": name, "role": role, "group": photo.stem}
        rows.append({**values, "super_label": name[:1], "text": f"{photo} shows {name}"})
    for name, header in LISTS.items():
        lines = [",".join(str(row[column]) for column in header.split(",")) for row in rows]
        (folder / name).write_text("\n".join([header, *lines]) + "\n")
    with open(folder / "sets.jsonl", "w") as file:
        for row in rows:
            labels = [row["label"], row["label"][:2]]
            file.write(
                json.dumps({"path": str(row["path"]), "split": row["split"], "labels": labels})
            )
            file.write("\n")
    pairs = [(a, b) for step in (1, 7) for a, b in zip(photos, photos[step:], strict=False)]
    lines = [f"{a},{b},{int(a.parent == b.parent)}" for a, b in pairs]
    (folder / "pairs.csv").write_text("\n".join(["a,b,similar", *lines]) + "\n")


def data_flags(words, trees):
    """Return the flags of a command's data set in `trees`, in place of the page's own folder."""
    chosen = parse_flags("\n".join(read_flag_files(words)))
    name = chosen.get("dataset", "glyphs")
    if name == "glyphs":
        return ["--dataset_options=images_per_class=2, size=32"]
    if name == "list":
        return [f"--data_dir={trees / pathlib.Path(chosen['data_dir']).name}"]
    unchecked = [] if name == "folder" else ["--dataset_options=check_counts=false"]
    return [f"--data_dir={trees / name}", *unchecked]


@pytest.mark.one_quick_case
@pytest.mark.parametrize("words", training_commands())
def test_a_training_command_is_planned(words, trees, tmp_path):
    data = data_flags(words, trees)
    words = [word for word in words if word.partition("=")[0] not in ("--data_dir", "--start_from")]
    if not any(word.startswith(("--flagfile", "--dataset")) for word in words):
        pytest.skip("the rest of the command is another line's")
    where = [f"--run_dir={tmp_path / 'run'}", "--dry_run"]
    status, output, errors = commands.run("train", *words, *data, *SMALL.split(), *where)
    assert status == 0, errors
    assert "--objectives=" in output
    assert not list(tmp_path.iterdir())
