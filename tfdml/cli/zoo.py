"""bin/zoo: small embedders, trained, exported and packed with their cards, as files of a release."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from tfdml.cli import checkout
from tfdml.cli import main as command_line
from tfdml.cli.zoo_archive import listed, pack, write_listing
from tfdml.disk_space import require_space
from tfdml.effects import Effect
from tfdml.errors import UserError
from tfdml.output_paths import require_local
from tfdml.storage import scratch_folder

USAGE = """
Train the small embedders of the zoo, export them, and pack each with its card.

  bin/zoo --out=dist/zoo                                                  glyphs, which needs no data
  bin/zoo --out=dist/zoo --models=omniglot --data=omniglot:/data/omniglot
  bin/zoo --out=dist/zoo --models=glyphs,omniglot,cars_small --data=omniglot:/data/omniglot,cars196:/data/cars196 \\
          --weights=mnv2_035.weights.h5
  bin/zoo --out=dist/zoo --models=cars_small --dry_run

Each becomes NAME-VERSION.tar.gz in --out: the Keras embedder, a SavedModel, LiteRT and ONNX files, the flags that make
it anew, model_card.json and README.md. SHA256SUMS and zoo.json list all that lie there. Stopped at any moment, the same
command goes on: a model that is trained is not trained again.
"""

flags.DEFINE_string("out", "", "Folder of the archives.", module_name=__name__)
flags.DEFINE_list("models", ["glyphs"], "Which; see above.", module_name=__name__)
flags.DEFINE_list("data", [], "Where data sets lie, as NAME:FOLDER.", module_name=__name__)
flags.DEFINE_string("weights", "", "ImageNet weights of the backbone of cars_small.", module_name=__name__)
flags.DEFINE_string("runs", "runs/zoo", "Folder of the runs.", module_name=__name__)
flags.DEFINE_bool("dry_run", False, "Check the flags and say what would be made, write nothing.", module_name=__name__)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Args:
        flagfile: The flags that it is trained with, below the root of the checkout.
        title: What it embeds.
        licence: What the images and weights that it was made from allow.
        dataset: Whose folder it needs; empty for none.
        pretrained: Whether it needs weights to start from.
        formats: What it is exported as.
        extra: More flags of its training.
    """

    flagfile: str
    title: str
    licence: str
    dataset: str = ""
    pretrained: bool = False
    formats: tuple[str, ...] = ("saved_model", "litert_float32", "litert_dynamic_range", "onnx")
    extra: tuple[str, ...] = ()


MODELS = {
    "glyphs": Entry(
        "configs/quickstart.flags",
        "Characters in many fonts, 28 px",
        "Trained from random weights on images that tfdml draws in the fonts that come with matplotlib. The weights "
        "are under tfdml's own licence, Apache 2.0.",
    ),
    "omniglot": Entry(
        "configs/small/omniglot_recipe.flags",
        "Hand-written characters of many alphabets, 28 px",
        "Trained from random weights on Omniglot (Lake et al., Science 2015), published under the MIT licence, "
        "copyright (c) 2015 Brenden Lake. The weights are under tfdml's own licence, Apache 2.0.",
        dataset="omniglot",
    ),
    "cars_small": Entry(
        "configs/small/cars_recipe.flags",
        "Models of cars, 96 px",
        "For research: the images of Cars-196 (Krause et al., 2013) were gathered from the web, and no licence of "
        "theirs is stated. Training began from ImageNet weights of MobileNetV2 (Keras Applications, Apache 2.0), whose "
        "images are for non-commercial research.",
        dataset="cars196",
        pretrained=True,
    ),
}


EFFECTS = command_line.Effects(
    {
        "data": Effect(
            lambda given: any(entry.dataset for entry in _chosen(given)), "a model of a data set in --models"
        ),
        "weights": Effect(lambda given: any(entry.pretrained for entry in _chosen(given)), "--models with cars_small"),
    },
    frozenset({"out", "models", "runs", "dry_run"}),
)


def _chosen(given: Mapping[str, Any]) -> list[Entry]:
    """The models that the flags name; unknown names are refused elsewhere."""
    return [MODELS[name] for name in given["models"] if name in MODELS]


