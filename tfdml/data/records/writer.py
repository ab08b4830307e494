"""A preparation: examine every image, write the shards, and the manifest last."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import io
import itertools
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdml import storage
from tfdml.data.dataset import ImageDataset
from tfdml.data.images.faults import ImageError
from tfdml.data.images.record_images import REMEDY
from tfdml.data.records import output_folder as folders
from tfdml.data.records import reader as records
from tfdml.data.records.duplicates import find_duplicates
from tfdml.data.records.report import Report, SplitReport, bad_images_in_words, one_line
from tfdml.data.records.settings import RecordSettings
from tfdml.data.records.shards import cut_into_shards, write_shard
from tfdml.data.records.workers import Progress, WorkerPool
from tfdml.disk_space import require_space
from tfdml.errors import UserError
from tfdml.manifests import Kinds, confined, fields
from tfdml.version import __version__

COPIES = "copies.json"
BAD_IMAGES = "bad_images.txt"
_MEGABYTE = 2**20
_PART: Kinds = {"key": str, "digests": list, "faults": dict, "dropped": list, "shard": (dict, type(None))}
_BEGIN_ANEW = "delete the folder to prepare it again"


def check(
    splits: Mapping[str, ImageDataset], settings: RecordSettings | None = None, progress: Progress = lambda *_: None
) -> Report:
    """Decodes every image and looks for copies; writes nothing.

    Args:
        splits: The data set's splits by name, `"train"` first.
        settings: The preparation's settings.
        progress: Called now and then.

    Returns:
        The bad images and the copies.

    Example:
        >>> check({"train": load("folder", "photos")}).splits["train"].faults
        []
    """
    settings = dataclasses.replace(settings or RecordSettings(), shrink=0)
    reports = {split: SplitReport(dataset) for split, dataset in splits.items()}
    with WorkerPool(sum(map(len, splits.values())), settings, progress) as pool:
        for split, dataset in splits.items():
            for image in pool.examine(dataset.images, 0, len(dataset)):
                reports[split].digests.append("" if image.fault else image.digest)
                if image.fault:
                    reports[split].faults.append(
                        ImageError(image.index, dataset.images.place(image.index), image.fault)
                    )
    return Report(reports, _duplicates(reports))


def plan(splits: Mapping[str, ImageDataset], settings: RecordSettings) -> dict[str, tuple[int, int, int]]:
    """What a preparation would write, without reading an image.

    Args:
        splits: The data set's splits by name.
        settings: The preparation's settings.

    Returns:
        Images, bytes of them as they are now, and shards, by split.

    Example:
        >>> images, image_bytes, shards = plan({"train": load("folder", "photos")}, RecordSettings())["train"]
        >>> images, shards
        (6, 1)
    """
    planned = {}
    for split, dataset in splits.items():
        sizes = [stamp[0] for stamp in dataset.images.stamps()]
        planned[split] = (len(dataset), sum(sizes), len(cut_into_shards(sizes, settings.shard_mb * _MEGABYTE)))
    return planned


def prepare(
    splits: Mapping[str, ImageDataset],
    out: str | os.PathLike,
    settings: RecordSettings | None = None,
    source: Mapping[str, Any] | None = None,
    progress: Progress = lambda *_: None,
) -> Report:
    """Checks a data set and writes it as record files that `load("records", out, split)` reads.

    Interrupted and called again with the same arguments, it keeps the shards that are there whole and goes on. The
    manifest is written last: a folder without it is not yet a data set.

    Args:
        splits: The data set's splits by name, `"train"` first.
        out: A new or empty folder, local or on any file system that `tf.io.gfile` knows.
        settings: How images are checked and stored.
        source: Where the data set came from (`data_dir`, `options`), for the manifest.
        progress: Called now and then.

    Returns:
        What was found and written.

    Raises:
        UserError: Images are bad and `bad_images` is `"error"`; the folder holds something else, is being written by
            another process, or is full.

    Example:
        >>> splits = {split: load("cars196", "data/cars196", split) for split in ("train", "test")}
        >>> report = prepare(splits, "records/cars196_256", RecordSettings(shrink=256))
        >>> load("records", "records/cars196_256", "train").num_classes
        98
    """
    out, settings = os.fspath(out), settings or RecordSettings()
    folders.claim(out)
    with folders.locked(out):
        job = _job(splits, settings)
        manifest = folders.read_json(os.path.join(out, records.MANIFEST))
        if manifest:
            fields(manifest, {"job": dict}, os.path.join(out, records.MANIFEST), REMEDY)
            folders.require_same_job(out, manifest["job"], job)
            for split in splits:
                records.read(out, split)
            _tidy(out)
            return Report({split: SplitReport(dataset) for split, dataset in splits.items()}, [], finished_before=True)
        report = _write(splits, out, settings, job, progress)
        folders.write_json(os.path.join(out, COPIES), report.duplicates)
        _report_bad_images(report, out, settings)
        entries = {split: _finish(found, split, out) for split, found in report.splits.items()}
        manifest = {
            **folders.header(),
            "tfdml": __version__,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "dataset": next(iter(splits.values())).name,
            "source": dict(source or {}),
            "job": job,
            "splits": entries,
        }
        folders.write_json(os.path.join(out, records.MANIFEST), manifest)
        _tidy(out)
    return report


def _write(
    splits: Mapping[str, ImageDataset], out: str, settings: RecordSettings, job: dict[str, Any], progress: Progress
) -> Report:
    stamps = {split: dataset.images.stamps() for split, dataset in splits.items()}
    starts = _starts(out, job, stamps, settings)
    reports = {split: SplitReport(dataset) for split, dataset in splits.items()}
    with WorkerPool(sum(map(len, splits.values())), settings, progress) as pool:
        for split, dataset in splits.items():
            excluded = set()
            if settings.drop_copies == "across" and split != "train" and "train" in reports:
                excluded = set(reports["train"].digests) - {""}
            for number, (start, stop) in enumerate(itertools.pairwise([*starts[split], len(dataset)])):
                stem = f"{split}-{number:05d}-of-{len(starts[split]):05d}"
                key = _digest([stamps[split][start:stop], sorted(excluded)])
                part = _part(out, stem, key, settings)
                if part is None:
                    part = _make_part(pool, dataset, (start, stop), excluded, out, stem, key, settings)
                else:
                    reports[split].resumed += 1
                    pool.skip(stop - start)
                found = reports[split]
                found.digests += part["digests"]
                found.faults += [
                    ImageError(int(i), dataset.images.place(int(i)), why) for i, why in part["faults"].items()
                ]
                found.dropped += part["dropped"]
                if part["shard"]:
                    found.shards.append(part["shard"])
    return Report(reports, _duplicates(reports))


def _make_part(
    pool: WorkerPool,
    dataset: ImageDataset,
    extent: tuple[int, int],
    excluded: set[str],
    out: str,
    stem: str,
    key: str,
    settings: RecordSettings,
) -> dict[str, Any]:
    """Examines the images of a shard and writes it, unless bad images are an error."""
    images = list(pool.examine(dataset.images, *extent))
    dropped = [image.index for image in images if not image.fault and image.digest in excluded]
    faults = {str(image.index): image.fault for image in images if image.fault}
    kept = [image for image in images if not image.fault and image.digest not in excluded]
    part = {
        "key": key,
        "digests": ["" if image.fault else image.digest for image in images],
        "faults": faults,
        "dropped": dropped,
        "shard": None,
    }
    if faults and settings.bad_images == "error":
        return part
    if kept:
        part["shard"] = write_shard(out, stem, dataset, kept)
    folders.write_json(os.path.join(out, f"{folders.PROGRESS}-{stem}.json"), part)
    return part


def _part(out: str, stem: str, key: str, settings: RecordSettings) -> dict[str, Any] | None:
    """What an earlier run recorded of a shard, if it is still valid."""
    path = os.path.join(out, f"{folders.PROGRESS}-{stem}.json")
    part = folders.read_json(path)
    if not part:
        return None
    fields(part, _PART, path, _BEGIN_ANEW)
    if part["key"] != key or (part["faults"] and settings.bad_images == "error"):
        return None
    shard = part["shard"]
    for entry in (shard, fields(shard, records.SHARD, path, _BEGIN_ANEW)["index"]) if shard else ():
        fields(entry, records.ENTRY, path, _BEGIN_ANEW)
        if storage.size_of(confined(out, entry["file"], path)) != entry["bytes"]:
            return None
    return part


def _starts(
    out: str, job: dict[str, Any], stamps: Mapping[str, list[tuple[int, int]]], settings: RecordSettings
) -> dict[str, list[int]]:
    """Where the shards begin: as recorded by an earlier run, or divided now and recorded."""
    path = os.path.join(out, folders.JOB)
    stored = folders.read_json(path)
    if stored:
        fields(stored, {"job": dict, "starts": dict}, path, _BEGIN_ANEW)
        folders.require_same_job(out, stored["job"], job)
        fields(stored["starts"], dict.fromkeys(stamps, list), path, _BEGIN_ANEW)
        if any(type(start) is not int for starts in stored["starts"].values() for start in starts):
            raise UserError(f"{path} does not say where the shards begin; {_BEGIN_ANEW}")
        return stored["starts"]
    sizes = {split: [size for size, _ in found] for split, found in stamps.items()}
    if not settings.shrink and not storage.is_remote(out):
        needed = sum(map(sum, sizes.values()))
        require_space(out, needed, "out", "the records", "shrink the images with `shrink`")
    starts = {split: cut_into_shards(found, settings.shard_mb * _MEGABYTE) for split, found in sizes.items()}
    folders.write_json(path, {**folders.header(), "job": job, "starts": starts})
    return starts


def _job(splits: Mapping[str, ImageDataset], settings: RecordSettings) -> dict[str, Any]:
    """What decides the content of the records, to be compared when a preparation goes on."""
    job = {"dataset": next(iter(splits.values())).name, **settings.job()}
    for split, dataset in splits.items():
        digest = hashlib.sha256(json.dumps(sorted(dataset.class_names.items())).encode())
        for column in (dataset.labels, dataset.super_labels, dataset.is_query):
            digest.update(b"none" if column is None else column.tobytes())
        for index in range(len(dataset)):
            digest.update(os.fsencode(dataset.images.name(index)) + b"\0")
        job[f"images of {split}"] = digest.hexdigest()
    return job


def _finish(found: SplitReport, split: str, out: str) -> dict[str, Any]:
    """Writes a split's table; returns its part of the manifest."""
    kept, dataset = found.kept, found.dataset
    if not len(kept):
        raise UserError(f"{dataset.name}: no image of the {split} split is left")
    names = [os.fsencode(dataset.images.name(index)) for index in kept]
    columns = {
        "labels": dataset.labels[kept],
        "names": np.frombuffer(b"".join(names), np.uint8),
        "name_ends": np.cumsum([len(name) for name in names], dtype=np.int64),
    }
    if dataset.super_labels is not None:
        columns["super_labels"] = dataset.super_labels[kept]
    if dataset.is_query is not None:
        columns["is_query"] = dataset.is_query[kept]
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **columns)
    table = buffer.getvalue()
    storage.write_whole(os.path.join(out, f"{split}.npz"), table)
    classes = np.unique(columns["labels"])
    return {
        "images": len(kept),
        "classes": len(classes),
        "class_names": {str(label): dataset.class_names[int(label)] for label in classes},
        "super_classes": None if dataset.super_labels is None else len(np.unique(columns["super_labels"])),
        "queries": None if dataset.is_query is None else int(columns["is_query"].sum()),
        "table": {"file": f"{split}.npz", "bytes": len(table), "sha256": hashlib.sha256(table).hexdigest()},
        "shards": found.shards,
        "bad_images": [{"name": fault.name, "reason": fault.reason} for fault in found.faults],
        "copies_left_out": [dataset.images.name(index) for index in found.dropped],
    }


def _tidy(out: str) -> None:
    """Removes what only an unfinished preparation needs."""
    for name in storage.listing(out):
        if name == folders.JOB or (name.startswith(f"{folders.PROGRESS}-") and name.endswith(".json")):
            storage.remove(os.path.join(out, name))


def _report_bad_images(report: Report, out: str, settings: RecordSettings) -> None:
    path = os.path.join(out, BAD_IMAGES)
    faults = [fault for found in report.splits.values() for fault in found.faults]
    if not faults:
        storage.remove(path)
        return
    text = "".join(f"{one_line(fault.name)}\t{one_line(fault.reason)}\n" for fault in faults)
    storage.write_whole(path, text.encode("utf-8", "surrogateescape"))
    if settings.bad_images == "error":
        raise UserError(
            f"{bad_images_in_words(report)}; all of them are in {path}: fix or remove them and run the same command "
            "again, which keeps the shards that are finished, or leave them out with `bad_images='skip'`"
        )


def _duplicates(reports: Mapping[str, SplitReport]) -> list[dict[str, Any]]:
    return find_duplicates({split: (found.dataset, found.digests) for split, found in reports.items()})


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
