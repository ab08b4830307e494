"""Objectives that measure the training set do so once, on all of it, and find the figures again after a restart."""

import numpy as np
import pytest

from tfdml.data.dataset import ImageDataset
from tfdml.data.images import ArrayImages
from tfdml.data.transforms import EvaluationTransform
from tfdml.losses import ContrastiveLoss
from tfdml.models import Embedder, MetricLearner
from tfdml.objectives import Calibrated, MetricLoss
from tfdml.training.calibration import calibrate

SIZE = 16
TRANSFORM = EvaluationTransform(resize=SIZE, image_size=SIZE)


class ClassMeans(Calibrated):
    """Keeps the mean pooled feature of three classes."""

    calibrates_on = "pooled"
    calls = 0

    def build_from(self, shapes):
        self.means = self.add_weight(shape=(3, shapes["pooled"][-1]), trainable=False, name="means")

    def calibrate(self, features, labels):
        self.calls += 1
        self.means.assign(np.stack([features[labels == c].mean(0) for c in range(3)]))

    def compute_pairs(self, pairs):
        return 0.0 * pairs["embedding"].anchors[0, 0]


def train_split():
    images = np.random.default_rng(0).integers(0, 256, (14, SIZE, SIZE, 3), dtype=np.uint8)
    names = tuple(str(i) for i in range(14))
    return ImageDataset("toy", "train", ArrayImages(images, names), np.arange(14) % 3, {0: "a", 1: "b", 2: "c"})


def learner_with(*objectives):
    learner = MetricLearner(Embedder("conv4", embedding_dim=5, image_size=SIZE), list(objectives))
    learner.build((None, SIZE, SIZE, 3))
    return learner


def test_features_are_those_of_every_training_image(tmp_path):
    train, objective = train_split(), ClassMeans()
    learner = learner_with(MetricLoss(ContrastiveLoss()), objective)
    calibrate(learner, train, TRANSFORM, 4, tmp_path / "calibration")
    pooled = np.asarray(learner.embedder.represent(train.images.data, training=False)["pooled"])
    expected = np.stack([pooled[train.labels == c].mean(0) for c in range(3)])
    np.testing.assert_allclose(np.asarray(objective.means), expected, rtol=1e-5, atol=1e-6)


def test_a_restarted_run_takes_what_was_measured(tmp_path):
    first, second = ClassMeans(name="means"), ClassMeans(name="means")
    calibrate(learner_with(first), train_split(), TRANSFORM, 4, tmp_path)
    calibrate(learner_with(second), train_split(), TRANSFORM, 4, tmp_path)
    assert (first.calls, second.calls) == (1, 0)
    np.testing.assert_array_equal(np.asarray(first.means), np.asarray(second.means))


def test_nothing_is_measured_where_no_objective_asks(tmp_path):
    calibrate(learner_with(ContrastiveLoss()), train_split(), TRANSFORM, 4, tmp_path / "calibration")
    assert not (tmp_path / "calibration").exists()


def test_an_interrupted_measurement_leaves_no_file(tmp_path):
    class Interrupted(ClassMeans):
        def calibrate(self, features, labels):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(learner_with(Interrupted()), train_split(), TRANSFORM, 4, tmp_path)
    assert not list(tmp_path.iterdir())
