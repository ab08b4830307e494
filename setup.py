"""Puts the flag files, the files that serve a model and the built pages into the package of a
wheel, and the links of README below the `url` of setup.cfg; everything else is in setup.cfg."""

import configparser
import pathlib
import re
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).parent
# Folder of a checkout: its name in the package, as `tfdml.version.package_folder` finds it.
FOLDERS = {"configs": "configs", "export": "serving", "site": "site"}


def readme() -> str:
    """Return README.md for a reader without a checkout: a link to a file is one to the repository.

    Pictures are read from `raw`, all else from `blob`, at the tag of the version.
    """
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    url = settings["metadata"]["url"].rstrip("/")
    text = (ROOT / "tfdml" / "version.py").read_text(encoding="utf-8")
    version = re.search(r'__version__ = "(.+)"', text)[1]
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    page = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{url}/raw/v{version}/", page)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\1{url}/blob/v{version}/", page)


class BuildWithFolders(build_py):
    """Builds the packages, and copies the folders that are there."""

    def run(self):
        """Build; an editable install finds the folders in the checkout."""
        super().run()
        if self.editable_mode:
            return
        unwanted = shutil.ignore_patterns("*.md", "__pycache__", "*.map", "sitemap.xml*")
        for name, in_package in FOLDERS.items():
            if (ROOT / name).is_dir():
                target = pathlib.Path(self.build_lib, "tfdml", in_package)
                shutil.copytree(ROOT / name, target, ignore=unwanted, dirs_exist_ok=True)


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWithFolders}, long_description=readme())
