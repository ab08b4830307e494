"""The version of tfdml, kept apart so that packaging reads it without TensorFlow; and those of
other packages."""

import contextlib
from collections.abc import Iterable

__version__ = "0.1.0"


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    import importlib.metadata

    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
