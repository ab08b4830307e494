"""Checkpoints are whole, restore everything, and never a wrong model."""

import errno
import tracemalloc

import keras
import numpy as np
import pytest

from tests.training.test_optimizers import make_embedder, make_learner
from tfdml import run_folder
from tfdml.errors import UserError
from tfdml.losses import AMSoftmaxLoss, ContrastiveLoss
from tfdml.models import MetricLearner
from tfdml.objectives import ProxyLoss
from tfdml.training import checkpoints
from tfdml.training.checkpoints import TrainingState
from tfdml.training.optimizers import build_optimizer


def trained(epochs):
    learner = make_learner()
    learner.compile(optimizer=build_optimizer("adam", learner, 1e-3, {}), run_eagerly=True)
    images = np.random.default_rng(0).integers(0, 255, (6, 16, 16, 3)).astype(np.uint8)
    learner.fit(images, np.arange(6) % 3, batch_size=6, epochs=epochs, verbose=0)
    return learner


def arrays(learner):
    return [
        keras.ops.convert_to_numpy(v) for v in [*learner.variables, *learner.optimizer.variables]
    ]


@pytest.fixture(scope="module")
def saved_twice(tmp_path_factory):
    """A learner, and its checkpoints of two steps by name."""
    folder, learner = tmp_path_factory.mktemp("checkpoints"), trained(epochs=1)
    for step in (1, 2):
        checkpoints.save(folder, learner, TrainingState(step, []))
    return learner, {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_checkpoint_restores_weights_statistics_and_optimizer(tmp_path):
    saved = trained(epochs=3)
    state = TrainingState(
        3, [{"epoch": 0, "test": {"recall@1": 0.5}}], neighbors=[[1, 2], [0, 2], [-1, -1]]
    )
    checkpoints.save(tmp_path, saved, state)
    fresh = trained(epochs=1)
    assert checkpoints.restore_latest(tmp_path, fresh) == state
    for old, new in zip(arrays(saved), arrays(fresh), strict=True):
        np.testing.assert_array_equal(old, new)


def test_only_the_newest_stay(saved_twice, tmp_path):
    for step in (9, 10, 100):
        checkpoints.save(tmp_path, saved_twice[0], TrainingState(step, []), keep=2)
    (tmp_path / "step-00000010 (copy).npz").touch()
    assert [path.name for path in run_folder.list_checkpoints(tmp_path)] == [
        "step-00000010.npz",
        "step-00000100.npz",
    ]


def damage(path, how):
    content = path.read_bytes()
    if how == "a flipped bit":
        place = content.index(b"backbone/00000") + 1000
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    else:
        with np.load(path) as file:
            arrays = {name: array for name, array in file.items() if name != "optimizer/00000"}
        with open(path, "wb") as file:
            np.savez(file, **arrays)


@pytest.mark.parametrize("how", ["a flipped bit", "a missing array"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(how, saved_twice, tmp_path):
    learner, files = saved_twice
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    damage(tmp_path / "step-00000002.npz", how)
    assert checkpoints.restore_latest(tmp_path, learner).step == 1
    # The step can be written again, and is then the newest.
    checkpoints.save(tmp_path, learner, TrainingState(2, []))
    assert checkpoints.restore_latest(tmp_path, learner).step == 2


def test_a_checkpoint_is_there_whole_or_not_at_all(saved_twice, tmp_path, monkeypatch):
    learner, files = saved_twice
    (tmp_path / "step-00000002.npz").write_bytes(files["step-00000002.npz"])

    def half(file, array):
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", half)
    for step in (2, 3):
        with pytest.raises(
            UserError, match=f"step-0000000{step}.npz cannot be written: the disk is full"
        ):
            checkpoints.save(tmp_path, learner, TrainingState(step, []))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002.npz"]
    assert checkpoints.restore_latest(tmp_path, learner).step == 2


@pytest.mark.parametrize(
    "term", [ContrastiveLoss(), ProxyLoss(AMSoftmaxLoss(), 4)]
)  # other variables, other sizes
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(term, saved_twice, tmp_path):
    checkpoints.save(tmp_path, saved_twice[0], TrainingState(1, []))
    other = MetricLearner(make_embedder(), [term])
    other.build((None, 16, 16, 3))
    other.compile(optimizer=build_optimizer("adam", other, 1e-3, {}))
    before = arrays(other)
    with pytest.raises(UserError, match="another model"):
        checkpoints.restore_latest(tmp_path, other)
    for old, new in zip(before, arrays(other), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.slow
def test_large_variables_are_written_and_restored_where_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_BLOCK", 2**20)
    batch = np.zeros((4, 16, 16, 3), np.uint8), np.arange(4)

    def with_many_classes():
        learner = MetricLearner(
            make_embedder(), [ProxyLoss(AMSoftmaxLoss(), 2_000_000, sample=1e-6)]
        )
        learner.build((None, 16, 16, 3))
        learner.compile(optimizer=build_optimizer("adam", learner, 1e-3), run_eagerly=True)
        learner.train_on_batch(
            *batch
        )  # from here on TensorFlow copies the proxies where it reads them
        return learner

    saved, fresh = with_many_classes(), with_many_classes()
    tracemalloc.start()
    checkpoints.save(tmp_path, saved, TrainingState(1, []))
    checkpoints.restore_latest(tmp_path, fresh)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000 * 4 * 4 * 2 / 3  # bytes of the proxies
    for learner in (saved, fresh):
        learner.train_on_batch(*batch)
    for old, new in zip(arrays(saved), arrays(fresh), strict=True):
        np.testing.assert_array_equal(old, new)
