"""Checks a data set image by image and writes it as record files."""

from tfdml.data.preparing.examining import find_faults
from tfdml.data.preparing.job import check, plan, prepare
from tfdml.data.preparing.settings import Settings

__all__ = ["Settings", "check", "find_faults", "plan", "prepare"]
