"""The version of tfdml, kept apart so that packaging reads it without TensorFlow; those of other
packages; and the folders that come with the package."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

__version__ = "0.1.0"


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    import importlib.metadata

    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def package_folder(name: str, in_checkout: str = "") -> Path:
    """Return a folder that comes with tfdml: in the installed package, or next to it in a checkout.

    Args:
        name: Its name in the package, as `setup.py` copies it.
        in_checkout: Its name in a checkout, where it is another.
    """
    package = Path(__file__).parent
    installed_folder = package / name
    if installed_folder.is_dir():
        return installed_folder
    return package.parent / (in_checkout or name)
