"""Signals: at once or at the next check, and nothing stays behind; and callbacks of the user's own."""

import os
import signal
import sys

import numpy as np
import pytest

from tests.training import runs
from tfdml.errors import UserError
from tfdml.training.callbacks import SIGNALS, Interrupted, Interruption, logger_of
from tfdml.training.workers import Processes


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_raised_where_it_finds_the_program(number):
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as stop, Interruption():
        os.kill(os.getpid(), number)
    assert stop.value.status == 128 + number
    assert str(stop.value) == f"stopped by {number.name}"
    assert signal.getsignal(number) is before


def test_a_deferred_signal_waits_for_the_next_check():
    reached = []

    def step(interruption):
        with interruption.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append("the end of the step")
            interruption.check()
            reached.append("the next step")

    with Interruption() as interruption, pytest.raises(Interrupted):
        step(interruption)
    assert reached == ["the end of the step"]


def test_a_signal_to_one_of_several_workers_is_one_to_all(monkeypatch):
    received = [0, signal.SIGTERM, 0]
    monkeypatch.setattr(Processes, "gather", lambda self, rows: np.array([*received[: self.index], *rows, 0]))
    last = Interruption()
    last.agree(Processes(2, ("host",) * 3))
    assert last.received == signal.SIGTERM
    nobody = Interruption()
    nobody.agree(Processes(0, ("host",) * 3))
    nobody.agree(Processes())
    assert nobody.received is None


def test_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGHUP)
        assert interruption.received is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


_LOGGER = """
import keras

class Logger(keras.callbacks.Callback):
    epochs = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))

def nothing():
    pass
"""


@pytest.fixture
def own_logger(tmp_path, monkeypatch):
    """A module of the working folder that makes a callback."""
    (tmp_path / "my_logging.py").write_text(_LOGGER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("my_logging", None)


def test_a_callback_of_the_users_own_gets_all_numbers_of_every_epoch(own_logger, tmp_path):
    result = runs.train(tmp_path / "run", log_to="my_logging.Logger")
    epochs = sys.modules["my_logging"].Logger.epochs
    assert len(epochs) == runs.EPOCHS
    assert epochs[-1]["test/recall@1"] == result["metrics"]["recall@1"]
    assert {"loss", "train/loss", "learning_rate", "step"} <= set(epochs[-1])
    with pytest.raises(UserError, match=r"--log_to=my_logging.nothing:? makes a NoneType, not a keras.callb"):
        logger_of("my_logging.nothing")
