"""Byte-identical copies within a data set and across its splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdml.data.dataset import ImageDataset


def find_duplicates(splits: Mapping[str, tuple[ImageDataset, Sequence[str]]]) -> list[dict[str, Any]]:
    """Groups images whose bytes are the same.

    Args:
        splits: By name, the images and the SHA-256 of each; images with an empty one are passed over.

    Returns:
        One dict per group of two or more, in order of their first image: `sha256`, `images` (each with `split`,
        `name`, `label` and `class`), `labels_differ` and `across_splits`.

    Example:
        >>> groups = find_duplicates({"train": (train, ["a3f5", "07c9", "a3f5"])})
        >>> [image["name"] for image in groups[0]["images"]]
        ['U+10A5/0', 'U+10A5/2']
    """
    members: dict[str, list[tuple[str, int]]] = {}
    for split, (_, digests) in splits.items():
        for index, digest in enumerate(digests):
            if digest:
                members.setdefault(digest, []).append((split, index))
    groups = []
    for digest, places in members.items():
        if len(places) > 1:
            images = [_image(splits[split][0], split, index) for split, index in places]
            groups.append(
                {
                    "sha256": digest,
                    "images": images,
                    "labels_differ": len({image["label"] for image in images}) > 1,
                    "across_splits": len({split for split, _ in places}) > 1,
                }
            )
    return groups


def describe_duplicates(groups: Sequence[Mapping[str, Any]], named: int = 3) -> list[str]:
    """The groups in a few lines of text.

    Args:
        groups: What `find_duplicates` returned.
        named: How many groups of a kind to name.

    Example:
        >>> describe_duplicates([])
        ['byte-identical copies: none']
    """
    if not groups:
        return ["byte-identical copies: none"]
    extra = sum(len(group["images"]) - 1 for group in groups)
    lines = [f"byte-identical copies: {extra:,} images repeat another, in {len(groups):,} groups"]
    if not any(group["across_splits"] for group in groups):
        lines.append("  none lies across the train/test split")
    for key, what in (
        ("across_splits", "ACROSS THE TRAIN/TEST SPLIT: what is trained on is tested on (see `drop_copies='across'`)"),
        ("labels_differ", "with different labels: at least one of them must be wrong"),
    ):
        chosen = [group for group in groups if group[key]]
        if chosen:
            lines.append(f"  {len(chosen):,} groups {what}")
            lines += [f"    {' = '.join(_label(image) for image in group['images'])}" for group in chosen[:named]]
            if len(chosen) > named:
                lines.append(f"    and {len(chosen) - named:,} more")
    return lines


def _image(dataset: ImageDataset, split: str, index: int) -> dict[str, Any]:
    label = int(np.asarray(dataset.labels)[index])
    return {
        "split": split,
        "name": dataset.images.name(index),
        "label": label,
        "class": dataset.class_names[label],
    }


def _label(image: Mapping[str, Any]) -> str:
    return f"{image['name']} ({image['split']}, {image['class']})"