def _given_folders(values: list[str]) -> dict[str, str]:
    """`--data` as folders by name."""
    folders = {}
    known = sorted({entry.dataset for entry in MODELS.values() if entry.dataset})
    for value in values:
        name, colon, folder = value.partition(":")
        if not colon or name not in known:
            raise UserError(f"--data={value}: write NAME:FOLDER, with one of {', '.join(known)}")
        folders[name] = os.path.abspath(os.path.expanduser(folder))
    return folders


def training_flags(entry: Entry, folders: dict[str, str], weights: str) -> list[str]:
    """The flags of `bin/train`, without those of the run folder.

    Raises:
        UserError: Data or weights that it needs are not named, or not there.
    """
    given = [f"--flagfile={entry.flagfile}", *entry.extra]
    if entry.dataset:
        folder = folders.get(entry.dataset)
        if folder is None:
            raise UserError(f"the folder of {entry.dataset} is missing: name it by --data={entry.dataset}:FOLDER")
        if not os.path.isdir(folder):
            raise UserError(f"--data={entry.dataset}:{folder}: there is no such folder")
        given.append(f"--data_dir={folder}")
    if entry.pretrained:
        if not weights:
            raise UserError("--weights is missing: the file of ImageNet weights, or imagenet where they can be fetched")
        if weights != "imagenet" and not os.path.isfile(os.path.expanduser(weights)):
            raise UserError(f"--weights={weights}: there is no such file")
        found = weights if weights == "imagenet" else os.path.abspath(os.path.expanduser(weights))
        given.append(f"--weights={found}")
    return given


def _run(*command: str) -> None:
    status = checkout.run(*command)
    if status:
        raise UserError(f"{command[0]} ended with status {status}; the same command goes on where it was")


def build(name: str, entry: Entry, given: list[str], runs: Path, out: Path) -> dict[str, Any]:
    """Train, export and pack a model; what the listing says of it.

    Args:
        name: The model's name.
        entry: What it is.
        given: Its flags, see `training_flags`.
        runs: The folder of the runs.
        out: The folder of the archives.

    Raises:
        UserError: Training or export failed.
    """
    run = runs.absolute() / name
    # A run is itself: one that is whole says so and ends.
    resumed = ["--resume"] if (run / "flags.txt").exists() else given
    _run("bin/train", *resumed, f"--run_dir={run}")
    with scratch_folder() as scratch:
        exported = Path(scratch, "export")
        _run("bin/export", f"--run_dir={run}", f"--out={exported}", f"--formats={','.join(entry.formats)}")
        version = exported / "1"
        shutil.copy(run / "embedder.keras", version / "embedder.keras")
        size = sum(path.stat().st_size for path in version.rglob("*") if path.is_file())
        require_space(out, size, "out", "the archives")
        return pack(version, run, name, entry.title, entry.licence, entry.flagfile, out)


def zoo() -> None:
    """Build as the flags say."""
    values = flags.FLAGS
    if not values.out:
        raise UserError("--out is missing")
    require_local(values.out, "out")
    unknown = [name for name in values.models if name not in MODELS]
    if unknown or not values.models:
        raise UserError(f"--models={','.join(values.models)}: must be of {', '.join(MODELS)}")
    folders = _given_folders(values.data)
    chosen = {name: training_flags(MODELS[name], folders, values.weights) for name in values.models}
    out, runs = Path(values.out).expanduser(), Path(values.runs).expanduser()
    entries = listed(out)
    if values.dry_run:
        for name, given in chosen.items():
            print(f"would train {name} in {runs / name} by {' '.join(given)} and pack it into {out}")
        return
    out.mkdir(parents=True, exist_ok=True)
    for name, given in chosen.items():
        entries[name] = build(name, MODELS[name], given, runs, out)
        write_listing(out, entries)
    print()
    for entry in entries.values():
        size, recall = entry["bytes"] / 1e6, 100 * entry["recall@1"]
        print(f"{out / entry['archive']}   {size:.1f} MB   Recall@1 {recall:.1f} %   {entry['title']}")


def main() -> None:
    """Entry point."""
    command_line.run(zoo, "zoo", USAGE, effects=EFFECTS)


if __name__ == "__main__":
    main()
