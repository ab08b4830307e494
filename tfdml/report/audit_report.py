"""The page of `tfdml audit`: duplicates, labels, outliers, classes and picks, with their images."""

import os
import types
from collections.abc import Callable

import numpy as np

from tfdml.audit import Audit, Finding
from tfdml.report.rendering import write_page

# How much of each kind the page has; the CSV files have all.
_GROUPS, _LABELS, _OUTLIERS, _CLASSES, _PICKS = 40, 48, 24, 24, 48
_IN_A_GROUP, _OF_A_CLASS = 6, 6


def write_audit(
    path: str | os.PathLike, audit: Audit, name: str, picture: Callable[[int], np.ndarray] | None = None
) -> None:
    """Write the page of an audit.

    Args:
        path: Where to write; the folder is made if it is missing.
        audit: What was found.
        name: What the images are called.
        picture: From a row to its image (H, W, 3) uint8; None: the page has names only.

    Raises:
        OSError: The page cannot be written.
        UserError: An image cannot be read.

    Example:
        >>> table = tfdml.embeddings.ImageTable.of([test])
        >>> write_audit("audit.html", tfdml.audit.audit(embeddings, table), "photos", test.images.picture)
    """
    table = audit.table
    images = types.SimpleNamespace(picture=picture, name=lambda row: table.names[row])
    write_page(
        path,
        "audit.html",
        title=f"{name}: audit",
        audit=audit,
        dataset=types.SimpleNamespace(images=images, labels=table.labels, class_names={-1: "–", **table.class_names}),
        groups=audit.groups()[:_GROUPS],
        counts=audit.counts(),
        in_a_group=_IN_A_GROUP,
        labels=audit.of("label")[:_LABELS],
        outliers=audit.of("outlier")[:_OUTLIERS],
        same=[(finding, _of_class(audit, finding)) for finding in audit.of("same class")[:_CLASSES]],
        scattered=[(finding, _of_class(audit, finding)) for finding in audit.of("scattered class")[:_CLASSES]],
        picks=audit.of("pick")[:_PICKS],
    )


def _of_class(audit: Audit, finding: Finding) -> list[int]:
    """Return rows of some images of the class of a finding, and as many of the other class if there is one."""
    labels = [label for label in (finding.label, finding.other_label) if label >= 0]
    most = _OF_A_CLASS // len(labels)
    return [row for label in labels for row in np.flatnonzero(audit.table.labels == label)[:most].tolist()]
