"""Check every image of a data set, and pack it into record files for large or remote data.

  tfdml prepare --dataset=cub200 --data_dir=/data --download --check_only
  tfdml prepare --dataset=sop --data_dir=/data --out=/data/sop_records --shrink=256
  tfdml prepare --dataset=folder --data_dir=photos --out=gs://bucket/photos --bad_images=skip
  tfdml prepare --verify --out=/data/sop_records        compare the files with their checksums
  tfdml train --dataset=records --data_dir=/data/sop_records --run_dir=runs/sop ...

Interrupted, the same command resumes where it stopped. The folder holds manifest.json (written last), *.tar,
*.parquet and, where there are any, bad_images.txt. tfdml audit finds duplicates.
"""

import os
import time
from collections.abc import Mapping

from tfdml import data
from tfdml.cli.command_line import Command, Flags, Progress
from tfdml.data import download, records
from tfdml.effects import Effect, both, either, needs
from tfdml.errors import UserError
from tfdml.training.expressions import parse_arguments

FLAGS = Flags()
FLAGS.define("dataset", "", "Data set, as in tfdml train.")
FLAGS.define("data_dir", "", "Where the data set lies unpacked, or is to go.")
FLAGS.define("dataset_options", "", "Options of the data set, as in tfdml train.")
FLAGS.define("out", "", "Folder to write: new, empty, or begun by this command.")
FLAGS.define("splits", ["train", "test"], "Splits to prepare.")
FLAGS.define_settings(records.RecordSettings)
FLAGS.define("download", False, "First download what is missing, with resume and checksum.")
FLAGS.define("check_only", False, "Check the images; write nothing.")
FLAGS.define("verify", False, "Compare the record files in --out with their checksums.")
FLAGS.define("dry_run", False, "Say what would be done; read no image, write nothing.")

_NOT_VERIFYING = Effect(lambda given: not given["verify"], "a command without --verify, which reads --out alone")
_READING = both(_NOT_VERIFYING, either(needs("out"), needs("check_only")))
_WRITING = both(
    _NOT_VERIFYING, needs("out"), Effect(lambda given: not given["check_only"], "a command without --check_only")
)
_MEGABYTE = 2**20


def prepare(values: Flags) -> None:
    """Do what the flags say."""
    if not values.splits:
        raise UserError("--splits= names no split: write train, test, or train,test")
    if values.verify:
        values.require("out")
        _verify(values.out)
        return
    values.require("dataset")
    if values.download:
        _download(values)
    if not (values.out or values.check_only):
        if values.download:
            return
        raise UserError("--out is missing: name the folder for the record files, or pass --check_only")

    settings = values.settings(records.RecordSettings)
    options = parse_arguments(values.dataset_options, "--dataset_options")
    if not {*values.splits} <= {"train", "test"}:
        raise UserError(f"--splits={','.join(values.splits)}: there is only train and test")
    splits = {name: data.load(values.dataset, values.data_dir or None, name, **options) for name in values.splits}
    if values.dry_run:
        for split, (images, size, starts) in records.plan(splits, settings).items():
            print(f"{split}: {images:,} images, {size / _MEGABYTE:,.1f} MB, in {len(starts)} shards")
        print("nothing was written (--dry_run)")
        return
    out = os.path.expanduser(values.out)
    started = time.perf_counter()
    with Progress() as progress:
        if values.check_only:
            reports = records.check(splits, settings, progress.images)
        else:
            source = {"dataset": values.dataset, "data_dir": values.data_dir, "options": options}
            reports = records.prepare(splits, out, settings, source, progress.images)
    if not reports:
        print(f"{out} is finished already: nothing to do")
        return
    _print_reports(reports, values.check_only)
    seconds = time.perf_counter() - started
    if not values.check_only:
        print(f"written to {out} in {seconds:,.1f} s; use it with --dataset=records --data_dir={out}")
        return
    print(f"checked in {seconds:,.1f} s")
    faults = sum(len(found.faults) for found in reports.values())
    if faults and values.bad_images == "error":
        raise UserError(f"{faults:,} images are bad, as listed; mend or remove them, or pass --bad_images=skip")


def _download(values: Flags) -> None:
    values.require("data_dir")
    name, data_dir = values.dataset, values.data_dir
    if values.dry_run:
        for file in download.DOWNLOADS.get(name, ()):
            print(f"would fetch {file.url} ({file.size / _MEGABYTE:,.0f} MB) to {data_dir}, unless it is there")
        return
    with Progress() as progress:
        new = download.download(name, data_dir, progress.bytes)
    print(f"downloaded {', '.join(new)}" if new else f"{name}: all is in {data_dir} already")


def _verify(out: str) -> None:
    with Progress() as progress:
        manifest = records.verify(os.path.expanduser(out), lambda *at: progress.bytes("verifying", *at))
    for split, about in manifest["splits"].items():
        shards = len(about["shards"])
        print(f"{split}: {about['images']:,} images of {about['classes']:,} classes in {shards} shards: sound")


def _print_reports(reports: Mapping[str, records.SplitReport], check_only: bool) -> None:
    for split, found in reports.items():
        size = sum(shard["bytes"] for shard in found.files.values())
        written = f", {size / _MEGABYTE:,.1f} MB in {len(found.files)} shards" if not check_only else ""
        resumed = f" ({found.resumed} kept from an earlier run)" if found.resumed else ""
        print(f"{split}: {len(found.kept):,} of {len(found.dataset):,} images{written}{resumed}")
        for fault in found.faults if check_only else ():
            print(f"  {records.one_line(str(fault))}")
    print(records.bad_images_in_words(reports))


COMMAND = Command(
    "prepare",
    prepare,
    FLAGS,
    __doc__,
    effects={
        **dict.fromkeys(("dataset", "data_dir", "download", "check_only"), _NOT_VERIFYING),
        **dict.fromkeys(("dataset_options", "splits", "bad_images", "max_pixels"), _READING),
        "out": Effect(lambda given: not given["check_only"], "a command without --check_only, which writes nothing"),
        "shrink": _WRITING,
        "shrink_format": both(_WRITING, needs("shrink")),
        "shard_mb": _WRITING,
    },
)
