"""Who trains with whom, by TF_CONFIG; and one process, to which every other is as nobody."""

import json

import pytest
import tensorflow as tf

from tests.training import runs
from tfdml.errors import UserError
from tfdml.training.distributed.tensorflow_workers import TensorFlowWorkers, from_environment
from tfdml.training.run import trainer


def config(cluster, job="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (0, ("",))),
        (config({"worker": ["a:1"]}), (0, ("",))),
        (config({"worker": ["a:1", "b:2"]}, index=1), (1, ("a:1", "b:2"))),
        (config({"chief": ["c:3"], "worker": ["a:1"]}), (1, ("c:3", "a:1"))),
        (config({"chief": ["c:3"], "worker": ["a:1"]}, "chief"), (0, ("c:3", "a:1"))),
    ],
)
def test_tf_config_says_who_trains(monkeypatch, text, expected):
    monkeypatch.setenv("TF_CONFIG", text)
    assert from_environment() == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "TF_CONFIG does not say who trains"),
        ("[]", "TF_CONFIG does not say who trains"),
        (json.dumps({"cluster": {"worker": ["a:1", "b:2"]}}), "TF_CONFIG does not say who trains"),
        (config({"worker": ["a:1", "b:2"]}, index=2), "there is no worker 2 among 2"),
        (config({"worker": ["a:1", "b:2"], "ps": ["c:3"]}), "jobs that do not train here (ps)"),
    ],
)
def test_a_wrong_tf_config_is_told(monkeypatch, text, words):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(UserError) as told:
        from_environment()
    assert words in str(told.value)


LOST = "Collective ops is aborted by: The following tasks are unhealthy:\n/job:worker/replica:0/task:1\n"


@pytest.mark.parametrize(
    ("index", "message", "words"),
    [
        (0, LOST, "worker 1 (b:2) has ended"),
        (2, "from /job:worker/task:2: " + LOST, "worker 1 (b:2) has ended"),
        (0, "Connection reset by peer", "worker 1 (b:2) or worker 2 (c:3) has ended"),
        (2, "unhealthy /job:worker/task:0 /job:worker/task:1", "worker 0 (a:1) and worker 1 (b:2) have ended"),
        (1, "unhealthy /job:chief/replica:0/task:0", "worker 0 (a:1) has ended"),
    ],
)
def test_who_is_lost_is_named(index, message, words):
    with pytest.raises(UserError) as told, TensorFlowWorkers(index, ("a:1", "b:2", "c:3")).ending_together():
        raise tf.errors.UnavailableError(None, None, message)
    assert words in str(told.value)
    assert f"worker {index} of 3" in str(told.value)


def test_other_errors_are_not_those_of_a_lost_worker():
    with pytest.raises(tf.errors.InvalidArgumentError), TensorFlowWorkers(0, ("a:1", "b:2")).ending_together():
        raise tf.errors.InvalidArgumentError(None, None, "Invalid PNG data")


def test_workers_do_not_split_their_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(trainer.devices, "join", lambda devices: TensorFlowWorkers(0, ("a:1", "b:2")))
    monkeypatch.setattr(TensorFlowWorkers, "bytes_of_chief", lambda self, read: read())
    with pytest.raises(UserError, match="--logical_devices=2 is of one process"):
        runs.train(tmp_path / "run", logical_devices=2, classes_per_batch=4)
    assert not (tmp_path / "run").exists()
