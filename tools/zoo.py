r"""Train the small embedders of the model zoo, export them, and pack each with its card.

  python -m tools.zoo --out=dist/zoo                                      glyphs, which needs no data
  python -m tools.zoo --out=dist/zoo --models=omniglot --data=omniglot:/data/omniglot
  python -m tools.zoo --out=dist/zoo --models=glyphs,omniglot,cars_small \
          --data=omniglot:/data/omniglot,cars196:/data/cars196 --weights=mnv2_035.weights.h5
  python -m tools.zoo --out=dist/zoo --models=cars_small --dry_run

Writes NAME-VERSION.tar.gz to --out: the Keras embedder, a SavedModel, LiteRT and ONNX files, the flags of the training,
model_card.json and README.md. SHA256SUMS and zoo.json list all archives. An interrupted command resumes when it is
started again: trained models are not trained twice.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdml.embeddings.model_card import CARD
from tfdml.errors import UserError
from tfdml.evaluation.intervals import Interval
from tfdml.io.files import (
    atomic_write,
    require_local,
    require_space,
    scratch_folder,
    sha256_of,
    sweep,
    write_json,
    write_whole,
)
from tfdml.io.manifests import Kinds, fields, objects, read_json
from tfdml.version import __version__
from tools.numbers import Results, command_line

ROOT = Path(__file__).resolve().parents[1]
LISTING = "zoo.json"
SUMS = "SHA256SUMS"
README = "README.md"
_SHOWN = ("recall@1", "recall@2", "recall@4", "recall@8", "map@r", "r_precision", "nmi")
_KINDS: Kinds = {"archive": str, "bytes": int, "sha256": str, "title": str, "recall@1": float}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Args:
        flagfile: The flags that it is trained with, below the root of the checkout.
        title: What it embeds.
        license: What the images and weights that it was made from allow.
        dataset: Whose folder it needs; empty for none.
        pretrained: Whether it needs weights to start from.
        formats: What it is exported as.
        extra: More flags of its training.
    """

    flagfile: str
    title: str
    license: str
    dataset: str = ""
    pretrained: bool = False
    formats: tuple[str, ...] = ("saved_model", "litert_float32", "litert_dynamic_range", "onnx")
    extra: tuple[str, ...] = ()


MODELS = {
    "glyphs": Entry(
        "configs/quickstart.flags",
        "Characters in many fonts, 28 px",
        "Trained from random weights on images that tfdml draws in the fonts that come with matplotlib. The weights "
        "are under tfdml's own license, Apache 2.0.",
    ),
    "omniglot": Entry(
        "configs/small/omniglot_recipe.flags",
        "Hand-written characters of many alphabets, 28 px",
        "Trained from random weights on Omniglot (Lake et al., Science 2015), published under the MIT license, "
        "copyright (c) 2015 Brenden Lake. The weights are under tfdml's own license, Apache 2.0.",
        dataset="omniglot",
    ),
    "cars_small": Entry(
        "configs/small/cars_recipe.flags",
        "Models of cars, 96 px",
        "For research: the images of Cars-196 (Krause et al., 2013) were gathered from the web, and no license of "
        "theirs is stated. Training began from ImageNet weights of MobileNetV2 (Keras Applications, Apache 2.0), whose "
        "images are for non-commercial research.",
        dataset="cars196",
        pretrained=True,
    ),
}


def _given_folders(values: list[str]) -> dict[str, str]:
    """Return the folders of `--data` by name."""
    folders = {}
    known = sorted({entry.dataset for entry in MODELS.values() if entry.dataset})
    for value in values:
        name, colon, folder = value.partition(":")
        if not colon or name not in known:
            raise UserError(f"--data={value}: write NAME:FOLDER, with one of {', '.join(known)}")
        folders[name] = os.path.abspath(os.path.expanduser(folder))
    return folders


