"""The archive of a model of the zoo, its card for people, and the listing of all archives."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path
from typing import Any

from tfdml.embeddings.backends.model_card import CARD
from tfdml.errors import UserError
from tfdml.evaluation.intervals import Interval
from tfdml.manifests import Kinds, fields, objects, read_json
from tfdml.storage import atomic_write, sha256_of, write_json, write_whole
from tfdml.version import __version__

LISTING = "zoo.json"
SUMS = "SHA256SUMS"
README = "README.md"
_SHOWN = ("recall@1", "recall@2", "recall@4", "recall@8", "map@r", "r_precision", "nmi")
_KINDS: Kinds = {"archive": str, "bytes": int, "sha256": str, "title": str, "recall@1": float}


def pack(version: Path, run: Path, name: str, title: str, licence: str, flagfile: str, out: Path) -> dict[str, Any]:
    """Complete the folder of an export by what makes it anew and says what it is, and pack it.

    The bytes depend on the files alone: not on when, where or by whom they are packed.

    Args:
        version: The folder of the exported version; files are added to it.
        run: The run that it was exported from.
        name: The model's name.
        title: What it embeds.
        licence: What may be done with it.
        flagfile: The flags that it was trained with, as in the repository.
        out: The folder of the archives.

    Returns:
        What the listing says of the archive, `NAME-VERSION.tar.gz` with the folder `NAME` in it, which is there whole
        or not at all.

    Raises:
        UserError: The run has no result, or the export no card.
    """
    card = {**read_json(version / CARD), "licence": licence}
    result = read_json(run / "result.json")
    write_json(version / CARD, card)
    flags = [f"--{key}={value}" for key, value in card["flags"].items()]
    write_whole(version / "flags.txt", ("\n".join(flags) + "\n").encode())
    write_whole(version / README, card_for_people(name, title, flagfile, card, result).encode())
    archive = out / f"{name}-{__version__}.tar.gz"
    with atomic_write(archive) as partial:
        _write(partial, version, name)
    return {
        "archive": archive.name,
        "bytes": archive.stat().st_size,
        "sha256": sha256_of(archive),
        "title": title,
        "licence": licence,
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


def card_for_people(name: str, title: str, flagfile: str, card: dict[str, Any], result: dict[str, Any]) -> str:
    """README.md of an archive.

    Args:
        name: The model's name.
        title: What it embeds.
        flagfile: The flags that it was trained with, as in the repository.
        card: `model_card.json`.
        result: `result.json` of its run.
    """
    view, data, metrics = card["view"], card["data"], card["metrics"]
    intervals, before = result.get("intervals") or {}, (result.get("metrics_before") or {}).get("recall@1")
    measured = [_row(key, metrics[key], intervals.get(key)) for key in _SHOWN if key in metrics]
    files = [
        f"| {kind} | {', '.join(f'`{file}`' for file in sorted(artefact['files']))} |"
        for kind, artefact in card["artefacts"].items()
    ]
    untrained = "" if before is None else f" Before training Recall@1 was {100 * before:.1f}."
    return "\n".join(
        [
            f"# {name}: {title}",
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
            *measured,
            "",
            f"Trained on {data['train']['images']:,} images of {data['train']['classes']:,} classes of "
            f"{data['dataset']}, measured on {data['test']['images']:,} of {data['test']['classes']:,} others. "
            f"The epoch: {card['selection']}.",
            "",
            "It is small, and learnt these images alone: on others, and for decisions about people, it has not been "
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
            f"bin/embed --model={name} --dataset=folder --data_dir=PHOTOS --out=embeddings/photos",
            f"bin/evaluate --model={name} --dataset=folder --data_dir=PHOTOS",
            "```",
            "",
            f"LiteRT and ONNX files take views of {view['image_size']} px (uint8): resized to {view['resize']} px "
            f"({view['resize_mode']}), then the centre.",
            "",
            "| format | files |",
            "|---|---|",
            *files,
            "",
            "Sizes, checksums and how near each format is to the Keras embedder: `model_card.json`.",
            "",
            "## Made anew",
            "",
            "```",
            f"bin/train --flagfile={flagfile} --run_dir=runs/{name}",
            "```",
            "",
            "with `--data_dir` and `--weights` where it needs them; `flags.txt` has every flag.",
            "",
            "## Licence",
            "",
            card["licence"],
            "",
        ]
    )


def _row(name: str, value: float, interval: list[float] | None) -> str:
    between = ""
    if interval:
        found = Interval(*interval)
        between = f"{100 * found.low:.1f} to {100 * found.high:.1f}"
    return f"| {name} | {100 * value:.1f} | {between} |"


def listed(out: Path) -> dict[str, dict]:
    """What zoo.json says of the models whose archives are in a folder, by name.

    Raises:
        UserError: The folder holds what is none of the zoo's, or zoo.json is damaged.
    """
    if not out.exists():
        return {}
    if not out.is_dir():
        raise UserError(f"`out={out}` is no folder")
    known = objects(read_json(out / LISTING), str(out / LISTING)) if (out / LISTING).exists() else {}
    for name, entry in known.items():
        fields(entry, _KINDS, f"{out / LISTING}: {name}")
    ours = {LISTING, SUMS, *(entry["archive"] for entry in known.values())}
    strangers = [path.name for path in sorted(out.iterdir()) if path.name not in ours and path.name[0] != "."]
    if strangers:
        raise UserError(f"`out={out}` holds {strangers[0]}, which is none of the zoo's: name an empty or a new folder")
    return {name: entry for name, entry in known.items() if (out / entry["archive"]).exists()}


def write_listing(out: Path, entries: dict[str, dict]) -> None:
    """Write zoo.json and SHA256SUMS.

    Args:
        out: The folder of the archives.
        entries: What `pack` says of each, by the model's name.
    """
    ordered = dict(sorted(entries.items()))
    write_whole(out / LISTING, (json.dumps(ordered, indent=2) + "\n").encode())
    sums = "".join(f"{entry['sha256']}  {entry['archive']}\n" for entry in ordered.values())
    write_whole(out / SUMS, sums.encode())
