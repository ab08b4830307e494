"""Puts the flag files of `configs` into the package of a wheel; everything else is in setup.cfg."""

import pathlib
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Builds the packages, and copies `configs` to `tfdml/configs`."""

    def run(self):
        """Build; an editable install finds the folder in the checkout."""
        super().run()
        if not self.editable_mode:
            shutil.copytree(
                "configs", pathlib.Path(self.build_lib, "tfdml", "configs"), dirs_exist_ok=True
            )


setup(cmdclass={"build_py": BuildWithConfigs})
