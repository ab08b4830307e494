"""Signals: at once or at the next check, and nothing stays behind."""

import os
import signal

import numpy as np
import pytest

from tfdml.training.interruption import SIGNALS, Interrupted, Interruption
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
    monkeypatch.setattr(
        Processes, "gather", lambda self, rows: np.array([*received[: self.index], *rows, 0])
    )
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
