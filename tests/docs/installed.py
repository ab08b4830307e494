"""The commands of the pages that a new user follows, as they run in an empty folder, on small
data."""

from __future__ import annotations

import pathlib
import re
import shlex

from tests.docs.pages import ROOT, blocks, command_of, joined_lines
from tests.docs.stand_ins import write_photo, write_photos

#: Quickstart and the how-to pages with commands, or the section of a page after `#`.
PAGES = (
    "docs/quickstart.md",
    "docs/shop.md",
    "docs/verification.md",
    "docs/backbones.md#Fine-tune a foundation model",
    "docs/export.md#Run on a phone",
    "export/README.md",
)
#: What lines hold that are not run: they install, are of a checkout, start or ask a server, are of
#: a Ray cluster (tests/cluster has one), or need images that tests/cli/test_evaluate.py has.
NOT_RUN = re.compile(
    r"pip install|make |client\.py|curl |tensorflow_model_server|tfdml serve|docker |kubectl |"
    r"ray://|ray start|RAY_AUTH_MODE|--known=|--watch=|--set_pairs="
)
# Put behind a command that trains or audits; the last value of a flag counts.
FEW_STEPS = "--classes_per_batch=2 --images_per_class=2 --epochs=1 --steps_per_epoch=2"
SMALL = "--backbone=conv4(width=8) --weights=none --resize=32 --image_size=28"


def write_files(folder: pathlib.Path) -> None:
    """Write the reader's own files that the pages name."""
    # So many that a tenth of the training classes are two, and more than 8 images.
    write_photos(folder / "photos", classes=[f"{i:02}" for i in range(40)], images=6)
    for path in (folder / "queries" / "car.jpg", folder / "car.jpg"):
        path.parent.mkdir(exist_ok=True)
        write_photo(path)


def commands(page: str) -> list[list[str]]:
    """Return the subcommands of a page, made small."""
    name, _, section = page.partition("#")
    lines = []
    for block in blocks(ROOT / name):
        is_shell = block.language in ("", "bash") and section in ("", block.heading)
        if is_shell:
            lines += map(command_of, joined_lines(block.code))
    lines = [line for line in lines if line and not NOT_RUN.search(line)]
    others = [line for line in lines if not line.startswith(("tfdml", "#", "--"))]
    assert not others, f"{page}: neither run nor named: {others}"
    return [made_small(shlex.split(line)[1:]) for line in lines if line.startswith("tfdml")]


def made_small(words: list[str]) -> list[str]:
    """Return a subcommand that does on small data, without a download, what the page's does."""
    given = " ".join(words)
    words = [word.replace("hub:dinov2", "hub:presets/dinov2") for word in words]
    if words[0] == "audit":
        words += SMALL.split()
    # A final model has the settings of the measured run.
    elif words[0] == "train" and "--final_of" not in given:
        own = f"{SMALL} --batch_norm=train"
        network = "--image_size=32 --resize=36" if "hub:" in given else own
        words += f"{network} {FEW_STEPS}".split()
    on_glyphs = "quickstart.flags" in given or "--dataset=glyphs" in given
    if words[0] in ("train", "embed") and on_glyphs:
        words.append("--dataset_options=images_per_class=4, size=32")
    # A network that has hardly been trained loses what a better one keeps.
    if words[0] == "export" and "--run_dir" in given:
        words += ["--min_cosine=-1", "--max_recall_drop=1"]
    return words
