"""Download a data set, check every image, and write a copy of it, with small images where asked.

  tfdml prepare --dataset=cub200 --data_dir=/data --download --check_only
  tfdml prepare --dataset=sop --data_dir=/data --out=/data/sop_256 --shrink=256
  tfdml train --dataset=list --data_dir=/data/sop_256/images.csv --run_dir=runs/sop ...

The copy is a folder of JPEGs and a list of them, images.csv. It appears when it is complete. tfdml
audit finds duplicates.
"""

import dataclasses
import os
import time
from typing import ClassVar

from tfdml.cli.command_line import Command, CommandFlags, Flags, Progress
from tfdml.data.limits import DECODER_LIMIT
from tfdml.errors import UserError, counted
from tfdml.expressions import Arguments
from tfdml.options import option

_READING = "out or check_only"
_WRITING = "no check_only"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareFlags(CommandFlags):
    """Which data set is prepared, and how."""

    title: ClassVar[str] = "Which data set is prepared, and how"

    dataset: str = option(help="Data set, as in tfdml train.")
    data_dir: str = option("", help="Where the data set lies unpacked, or is to go.")
    dataset_options: Arguments = option(
        Arguments(), requires=_READING, help="Options of the data set, as in tfdml train."
    )
    out: str = option("", requires=_WRITING, help="Folder to write: new or empty.")
    shrink: int = option(
        0,
        requires=f"{_WRITING} and out",
        help="Pixels of the shorter side in --out; smaller images are copied as they are. 0: all "
        "are.",
    )
    bad_images: str = option(
        "error",
        words=("error", "skip"),
        requires=_READING,
        help="End if an image is bad, or leave the bad ones out.",
    )
    max_pixels: int = option(
        DECODER_LIMIT,
        requires=_READING,
        help="An image whose header states more is bad, and is not decoded.",
    )
    download: bool = option(False, help="First download what is missing, and check it.")
    check_only: bool = option(False, help="Check the images; write nothing.")


def prepare(flags: PrepareFlags) -> None:
    """Do what the flags say."""
    from tfdml import data
    from tfdml.data import preparation
    from tfdml.data.catalog import SPLITS

    if flags.download:
        _download(flags)
    if not (flags.out or flags.check_only):
        if flags.download:
            return
        raise UserError("is missing: name the folder for the copy, or pass --check_only", out=...)

    options = flags.dataset_options
    splits = {
        name: data.load(flags.dataset, flags.data_dir or None, name, **options) for name in SPLITS
    }
    out = os.path.expanduser(flags.out)
    started = time.perf_counter()
    with Progress() as progress:
        if flags.check_only:
            faults = preparation.check_images(splits, flags.max_pixels, progress.images)
        else:
            arguments = (flags.shrink, flags.bad_images, flags.max_pixels, progress.images)
            faults = preparation.prepare(splits, out, *arguments)
    for split, dataset in splits.items():
        good = len(dataset) - len(faults[split])
        print(f"{split}: {good:,} of {len(dataset):,} images are good")
        for fault in faults[split]:
            print("  " + " ".join(str(fault).split()))
    print(preparation.bad_images_in_words(splits, faults))
    seconds = time.perf_counter() - started
    if not flags.check_only:
        path = os.path.join(out, preparation.LIST)
        print(f"written to {out} in {seconds:,.1f} s; use it with --dataset=list --data_dir={path}")
        return
    print(f"checked in {seconds:,.1f} s")
    count = sum(map(len, faults.values()))
    if count and flags.bad_images == "error":
        raise UserError(
            f"{counted(count, 'image', 'are')} bad, as listed; mend or remove them, or pass "
            "--bad_images=skip"
        )


def _download(flags: PrepareFlags) -> None:
    from tfdml.data import preparation

    if not flags.data_dir:
        raise UserError("is missing", data_dir=...)
    name, data_dir = flags.dataset, flags.data_dir
    with Progress() as progress:
        new = preparation.download(name, data_dir, progress.bytes)
    print(f"downloaded {', '.join(new)}" if new else f"{name}: all is in {data_dir} already")


COMMAND = Command("prepare", prepare, Flags(PrepareFlags), __doc__)
