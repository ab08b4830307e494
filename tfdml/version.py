"""The version of tfdml, kept apart so that packaging reads it without TensorFlow; and those of other packages."""

import importlib.metadata
from collections.abc import Iterable

__version__ = "0.1.0"


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
