"""The command lines of README, docs and the commands' help: training is planned by `--dry_run`,
others are read.

Data sets are small trees in the official layouts, and the network is a small one without weights:
all else, such as the terms, the batches, the schedule and how flags go together, is what the page
shows.
"""

import json
import pathlib

import pytest

from tests.cli import commands
from tests.data.trees import write_tree
from tests.docs.test_commands import _arguments, _command_lines
from tfdml.flags import parse_flags, read_flag_files

# What a page leaves out, or a machine does not have.
SMALL = [
    "--backbone=conv4(width=4)",
    "--weights=none",
    "--image_size=32",
    "--resize=36",
    "--batch_norm=train",
]
# Classes to train on; images of each.
TREES = {"cars196": (98, 2), "omniglot": (40, 5), "sop": (12, 2), "cub200": (12, 2)}


# What makes no other dry run.
# What is not there: a run to resume, networks of KerasHub, a module of the user's own.
NOT_HERE = {"--resume", "--pooling", "--drop", "--import"}
OF_PLACE = ("--run_dir", "--data_dir", "--weights", "--out", "--model", "--dry_run")


def training_commands():
    """Those of the pages, each once, by where it stands, without fragments and those of
    `NOT_HERE`."""
    found = {}
    for where, line, match in _command_lines():
        words = tuple(_arguments(line)) if match["command"] == "train" and "..." not in line else ()
        if words and not {word.partition("=")[0] for word in words} & NOT_HERE:
            key = frozenset(word for word in words if word.partition("=")[0] not in OF_PLACE)
            found.setdefault(key, (words, where))
    return [
        pytest.param(list(words), id=f"{where} {words[0][2:40]}") for words, where in found.values()
    ]


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """A folder with each data set, and photos in class folders."""
    folder = tmp_path_factory.mktemp("data")
    for name, (classes, images) in TREES.items():
        write_tree(name, folder / name, classes, 5, images)
    write_tree("cub200", folder / "cub", 60, 5, 5)
    (folder / "cub" / "images").rename(folder / "folder")
    write_lists(folder)
    return folder


def write_lists(folder):
    """Lists of the photos by the names that the page on labels gives them, and pairs of them."""
    photos = [path.relative_to(folder) for path in sorted((folder / "folder").rglob("*.jpg"))]
    splits = ["train" if row < len(photos) * 2 // 3 else "test" for row in range(len(photos))]
    rows = list(zip(photos, splits, (photo.parent.name for photo in photos), strict=True))
    roles = [
        ("query", "gallery")[row % 2] if split == "test" else split
        for row, split in enumerate(splits)
    ]
    sets = [
        {"path": str(path), "split": split, "labels": [name, name[:2]]}
        for path, split, name in rows
    ]
    near = [
        (a, b, int(a.parent == b.parent))
        for step in (1, 7)
        for a, b in zip(photos, photos[step:], strict=False)
    ]
    texts = {
        "list.csv": ["path,split", *(f"{path},{split}" for path, split, _ in rows)],
        "photos.csv": [
            "path,split,label",
            *(f"{path},{split},{name}" for path, split, name in rows),
        ],
        "captions.csv": [
            "path,split,text",
            *(f"{path},{split},{path} shows {name}" for path, split, name in rows),
        ],
        "market.csv": [
            "path,role,label,group",
            *(f"{p},{r},{n},{p.stem}" for (p, _, n), r in zip(rows, roles, strict=True)),
        ],
        "levels.csv": [
            "path,split,label,super_label",
            *(f"{p},{s},{name},{name[:1]}" for p, s, name in rows),
        ],
        "sets.jsonl": map(json.dumps, sets),
        "pairs.csv": ["a,b,similar", *(f"{a},{b},{same}" for a, b, same in near)],
    }
    for name, lines in texts.items():
        (folder / name).write_text("\n".join(lines) + "\n")


def of_data(words, trees):
    """The flags that name the data set of a command line in `trees`, in place of the page's own
    folder."""
    chosen = parse_flags("\n".join(read_flag_files(words)))
    name = chosen.get("dataset", "glyphs")
    if name == "glyphs":
        return ["--dataset_options=images_per_class=2, size=32"]
    if name == "list":
        return [f"--data_dir={trees / pathlib.Path(chosen['data_dir']).name}"]
    return [
        f"--data_dir={trees / name}",
        *([] if name == "folder" else ["--dataset_options=check_counts=false"]),
    ]


@pytest.mark.one_quick_case
@pytest.mark.parametrize("words", training_commands())
def test_a_training_command_is_planned(words, trees, tmp_path):
    data = of_data(words, trees)
    words = [word for word in words if word.partition("=")[0] not in ("--data_dir", "--start_from")]
    if not any(word.startswith(("--flagfile", "--dataset")) for word in words):
        pytest.skip("the rest of the command is another line's")
    where = [f"--run_dir={tmp_path / 'run'}", "--dry_run"]
    status, output, errors = commands.run("train", *words, *data, *SMALL, *where)
    assert status == 0, errors
    assert "--objectives=" in output
    assert not list(tmp_path.iterdir())
