"""A run that an alarm has ended."""

from tests.cli import commands
from tfdml.training.run import trainer
from tfdml.training.watching.alarms import Halted


def test_its_status_is_its_own(monkeypatch, tmp_path):
    def halted(*arguments, **options):
        raise Halted("ended by --stop_on=collapse: collapse at step 7")

    monkeypatch.setattr(trainer, "train", halted)
    status, _, errors = commands.run("train", f"--run_dir={tmp_path / 'run'}", "--stop_on=collapse")
    assert status == 3
    assert errors == "train: ended by --stop_on=collapse: collapse at step 7\n"
