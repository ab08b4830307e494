"""The commands of the pages that a new user follows, run by an installed tfdml in an empty folder,
on small data."""

from __future__ import annotations

import pathlib
import re
import shlex

from tests.docs.examples import ROOT, blocks
from tests.docs.files import write_photo, write_photos
from tests.docs.test_commands import joined_lines

#: README, quickstart and the how-to pages with commands, or the section of a page after `#`.
PAGES = (
    "README.md",
    "docs/quickstart.md",
    "docs/verification.md",
    "docs/backbones.md#Fine-tune a foundation model",
    "docs/export.md#Run on a phone",
    "docs/galleries.md#Search products by an image",
    "docs/two_hosts.md",
    "export/README.md",
)
#: Lines that are not run, by what they hold, and why.
NOT_RUN = {
    "pip install": "fetches packages; the wheel is installed before",
    "make ": "is of a checkout",
    "client.py": "is of a checkout, and needs a server",
    "curl ": "needs a server",
    "tensorflow_model_server": "is a server",
    "--known=": "needs folders of visits and of strangers; tests/cli/test_evaluate.py has some",
    "tfdml serve": "is a server; tests/web asks one",
    "docker ": "starts a server",
    "kubectl ": "starts a server",
    "ray://": "needs a cluster; tests/cluster trains on a local one",
    "RAY_AUTH_MODE": "is of a cluster",
    "ray start": "is of a cluster",
}
_LINKS = {
    "runs/cars": "runs/glyphs",
    "runs/cars_jrd": "runs/glyphs",
    "presets/dinov2_small": "preset",
}
# Put behind a training command; the last value of a flag counts.
FEW_STEPS = ["--classes_per_batch=2", "--images_per_class=2", "--epochs=1", "--steps_per_epoch=2"]
SHORT = [
    "--backbone=conv4(width=8)",
    "--weights=none",
    "--batch_norm=train",
    "--resize=32",
    "--image_size=28",
    *FEW_STEPS,
]


def write_files(folder: pathlib.Path, finished: pathlib.Path) -> None:
    """Write the reader's own files that the pages name, and link what `finished` holds."""
    # So many that a tenth of the training classes are two, and more than 8 images.
    write_photos(folder / "photos", classes=[f"{i:02}" for i in range(40)], images=6)
    (folder / "queries").mkdir()
    write_photo(folder / "queries" / "car.jpg")
    write_photo(folder / "car.jpg")
    for path, name in _LINKS.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).symlink_to(finished / name, target_is_directory=True)


def commands(page: str) -> tuple[list[list[str]], dict[str, str]]:
    """Return the subcommands of a page, made small, and the lines that are not run with the
    reason."""
    run, left_out = [], {}
    name, _, section = page.partition("#")
    lines = (ROOT / name).read_text().splitlines()
    first = lines.index(f"## {section}") if section else 0
    last = next(
        (i for i, line in enumerate(lines) if i > first and section and line.startswith("## ")),
        len(lines),
    )
    for block in blocks(ROOT / name):
        if block.language not in ("", "bash") or not first <= block.line <= last:
            continue
        for line in joined_lines(block.code):
            text = re.split(r"\s{3,}|\s#\s", line.strip())[0]
            reason = next((why for part, why in NOT_RUN.items() if part in text), "")
            if "TF_CONFIG" in block.code:
                reason = (
                    "needs two hosts; tests/training/worker_runs.py trains with several processes"
                )
            if reason:
                left_out[text] = reason
            elif text.startswith("tfdml"):
                run.append(made_small(shlex.split(text)[1:]))
            else:
                assert text.startswith(("#", "--")) or not text, (
                    f"{page}:{block.line}: neither run nor named: {text}"
                )
    return run, left_out


def made_small(words: list[str]) -> list[str]:
    """Return a subcommand that does on small data, without a download, what the page's does."""
    given = " ".join(words)
    words = [word.replace("hub:dinov2", "hub:presets/dinov2") for word in words]
    if words[0] == "train":
        words += SHORT if "hub:" not in given else [*FEW_STEPS, "--image_size=32", "--resize=36"]
    if words[0] in ("train", "embed") and (
        "quickstart.flags" in given or "--dataset=glyphs" in given
    ):
        words.append("--dataset_options=images_per_class=4, size=32")
    # A network that has hardly been trained loses what a better one keeps.
    return words + (
        ["--min_cosine=-1", "--max_recall_drop=1"]
        if words[0] == "export" and "--run_dir" in given
        else []
    )
