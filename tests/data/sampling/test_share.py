"""Replicas and workers get the rows of the batch that one device sees."""

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampling_workers import BATCH, FIRST_STEP, STEPS, TRANSFORMS, made, samplers
from tfdml.data.batches import distributed, hierarchical_sampler
from tfdml.data.pipeline import training_batches
from tfdml.data.sampling import HierarchicalSampler, Share, ShuffleSampler, check_divides
from tfdml.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "tests.sampling_workers"]


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_shares_put_together_are_the_batch(count, each, step):
    sampler = ShuffleSampler(100, count * each, seed=2)
    shares = [Share(sampler, index, count) for index in range(count)]
    assert {(part.batch_size, part.steps_per_epoch) for part in shares} == {(each, sampler.steps_per_epoch)}
    np.testing.assert_array_equal(np.concatenate([part.batch(step) for part in shares]), sampler.batch(step))


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match="a batch of 10 images cannot be shared out evenly over 3 workers"):
        Share(ShuffleSampler(100, 10), 0, 3)
    with pytest.raises(UserError, match=r"4 replicas: make `batch_size` \(or `classes_per_batch` times `im"):
        check_divides(10, 4, "replicas")
    with pytest.raises(UserError, match="worker 2 of 2: workers are numbered from 0 to 1"):
        Share(ShuffleSampler(100, 10), 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("cache", [False, True])
def test_a_worker_makes_its_rows_bit_by_bit(cache):
    """With the augmentation that they have in the whole batch."""
    data = made()
    for sampler, transform in zip(samplers(data).values(), TRANSFORMS, strict=True):
        whole = training_batches(data, sampler, transform, 3, FIRST_STEP, STEPS)
        parts = [
            training_batches(data, Share(sampler, index, 2), transform, 3, FIRST_STEP, STEPS, cache) for index in (0, 1)
        ]
        assert parts[0].element_spec[0].shape == (BATCH // 2, 10, 10, 3)
        for together, *apart in zip(*(batches.as_numpy_iterator() for batches in (whole, *parts)), strict=True):
            for rows, *others in zip(together, *apart, strict=True):
                np.testing.assert_array_equal(np.concatenate(others), rows)


def test_the_sampler_of_a_data_sets_own_super_classes():
    data = made()
    sampler = hierarchical_sampler(data, 4, 2, 2, 1, "uniform")
    expected = HierarchicalSampler(data.labels, data.super_labels, 4, 2, 2, 1, "uniform")
    assert [sampler.batch(step).tolist() for step in range(3)] == [expected.batch(step).tolist() for step in range(3)]


def test_super_classes_stay_with_their_images():
    data = made()
    part = data.select_classes([9, 2, 4]).contiguous().take([10, 0, 3, 7])
    # Of classes 2, 4 and 9 of super-classes 0, 1 and 2.
    assert part.labels.tolist() == part.super_labels.tolist() == [2, 0, 1, 1]


def test_data_without_super_classes_are_refused():
    data = dataclasses.replace(made(), super_labels=None)
    with pytest.raises(UserError, match="hierarchical sampling needs super-classes, and made has none: sop has them"):
        hierarchical_sampler(data, 4, 2)


def expected():
    """What one device sees, by sampler: labels and pixel sums of every step."""
    data = made()
    return {
        name: [
            (labels, images.sum((1, 2, 3), dtype=np.int64), (images.mean((1, 2, 3)) * labels).sum())
            for images, labels in training_batches(data, sampler, transform, 3, FIRST_STEP, STEPS).as_numpy_iterator()
        ]
        for (name, sampler), transform in zip(samplers(data).items(), TRANSFORMS, strict=True)
    }


def check_rows(found, replicas):
    for name, steps in expected().items():
        for step, (labels, sums, _) in enumerate(steps):
            for replica in replicas:
                rows = slice(replica * BATCH // 2, (replica + 1) * BATCH // 2)
                np.testing.assert_array_equal(found[f"{name}|{step}|{replica}|labels"], labels[rows])
                np.testing.assert_array_equal(found[f"{name}|{step}|{replica}|sums"], sums[rows])
        assert f"{name}|{len(steps)}|{replicas[0]}|labels" not in found


@pytest.mark.slow
def test_every_replica_gets_its_rows_of_the_batch_of_one_device(tmp_path):
    path = tmp_path / "found.npz"
    done = subprocess.run([*COMMAND, path], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(np.load(path))
    check_rows(found, (0, 1))
    for name, steps in expected().items():
        np.testing.assert_allclose(found[f"{name}|total"], sum(total for *_, total in steps), rtol=1e-5)


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("localhost", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.mark.slow
def test_every_worker_makes_its_rows_alone(tmp_path):
    workers = [f"localhost:{port}" for port in free_ports(2)]
    processes = []
    for index in (0, 1):
        config = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
        command = [*COMMAND, tmp_path / f"{index}.npz"]
        environment = {**os.environ, "TF_CONFIG": config}
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], errors[0][-3000:] + errors[1][-3000:]
    totals = []
    for index in (0, 1):
        found = dict(np.load(tmp_path / f"{index}.npz"))
        check_rows(found, (index,))
        for name in expected():
            assert set(found[f"{name}|reads"].tolist()) == {BATCH // 2}, "it reads its own rows only"
        totals.append([float(found[f"{name}|total"]) for name in expected()])
    whole = [sum(total for *_, total in steps) for steps in expected().values()]
    np.testing.assert_allclose(totals[0], totals[1], rtol=1e-6)
    np.testing.assert_allclose(totals[0], whole, rtol=1e-5)


def test_distributed_refuses_what_does_not_divide():
    class Strategy:
        num_replicas_in_sync = 3

    with pytest.raises(UserError, match="a batch of 8 images cannot be shared out evenly over 3 replicas"):
        distributed(Strategy(), made(), ShuffleSampler(36, 8))
