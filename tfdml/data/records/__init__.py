"""Checks a data set image by image and writes it as record files."""

from tfdml.data.records.settings import RecordSettings
from tfdml.data.records.workers import find_faults
from tfdml.data.records.writer import check, plan, prepare

__all__ = ["RecordSettings", "check", "find_faults", "plan", "prepare"]
