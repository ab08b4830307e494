"""Checks a data set image by image, writes it as record files, and reads them."""

from tfdml.data.records.reader import RecordImages
from tfdml.data.records.writer import RecordSettings, check, plan, prepare

__all__ = ["RecordImages", "RecordSettings", "check", "plan", "prepare"]
