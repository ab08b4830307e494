"""The run of the tests of the commands."""

from tests.cli.conftest import command, finished_run, tiny_flags

__all__ = ["command", "finished_run", "tiny_flags"]
