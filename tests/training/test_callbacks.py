"""What the monitor of a training run prints."""

import types

import pytest

from tfdml.training import callbacks


def test_a_line_of_progress_counts_steps_epochs_and_the_time_that_is_left(monkeypatch):
    lines = []
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: 100.0)
    monkeypatch.setattr(
        callbacks.logging, "info", lambda text, *values: lines.append(text % values)
    )
    # Five steps in ten seconds, and 4 and 6 seconds after the steps of an epoch.
    monitor = types.SimpleNamespace(
        _experiment=types.SimpleNamespace(epochs=3),
        _compiled=90.0,
        _steps_timed=5,
        _closings=[4.0, 6.0],
        step=12,
        steps_per_epoch=10,
    )
    callbacks.TrainingMonitor._show_progress(monitor, 0.25)
    # 18 steps, and the ends of two epochs.
    (line,) = lines
    assert line == "step 12 of 30, epoch 2 of 3: loss 0.25, 2 s a step, about 0:00:46 left"
    assert monitor._next_line > 100.0


@pytest.mark.parametrize(
    ("step", "within", "epoch"),
    [(20, False, None), (30, False, 2), (33, False, None), (33, True, 3)],
)
def test_an_epoch_that_a_stop_cut_is_closed_at_its_end_or_when_asked(step, within, epoch):
    closed = []
    monitor = types.SimpleNamespace(
        records=[{"step": 20}],
        step=step,
        steps_per_epoch=10,
        model=types.SimpleNamespace(get_metrics_result=dict),
        on_train_begin=lambda: None,
        on_train_end=lambda: None,
        on_epoch_end=lambda number, logs: closed.append(number),
    )
    callbacks.TrainingMonitor.close_epoch(monitor, within)
    assert closed == ([] if epoch is None else [epoch])
