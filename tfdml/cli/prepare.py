"""Download a data set, check every image, and write a copy of it with small images.

  tfdml prepare --dataset=cub200 --data_dir=/data --download --check_only
  tfdml prepare --dataset=sop --data_dir=/data --out=/data/sop_256 --shrink=256
  tfdml train --dataset=list --data_dir=/data/sop_256/images.csv --run_dir=runs/sop ...

The copy is a folder of JPEGs and a list of them, images.csv. It appears when it is complete. tfdml audit finds
duplicates.
"""

import os
import time

from tfdml import data
from tfdml.cli.command_line import Command, Flags, Progress
from tfdml.data import preparation
from tfdml.data.catalog import SPLITS
from tfdml.data.decoding import DECODER_LIMIT
from tfdml.effects import Effect, both, either, needs
from tfdml.errors import UserError
from tfdml.expressions import parse_arguments

_READING = either(needs("out"), needs("check_only"))
_WRITING = Effect(lambda values: not values["check_only"], "a command without --check_only, which writes nothing")
_MEGABYTE = 2**20

FLAGS = Flags()
FLAGS.define("dataset", "", "Data set, as in tfdml train.")
FLAGS.define("data_dir", "", "Where the data set lies unpacked, or is to go.")
FLAGS.define("dataset_options", "", "Options of the data set, as in tfdml train.", effect=_READING)
FLAGS.define("out", "", "Folder to write: new or empty.", effect=_WRITING)
_SHRINK = "Pixels of the shorter side in --out; smaller images are copied as they are. 0: all are."
FLAGS.define("shrink", 0, _SHRINK, effect=both(_WRITING, needs("out")))
_BAD = "End if an image is bad, or leave the bad ones out."
FLAGS.define("bad_images", "error", _BAD, ["error", "skip"], effect=_READING)
_PIXELS = "An image whose header states more is bad, and is not decoded."
FLAGS.define("max_pixels", DECODER_LIMIT, _PIXELS, effect=_READING)
FLAGS.define("download", False, "First download what is missing, and check it.")
FLAGS.define("check_only", False, "Check the images; write nothing.")
FLAGS.define("dry_run", False, "Say what would be done; read no image, write nothing.")


def prepare(values: Flags) -> None:
    """Do what the flags say."""
    values.require("dataset")
    if values.download:
        _download(values)
    if not (values.out or values.check_only):
        if values.download:
            return
        raise UserError("--out is missing: name the folder for the copy, or pass --check_only")

    options = parse_arguments(values.dataset_options, "--dataset_options")
    splits = {name: data.load(values.dataset, values.data_dir or None, name, **options) for name in SPLITS}
    if values.dry_run:
        for split, dataset in splits.items():
            print(f"{split}: {len(dataset):,} images of {dataset.num_classes:,} classes")
        print("nothing was written (--dry_run)")
        return
    out = os.path.expanduser(values.out)
    started = time.perf_counter()
    with Progress() as progress:
        if values.check_only:
            faults = preparation.check_images(splits, values.max_pixels, progress.images)
        else:
            arguments = (values.shrink, values.bad_images, values.max_pixels, progress.images)
            faults = preparation.prepare(splits, out, *arguments)
    for split, dataset in splits.items():
        print(f"{split}: {len(dataset) - len(faults[split]):,} of {len(dataset):,} images")
        for fault in faults[split]:
            print("  " + " ".join(str(fault).split()))
    print(preparation.bad_images_in_words(splits, faults))
    seconds = time.perf_counter() - started
    if not values.check_only:
        path = os.path.join(out, preparation.LIST)
        print(f"written to {out} in {seconds:,.1f} s; use it with --dataset=list --data_dir={path}")
        return
    print(f"checked in {seconds:,.1f} s")
    count = sum(map(len, faults.values()))
    if count and values.bad_images == "error":
        raise UserError(f"{count:,} images are bad, as listed; mend or remove them, or pass --bad_images=skip")


def _download(values: Flags) -> None:
    values.require("data_dir")
    name, data_dir = values.dataset, values.data_dir
    if values.dry_run:
        for file in preparation.DOWNLOADS.get(name, ()):
            print(f"would fetch {file.url} ({file.size / _MEGABYTE:,.0f} MB) to {data_dir}, unless it is there")
        return
    with Progress() as progress:
        new = preparation.download(name, data_dir, progress.bytes)
    print(f"downloaded {', '.join(new)}" if new else f"{name}: all is in {data_dir} already")


COMMAND = Command("prepare", prepare, FLAGS, __doc__)
