"""Checkpoints are whole, restore everything, and never a wrong model."""

import keras
import numpy as np
import pytest

from tests.training.test_optimizers import make_learner
from tfdml.errors import UserError
from tfdml.files import atomic_path, write_json
from tfdml.losses import ContrastiveLoss
from tfdml.models import Embedder, MetricLearner
from tfdml.training import checkpoints
from tfdml.training.optimizers import build_optimizer


def trained(epochs):
    learner = make_learner()
    learner.compile(optimizer=build_optimizer("adam", learner, 1e-3, {}))
    images = np.random.default_rng(0).integers(0, 255, (6, 16, 16, 3)).astype(np.uint8)
    learner.fit(images, np.arange(6) % 3, batch_size=6, epochs=epochs, verbose=0)
    return learner


def arrays(learner):
    return [keras.ops.convert_to_numpy(v) for v in [*learner.variables, *learner.optimizer.variables]]


def test_a_checkpoint_restores_weights_statistics_and_optimiser(tmp_path):
    saved = trained(epochs=3)
    checkpoints.save(tmp_path, saved, step=3, state={"records": [1]})
    fresh = trained(epochs=1)
    state = checkpoints.restore_latest(tmp_path, fresh)
    assert state == {"records": [1], "step": 3}
    for old, new in zip(arrays(saved), arrays(fresh), strict=True):
        np.testing.assert_array_equal(old, new)


def test_only_the_newest_stay_and_steps_sort_as_numbers(tmp_path):
    learner = trained(epochs=1)
    for step in (9, 10, 100):
        checkpoints.save(tmp_path, learner, step, {}, keep=2)
    assert [path.name for path in checkpoints.list_checkpoints(tmp_path)] == ["step-00000010.npz", "step-00000100.npz"]


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path):
    learner = trained(epochs=1)
    checkpoints.save(tmp_path, learner, 1, {})
    newest = checkpoints.save(tmp_path, learner, 2, {})
    content = newest.read_bytes()
    newest.write_bytes(content[: len(content) // 2])
    assert checkpoints.restore_latest(tmp_path, learner)["step"] == 1


def test_no_checkpoint_is_none(tmp_path):
    assert checkpoints.restore_latest(tmp_path / "missing", trained(epochs=1)) is None


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path):
    checkpoints.save(tmp_path, trained(epochs=1), 1, {})
    other = MetricLearner(Embedder("conv4", embedding_dim=5, image_size=16), [ContrastiveLoss()])
    other.build((None, 16, 16, 3))
    other.compile(optimizer=build_optimizer("adam", other, 1e-3, {}))
    before = arrays(other)
    with pytest.raises(UserError, match="another model"):
        checkpoints.restore_latest(tmp_path, other)
    for old, new in zip(before, arrays(other), strict=True):
        np.testing.assert_array_equal(old, new)


def test_an_interrupted_write_leaves_the_old_file_and_no_debris(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"a": float("nan"), "b": [1, float("inf")]})
    before = path.read_text()
    assert "null" in before

    def interrupted():
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]
