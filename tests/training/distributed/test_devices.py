"""What goes with which backend."""

import keras
import pytest

from tests.training.runs import experiment
from tfdml import UserError
from tfdml.training.distributed.devices import check_backend, check_same_backend
from tfdml.training.distributed.processes import JaxProcesses, assign_here

ADDRESSES, COUNT, INDEX = (f"KERAS_DISTRIBUTION_{name}" for name in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID"))


def refused(monkeypatch, backend, message, environment=(), **settings):
    with monkeypatch.context() as patched:
        patched.setattr(keras.backend, "backend", lambda: backend)
        for name, value in dict(environment).items():
            patched.setenv(name, value)
        with pytest.raises(UserError, match=message):
            check_backend(experiment("unused", **settings))


def test_what_means_nothing_on_a_backend_is_refused(monkeypatch):
    check_backend(experiment("unused"))
    refused(monkeypatch, "torch", "KERAS_BACKEND=torch: training runs on tensorflow or jax")
    refused(monkeypatch, "jax", "--nodeterministic is for TensorFlow", deterministic=False)
    refused(monkeypatch, "jax", "TF_CONFIG is for TensorFlow", {"TF_CONFIG": "{}"})
    refused(monkeypatch, "tensorflow", "is for JAX", {COUNT: "2"})


def test_a_run_goes_on_where_it_began(monkeypatch):
    check_same_backend("tensorflow")
    check_same_backend(None)
    with pytest.raises(UserError, match="started on jax, this is tensorflow: set KERAS_BA"):
        check_same_backend("jax")


def test_processes_are_named_by_the_environment(monkeypatch):
    assert JaxProcesses.from_environment() == (0, ("",))
    monkeypatch.setenv(COUNT, "2")
    with pytest.raises(UserError, match=f"{ADDRESSES} is not set, but others"):
        JaxProcesses.from_environment()
    monkeypatch.setenv(ADDRESSES, "localhost:1234")
    monkeypatch.setenv(INDEX, "1")
    assert JaxProcesses.from_environment() == (1, ("localhost:1234", "process 1"))
    for wrong in ("2", "-1", "first"):
        monkeypatch.setenv(INDEX, wrong)
        with pytest.raises(UserError, match=f"PROCESS_ID={wrong} is not one of 2 from 0 on"):
            JaxProcesses.from_environment()


def test_a_value_is_assigned_as_it_is_in_one_process():
    variable = keras.Variable([1.0, 2.0])
    assign_here(variable, [3.0, 4.0])
    assert keras.ops.convert_to_numpy(variable).tolist() == [3.0, 4.0]
