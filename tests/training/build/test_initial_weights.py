"""Weights of an old run, and measurements of the training images, that a run starts from."""

import keras
import numpy as np
import pytest

from tfdml.backbones import resolve
from tfdml.data.dataset import ImageDataset
from tfdml.data.images import ArrayImages
from tfdml.data.transforms import EvaluationTransform
from tfdml.errors import UserError
from tfdml.losses import AMSoftmaxLoss, ContrastiveLoss
from tfdml.models import Embedder, MetricLearner
from tfdml.objectives import Calibrated, CrossBatchMemory, MetricLoss, ProxyLoss
from tfdml.training import RunFolder, build_optimizer, checkpoints
from tfdml.training.build.initial_weights import calibrate, check_start, start_from
from tfdml.training.checkpoints import TrainingState


def learner(embedding_dim=4, classes=3, objective=None, backbone="conv4"):
    objectives = [objective or ProxyLoss(AMSoftmaxLoss(), classes, name="am_softmax")]
    made = MetricLearner(Embedder(backbone, embedding_dim=embedding_dim, image_size=16), objectives)
    made.build((None, 16, 16, 3))
    made.compile(optimizer=build_optimizer("adam", made, 1e-3, {}))
    return made


def same_parts(one, other):
    """The parts whose weights are equal in both."""
    others = checkpoints.parts(other)
    return {
        part
        for part, weights in checkpoints.parts(one).items()
        if weights and all(_equal(a, b) for a, b in zip(weights, others.get(part, []), strict=False)) and part in others
    }


def _equal(a, b):
    a, b = (keras.ops.convert_to_numpy(variable) for variable in (a, b))
    return a.shape == b.shape and bool((a == b).all())


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A learner, and the folder of its run."""
    made, run = learner(), RunFolder(tmp_path_factory.mktemp("run"))
    for weight in made.weights:
        if "seed" not in weight.path:
            weight.assign(keras.ops.full(weight.shape, 0.5, weight.dtype))
    checkpoints.save(run.checkpoints, made, TrainingState(3, []))
    made.embedder.save(run.embedder)
    return made, run


ALL = {"backbone", "projection", "objective am_softmax"}


@pytest.mark.parametrize(
    ("name", "taken"),
    [("", ALL), ("checkpoints/step-00000003.npz", ALL), ("embedder.keras", ALL - {"objective am_softmax"})],
)
def test_a_run_a_checkpoint_or_an_embedder_may_be_named(name, taken, old):
    new = learner()
    assert same_parts(old[0], new) == set()
    start_from(str(old[1].path / name), new)
    assert same_parts(old[0], new) == taken
    assert int(new.optimizer.iterations) == 0


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({"embedding_dim": 5}, {"backbone"}),
        ({"classes": 4}, {"backbone", "projection"}),
        ({"objective": ContrastiveLoss()}, {"backbone", "projection"}),
    ],
)
def test_parts_that_differ_stay_new(changes, taken, old):
    new = learner(**changes)
    start_from(str(old[1].path), new)
    assert same_parts(old[0], new) == taken


def test_a_memory_begins_empty(tmp_path):
    before, new = (learner(objective=CrossBatchMemory(ContrastiveLoss(), 6)) for _ in range(2))
    before.objectives[0].remember({"embedding": keras.ops.ones((4, 4))}, keras.ops.arange(4))
    checkpoints.save(RunFolder(tmp_path).checkpoints, before, TrainingState(3, []))
    start_from(str(tmp_path), new)
    assert same_parts(before, new) == {"backbone", "projection"}
    assert not np.any(new.objectives[0].memory)


def test_another_backbone_is_refused_and_nothing_changes(old):
    new = learner(backbone=resolve("conv4", 16, width=8))
    before = [keras.ops.convert_to_numpy(weight) for weight in new.weights]
    with pytest.raises(UserError, match="has another backbone than this run"):
        start_from(str(old[1].path), new)
    for a, b in zip(before, new.weights, strict=True):
        np.testing.assert_array_equal(a, keras.ops.convert_to_numpy(b))


def test_a_damaged_checkpoint_of_a_run_falls_back(old, tmp_path):
    run = RunFolder(tmp_path)
    run.checkpoints.mkdir()
    content = (old[1].checkpoints / "step-00000003.npz").read_bytes()
    (run.checkpoints / "step-00000003.npz").write_bytes(content)
    (run.checkpoints / "step-00000004.npz").write_bytes(content[:1000])
    new = learner()
    start_from(str(tmp_path), new)
    assert same_parts(old[0], new) == ALL
    with pytest.raises(UserError, match=r"--start_from=.*step-00000004.npz is damaged"):
        start_from(str(run.checkpoints / "step-00000004.npz"), new)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    bad = learner()
    bad.embedder.dense.kernel.assign(keras.ops.full(bad.embedder.dense.kernel.shape, np.nan))
    bad.embedder.save(tmp_path / "bad.keras")
    with pytest.raises(UserError, match=r"bad.keras holds weights that are not finite"):
        start_from(str(tmp_path / "bad.keras"), learner())


def test_what_is_none_of_those_is_refused(tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    for name, says in (
        ("", "holds neither a checkpoint"),
        ("note.txt", "cannot be loaded"),
        ("nowhere.npz", "damaged"),
    ):
        with pytest.raises(UserError, match=says):
            start_from(str(tmp_path / name), learner())


def test_a_start_that_is_not_there_is_told_beforehand(tmp_path):
    check_start("")
    check_start(str(tmp_path))
    with pytest.raises(UserError, match="--start_from=no/run: there is no such file or folder"):
        check_start("no/run")


SIZE = 16
TRANSFORM = EvaluationTransform(resize=SIZE, image_size=SIZE)


class ClassMeans(Calibrated):
    """Keeps the mean pooled feature of three classes."""

    calibrates_on = "pooled"

    def build_from(self, shapes):
        self.means = self.add_weight(shape=(3, shapes["pooled"][-1]), trainable=False, name="means")

    def calibrate(self, features, labels):
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


def test_features_are_those_of_every_training_image():
    train, objective = train_split(), ClassMeans()
    learner = learner_with(MetricLoss(ContrastiveLoss()), objective)
    calibrate(learner, train, TRANSFORM, 4)
    pooled = np.asarray(learner.embedder.represent(train.images.data, training=False)["pooled"])
    expected = np.stack([pooled[train.labels == c].mean(0) for c in range(3)])
    np.testing.assert_allclose(np.asarray(objective.means), expected, rtol=1e-5, atol=1e-6)


def test_nothing_is_measured_where_no_objective_asks():
    learner = learner_with(ContrastiveLoss())
    learner.calibrate = None
    calibrate(learner, train_split(), TRANSFORM, 4)
