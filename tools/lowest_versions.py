"""Prints the lowest version of each required package that setup.cfg allows, as constraints of pip.

python -m tools.lowest_versions > lowest.txt && pip install tfdml -c lowest.txt
"""

from __future__ import annotations

import configparser
import pathlib

from packaging.requirements import Requirement

SETUP = pathlib.Path(__file__).resolve().parents[1] / "setup.cfg"


def lowest_versions() -> list[str]:
    """Return `name==version` of each required package; one without a lower bound is left to pip."""
    setup = configparser.ConfigParser()
    setup.read(SETUP)
    lines = setup["options"]["install_requires"].strip().splitlines()
    required = [Requirement(line) for line in lines if not line.startswith("#")]
    return [
        f"{each.name}=={bound.version}"
        for each in required
        for bound in each.specifier
        if bound.operator in (">=", "==")
    ]


if __name__ == "__main__":
    print("\n".join(lowest_versions()))
