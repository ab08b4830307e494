"""What goes with which backend; who trains with whom, and what processes ask of one another."""

import json
import sys
import types
from typing import ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.training import runs
from tfdml.errors import UserError
from tfdml.training import trainer, workers
from tfdml.training.workers import (
    JaxProcesses,
    Processes,
    TensorFlowWorkers,
    WorkerLost,
    check_backend,
    join,
)

ADDRESSES, COUNT, INDEX = (
    f"KERAS_DISTRIBUTION_{name}" for name in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID")
)


@pytest.mark.parametrize(
    ("backend", "environment", "says"),
    [
        ("torch", {}, "torch"),
        ("jax", {"TF_CONFIG": "{}"}, "TF_CONFIG"),
        ("tensorflow", {COUNT: "2"}, "is for JAX"),
    ],
)
def test_what_means_nothing_on_a_backend_is_refused(backend, environment, says, monkeypatch):
    check_backend()
    monkeypatch.setattr(keras.backend, "backend", lambda: backend)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=says):
        check_backend()


def test_processes_are_named_by_the_environment(monkeypatch):
    assert JaxProcesses.from_environment() == (0, ("",))
    for name, value in ((COUNT, "2"), (ADDRESSES, "localhost:1234"), (INDEX, "1")):
        monkeypatch.setenv(name, value)
    assert JaxProcesses.from_environment() == (1, ("localhost:1234", "process 1"))
    for name, wrong in ((INDEX, "2"), (INDEX, "-1"), (INDEX, "first"), (ADDRESSES, "")):
        with monkeypatch.context() as patch:
            patch.setenv(name, wrong)
            with pytest.raises(UserError, match="are the address of process 0"):
                JaxProcesses.from_environment()


def test_one_process_is_its_own_chief(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    alone = join()
    assert (alone.is_chief, alone.alone, alone.part(7)) == (True, True, slice(0, 7))
    assert alone.gather(np.arange(3)).tolist() == [0, 1, 2]
    assert alone.bytes_of_chief(lambda: b"abc") == b"abc"
    with pytest.raises(UserError, match="mended"), alone.ending_together():
        alone.of_chief(lambda: (_ for _ in ()).throw(UserError("to be mended")))


@pytest.mark.parametrize(("total", "count"), [(7, 3), (3, 3)])
def test_the_parts_of_the_processes_are_the_whole(total, count):
    rows = np.arange(total)
    parts = [rows[Processes(i, ("host",) * count).part(total)] for i in range(count)]
    assert np.concatenate(parts).tolist() == rows.tolist()
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_of_fewer_rows_than_processes_each_has_all():
    parts = [Processes(index, ("host",) * 3).part(2) for index in range(3)]
    assert parts == [slice(0, 2)] * 3


class _Together(Processes):
    """One of several processes, which are asked one after another: each gives what the chief gave
    before."""

    sent: ClassVar[list] = []

    def gather(self, rows):
        if self.is_chief:
            self.sent.append(rows)
            return rows
        return self.sent.pop(0)


def test_all_have_what_the_chief_found_or_its_error():
    def refuse():
        raise UserError("to be mended")

    chief, other = (_Together(index, ("a", "b")) for index in range(2))
    assert (
        chief.of_chief(lambda: {"found": [1, 2.5]})
        == other.of_chief(refuse)
        == json.loads('{"found": [1, 2.5]}')
    )
    for process in (chief, other):
        with pytest.raises(UserError, match="to be mended"):
            process.of_chief(refuse)
    data = bytes(range(250)) * 3
    assert chief.bytes_of_chief(lambda: data) == other.bytes_of_chief(lambda: b"") == data
    assert not _Together.sent


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_rows_of_jax_processes_are_gathered_in_their_order(dtype, monkeypatch):
    """`process_allgather` stacks equal shapes of 32 bits."""
    values = np.arange(2**33, 2**33 + 60).reshape(10, 3, 2).astype(dtype)
    parts = [values[:6], values[6:6], values[6:]]
    waiting = [np.array([[6], [0], [4]], np.int32)]

    def allgather(array):
        assert array.dtype == np.int32
        if waiting:
            return waiting.pop()
        width = array.shape[1]
        stacked = np.zeros((3, 6, width), np.int32)
        for row, part in zip(stacked, parts, strict=True):
            row[: len(part)] = part.reshape(len(part), 6).view(np.int32)
        np.testing.assert_array_equal(array, stacked[0])
        return stacked

    names = "jax", "jax.experimental", "jax.experimental.multihost_utils"
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[names[-1]].process_allgather = allgather
    gathered = JaxProcesses(0, ("a", "b", "c")).gather(parts[0])
    assert gathered.dtype == dtype
    np.testing.assert_array_equal(gathered, values)


def test_a_worker_of_tensorflow_gathers_feeds_its_replicas_and_names_who_is_lost():
    worker = TensorFlowWorkers(1, ("a", "b"), tf.distribute.OneDeviceStrategy("/cpu:0"))
    rows = np.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(worker.gather(rows), rows)
    batches = worker.distribute(tf.data.Dataset.range(8).batch(8), 4)
    assert [batch.numpy().tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    says = r"\(gone\); this is worker 1 of 2. Start all of them"
    with pytest.raises(WorkerLost, match=says), worker.ending_together():
        raise tf.errors.UnavailableError(None, None, "gone")


def test_workers_of_other_settings_or_versions_are_refused(monkeypatch, tmp_path):
    def compare(**changes):
        chief, other = (_Together(index, ("a", "b")) for index in range(2))
        trainer._check_alike(runs.experiment(tmp_path / "chief"), chief)
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "__version__", changes.pop("version", trainer.__version__))
            trainer._check_alike(runs.experiment(tmp_path / "other", **changes), other)

    compare()
    with pytest.raises(UserError, match="--seed=7 on worker 1"):
        compare(seed=7)
    with pytest.raises(UserError, match="install the same version"):
        compare(version="0.0")


def config(cluster, job="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (config({"worker": ["a:1"]}), (0, ("",))),
        (config({"worker": ["a:1", "b:2"]}, index=1), (1, ("a:1", "b:2"))),
        (config({"chief": ["c:3"], "worker": ["a:1"]}), (1, ("c:3", "a:1"))),
        (config({"chief": ["c:3"], "worker": ["a:1"]}, "chief"), (0, ("c:3", "a:1"))),
        ("{", None),
        (config({"worker": ["a:1", "b:2"], "ps": ["c:3"]}), None),
    ],
)
def test_tf_config_says_who_trains_or_is_refused(monkeypatch, text, expected):
    monkeypatch.setenv("TF_CONFIG", text)
    if expected is not None:
        assert TensorFlowWorkers.from_environment() == expected
        return
    with pytest.raises(UserError, match="TF_CONFIG does not say who trains"):
        TensorFlowWorkers.from_environment()


def test_deterministic_training_runs_one_operation_at_a_time_of_graphs_as_they_are(monkeypatch):
    """A rewritten chain of additions is a sum whose order depends on the memory that is free."""
    options, threads, ordered = {}, [], []
    monkeypatch.setattr(tf.config.optimizer, "set_experimental_options", options.update)
    monkeypatch.setattr(tf.config.threading, "set_inter_op_parallelism_threads", threads.append)
    monkeypatch.setattr(workers, "sum_gradients_in_order", lambda: ordered.append(True))
    workers.one_operation_at_a_time()
    assert (options, threads, ordered) == ({"disable_meta_optimizer": True}, [1], [True])