def training_flags(entry: Entry, folders: dict[str, str], weights: str) -> list[str]:
    """Return the flags of `tfdml train`, without those of the run folder.

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
    print(f"\n$ {' '.join(command)}", flush=True)
    status = subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
    if status:
        raise UserError(f"{command[0]} ended with status {status}; the same command resumes")


def pack(version: Path, run: Path, name: str, entry: Entry, out: Path) -> dict[str, Any]:
    """Add the flags and both cards to the folder of an export, and pack it.

    The bytes of the archive depend on the files alone, not on when or where they are packed.

    Args:
        version: The folder of the exported version; files are added to it.
        run: The run that it was exported from.
        name: The model's name.
        entry: Its entry.
        out: The folder of the archives.

    Returns:
        The listing's line for the archive, `NAME-VERSION.tar.gz` with the folder `NAME` in it, written atomically.

    Raises:
        UserError: The run has no result, or the export no card.
    """
    card = {**read_json(version / CARD), "license": entry.license}
    result = read_json(run / "result.json")
    write_json(version / CARD, card)
    flags = [f"--{key}={value}" for key, value in card["flags"].items()]
    write_whole(version / "flags.txt", ("\n".join(flags) + "\n").encode())
    write_whole(version / README, card_for_people(name, entry, card, result).encode())
    archive = out / f"{name}-{__version__}.tar.gz"
    with atomic_write(archive) as partial:
        _write(partial, version, name)
    return {
        "archive": archive.name,
        "bytes": archive.stat().st_size,
        "sha256": sha256_of(archive),
        "title": entry.title,
        "license": entry.license,
        "embedding_dim": card["embedding_dim"],
        "parameters": card["model"]["parameters"],
        "image_size": card["view"]["image_size"],
        "recall@1": card["metrics"]["recall@1"],
        "protocol": card["protocol"],
    }


def _write(path: Path, folder: Path, name: str) -> None:
    with (
        open(path, "wb") as raw,
        gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for file in sorted(file for file in folder.rglob("*") if file.is_file()):
            about = tarfile.TarInfo(f"{name}/{file.relative_to(folder).as_posix()}")
            about.size, about.mode = file.stat().st_size, 0o644
            with open(file, "rb") as content:
                archive.addfile(about, content)


def card_for_people(name: str, entry: Entry, card: dict[str, Any], result: dict[str, Any]) -> str:
    """Return the text of README.md of an archive.

    Args:
        name: The model's name.
        entry: Its entry.
        card: `model_card.json`.
        result: `result.json` of its run.
    """
    view, data, metrics = card["view"], card["data"], card["metrics"]
    intervals, before = result.get("intervals") or {}, (result.get("metrics_before") or {}).get("recall@1")
    metric_rows = [_row(key, metrics[key], intervals.get(key)) for key in _SHOWN if key in metrics]
    files = [
        f"| {kind} | {', '.join(f'`{file}`' for file in sorted(artifact['files']))} |"
        for kind, artifact in card["artifacts"].items()
    ]
    untrained = "" if before is None else f" Before training Recall@1 was {100 * before:.1f}."
    return "\n".join(
        [
            f"# {name}: {entry.title}",
            "",
            f"An embedder of {card['model']['parameters']:,} parameters: an image becomes a vector of "
            f"{card['embedding_dim']} numbers and of length 1, and images of one class lie near each other, also of "
            f"classes that it was not trained on. Made by tfdml {__version__}.",
            "",
            "## Measured",
            "",
            f"{card['protocol']}; in percent, with 95 % intervals over the test classes.{untrained}",
            "",
            "| metric | value | interval |",
            "|---|---|---|",
            *metric_rows,
            "",
            f"Trained on {data['train']['images']:,} images of {data['train']['classes']:,} classes of "
            f"{data['dataset']}, measured on {data['test']['images']:,} of {data['test']['classes']:,} others. "
            f"The epoch: {card['selection']}.",
            "",
            "It is small, and learned these images alone: on others, and for decisions about people, it has not been "
            "measured.",
            "",
            "## Use",
            "",
            "```python",
            "import tensorflow as tf",
            "",
            f'embed = tf.saved_model.load("{name}").signatures["serving_default"]',
            'vectors = embed(image_bytes=tf.constant([open("a.jpg", "rb").read()]))["embedding"]',
            "```",
            "",
            f"or `keras.saving.load_model('{name}/embedder.keras')` after `import tfdml`, or with tfdml's commands:",
            "",
            "```",
            f"tfdml embed --model={name} --dataset=folder --data_dir=PHOTOS --out=embeddings/photos",
            f"tfdml evaluate --model={name} --dataset=folder --data_dir=PHOTOS",
            "```",
            "",
            f"LiteRT and ONNX files take views of {view['image_size']} px (uint8): resized to {view['resize']} px "
            f"({view['resize_mode']}), then the center.",
            "",
            "| format | files |",
            "|---|---|",
            *files,
            "",
            "Sizes, checksums and how near each format is to the Keras embedder: `model_card.json`.",
            "",
            "## Train it again",
            "",
            "```",
            f"tfdml train --flagfile={entry.flagfile} --run_dir=runs/{name}",
            "```",
            "",
            "with `--data_dir` and `--weights` where it needs them; `flags.txt` has every flag.",
            "",
            "## License",
            "",
            card["license"],
            "",
        ]
    )


def _row(name: str, value: float, interval: list[float] | None) -> str:
    between = ""
    if interval:
        found = Interval(*interval)
        between = f"{100 * found.low:.1f} to {100 * found.high:.1f}"
    return f"| {name} | {100 * value:.1f} | {between} |"


def read_listing(out: Path) -> dict[str, dict]:
    """Read the lines of zoo.json, by name, for models whose archives are in a folder.

    Raises:
        UserError: The folder has other files, or zoo.json is damaged.
    """
    if not out.exists():
        return {}
    if not out.is_dir():
        raise UserError(f"--out={out} is no folder")
    known = objects(read_json(out / LISTING), str(out / LISTING)) if (out / LISTING).exists() else {}
    for name, entry in known.items():
        fields(entry, _KINDS, f"{out / LISTING}: {name}")
    ours = {LISTING, SUMS, *(entry["archive"] for entry in known.values())}
    strangers = [path.name for path in sorted(out.iterdir()) if path.name not in ours and path.name[0] != "."]
    if strangers:
        raise UserError(f"--out={out} holds {strangers[0]}, which is none of the zoo's: name an empty or a new folder")
    return {name: entry for name, entry in known.items() if (out / entry["archive"]).exists()}


def write_listing(out: Path, entries: dict[str, dict]) -> None:
    """Write zoo.json and SHA256SUMS.

    Args:
        out: The folder of the archives.
        entries: The result of `pack` for each, by the model's name.
    """
    ordered = dict(sorted(entries.items()))
    write_whole(out / LISTING, (json.dumps(ordered, indent=2) + "\n").encode())
    sums = "".join(f"{entry['sha256']}  {entry['archive']}\n" for entry in ordered.values())
    write_whole(out / SUMS, sums.encode())


def build(name: str, entry: Entry, given: list[str], runs: Path, out: Path) -> dict[str, Any]:
    """Train, export and pack a model; return the listing's line for it.

    Args:
        name: The model's name.
        entry: Its entry.
        given: Its flags, see `training_flags`.
        runs: The folder of the runs.
        out: The folder of the archives.

    Raises:
        UserError: Training or export failed.
    """
    run = runs.absolute() / name
    # A finished run prints so and ends.
    resumed = ["--resume"] if (run / "flags.txt").exists() else given
    _run("bin/train", *resumed, f"--run_dir={run}")
    with scratch_folder() as scratch:
        exported = Path(scratch, "export")
        _run("bin/export", f"--run_dir={run}", f"--out={exported}", f"--formats={','.join(entry.formats)}")
        version = exported / "1"
        shutil.copy(run / "embedder.keras", version / "embedder.keras")
        size = sum(path.stat().st_size for path in version.rglob("*") if path.is_file())
        require_space(out, size, "out", "the archives")
        return pack(version, run, name, entry, out)


def zoo(models: str, data: str, weights: str, runs: Path, out: Path, dry_run: bool, json: str = "") -> None:
    """Train, export and pack models of the zoo.

    Args:
        models: Their names, with commas.
        data: Folders of data sets, NAME:FOLDER, with commas.
        weights: ImageNet weights of MobileNetV2.
        runs: The folder of the runs.
        out: The folder of the archives.
        dry_run: Only print what would be made.
        json: Also write the table of the archives to this file.

    Raises:
        UserError: A model is unknown, data or weights are missing, or training or export failed.
    """
    require_local(out, "out")
    out, runs = out.expanduser(), runs.expanduser()
    names = [name for name in models.split(",") if name]
    if not names or set(names) - set(MODELS):
        raise UserError(f"--models={models}: must be of {', '.join(MODELS)}")
    chosen = {name: MODELS[name] for name in names}
    folders = _given_folders([value for value in data.split(",") if value])
    if data and not any(entry.dataset for entry in chosen.values()):
        raise UserError(f"--data={data} has no effect: no model of --models needs a data set")
    if weights and not any(entry.pretrained for entry in chosen.values()):
        raise UserError(f"--weights={weights} has no effect: only cars_small starts from weights")
    given = {name: training_flags(entry, folders, weights) for name, entry in chosen.items()}
    entries = read_listing(out)
    if dry_run:
        for name in names:
            print(f"would train {name} in {runs / name} by {' '.join(given[name])} and pack it into {out}")
        return
    out.mkdir(parents=True, exist_ok=True)
    sweep(out)  # temporary files of processes that were killed
    for name, entry in chosen.items():
        entries[name] = build(name, entry, given[name], runs, out)
        write_listing(out, entries)
    add = Results(json).table("table", "model", "archive", "Recall@1")
    for name, known in entries.items():
        size, recall = known["bytes"] / 1e6, 100 * known["recall@1"]
        add(f"`{name}`", f"{size:.1f} MB", f"{recall:.1f} %")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = command_line(__doc__ or "")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the archives")
    parser.add_argument("--models", default="glyphs", help="names with commas (default: %(default)s)")
    parser.add_argument("--data", default="", help="folders of data sets, NAME:FOLDER, with commas")
    parser.add_argument("--weights", default="", help="ImageNet weights of the backbone of cars_small")
    parser.add_argument("--runs", type=Path, default=Path("runs/zoo"), help="the runs' folder (default: %(default)s)")
    parser.add_argument("--dry_run", action="store_true", help="check the flags, print the plan, write nothing")
    try:
        zoo(**vars(parser.parse_args(arguments)))
    except OSError as error:
        parser.exit(2, f"zoo: error: {error.filename}: {error.strerror}\n")
    except UserError as error:
        parser.exit(2, f"zoo: error: {error}\n")


if __name__ == "__main__":
    main()
