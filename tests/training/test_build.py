"""A run is made of what the flags say; what cannot train is refused, and what does not exist before
images are read."""

import dataclasses

import keras
import numpy as np
import pytest

from tests.models.networks import values
from tests.training import runs
from tfdml.backbones import resolve
from tfdml.data.transforms import EvaluationTransform
from tfdml.errors import UserError
from tfdml.losses import AMSoftmaxLoss, ContrastiveLoss
from tfdml.models import Embedder, MetricLearner
from tfdml.objectives import MetricLoss, Objective, ProxyLoss
from tfdml.training import Experiment, RunFolder, build, checkpoints
from tfdml.training.build import adapt, build_components, check_selection, start_from
from tfdml.training.checkpoints import TrainingState
from tfdml.training.optimizers import build_optimizer
from tfdml.training.settings import DataSettings, ModelSettings
from tfdml.training.workers import Processes


def test_an_epoch_is_not_selected_by_what_the_images_cannot_measure():
    everything = dataclasses.replace(runs.SPLITS, validation=runs.SPLITS.test)
    check_selection("validation", "map@r", everything)
    check_selection("last", "map@r", runs.SPLITS)
    # Of each class one image, with a text.
    classes = np.unique(everything.test.labels, return_index=True)[1]
    single = everything.test.take(classes)
    captioned = dataclasses.replace(everything, validation=single, views={"validation": None})
    with pytest.raises(UserError, match="no two images are of one class"):
        check_selection("validation", "map@r", captioned)
    check_selection("validation", "text_to_image/map", captioned)
    one_class = everything.test.take(
        np.flatnonzero(everything.test.labels == everything.test.labels[0])
    )
    with pytest.raises(UserError, match="one held-out class selects nothing"):
        check_selection(
            "validation", "map@r", dataclasses.replace(everything, validation=one_class)
        )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"backbone": "resnet5"}, "unknown; did you mean 'resnet50'"),
        ({"objectives": "am_softmax(margn=0.1)"}, "no argument 'margn'"),
        ({"moment_embedder": True}, "moment_embedder"),
        ({"objectives": "xbm(loss=contrastive, size=24, start=100)"}, "after 100 steps"),
    ],
)
def test_what_does_not_exist_is_found_before_the_images_are_read_and_the_rest_before_training(
    changes, says, tmp_path, monkeypatch
):
    read = []
    monkeypatch.setattr(
        build, "load_splits", lambda *arguments: read.append(arguments) or runs.SPLITS
    )
    with pytest.raises(UserError, match=says):
        build_components(runs.experiment(tmp_path / "run", **changes))
    assert bool(read) == (not says.startswith(("unknown", "no argument")))
    assert not (tmp_path / "run").exists()


TINY = Experiment(
    run_dir="runs/any",
    backbone="conv4(width=2)",
    batch_norm="train",
    embedding_dim=3,
    image_size=16,
    resize=16,
    optimizer="sgd",
    learning_rate=0.5,
)


def made(**changes):
    return runs.learner(dataclasses.replace(TINY, **changes), num_classes=4, steps_per_epoch=5)


def moved(learner, steps=1, scale=1.0):
    """How far each part's first variable moves by gradients of `scale` everywhere."""
    before = {part: values(variables[:1]) for part, variables in learner.parts().items()}
    for _ in range(steps):
        learner.optimizer.apply(
            [scale * keras.ops.ones(v.shape) for v in learner.trainable_variables]
        )
    after = {part: values(variables[:1]) for part, variables in learner.parts().items()}
    return {part: after[part][0] - old[0] for part, old in before.items() if old}


def test_rates_decay_and_clipping_are_those_of_the_flags():
    steps = moved(made(backbone_rate=0.1, projection_rate=0.2, objective_rate=0.3))
    for part, rate in (("backbone", 0.1), ("projection", 0.2), ("objectives", 0.3)):
        np.testing.assert_allclose(steps[part], -rate, rtol=1e-5)
    tiny = made(weight_decay=0.25)
    weight = values(tiny.parts()["projection"][:1])[0]
    np.testing.assert_allclose(
        moved(tiny)["projection"], -0.5 * (1 + 0.25 * weight), rtol=1e-4, atol=1e-6
    )
    tiny = made(
        optimizer="adamw", weight_decay=0.25, projection_rate=0.2
    )  # decoupled, at the rate of the part
    weight = values(tiny.parts()["projection"][:1])[0]
    np.testing.assert_allclose(
        moved(tiny, scale=0.0)["projection"], -0.2 * 0.25 * weight, rtol=1e-4, atol=1e-6
    )
    tiny = made(clip_norm=0.5)
    size = sum(int(np.prod(variable.shape)) for variable in tiny.trainable_variables)
    np.testing.assert_allclose(
        moved(tiny, scale=100.0)["projection"], -0.25 / np.sqrt(size), rtol=1e-3
    )
    frozen = made(backbone_rate=0.0)
    assert frozen.parts()["backbone"] == []
    assert frozen.embedder.backbone.trainable is False


def test_the_seed_decides_the_weights():
    one, again, other = (values(made(seed=seed).trainable_variables) for seed in (3, 3, 4))
    for first, second in zip(one, again, strict=True):
        np.testing.assert_array_equal(first, second)
    assert any(not np.array_equal(first, second) for first, second in zip(one, other, strict=True))


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_the_network_has_the_precision_of_the_flag_and_nothing_after_it(policy):
    tiny = made(mixed_precision=policy)
    assert tiny.embedder.dense.compute_dtype == policy.removeprefix("mixed_")
    assert {variable.dtype for variable in tiny.trainable_variables} == {"float32"}
    assert keras.config.dtype_policy().name == "float32"


def test_a_head_is_built_as_its_flag_says():
    def built(dimension=0, dim=5, **head):
        settings = ModelSettings(**head, embedding_dim=dim, backbone="conv4(width=4)")
        view = EvaluationTransform(runs.SIZE, runs.SIZE)
        return build.make_embedder(settings, view, dimension)

    embedder = built(head="mlp(hidden=3)")
    embedder.build((None, runs.SIZE, runs.SIZE, 3))
    assert [layer.units for layer in embedder.head.layers] == [3, 5]
    assert built(7, head="mlp(hidden=3)").embedding_dim == 5
    assert not built(head="linear(bias=false)").dense.use_bias
    assert built(head="whitened").dense.use_bias
    for head, dim, dimension, says in (
        ("mlp(hidden=3)", 0, 0, "must be positive with head=mlp"),
        ("ensemble(heads=2)", 5, 7, "features have none"),
    ):
        with pytest.raises(UserError, match=says):
            built(dimension, dim, head=head)


def test_whitening_has_the_options_of_its_head():
    of = ModelSettings
    assert build.whitening(of(head="whitened(power=0.3)").head)["power"] == 0.3
    assert build.whitening(of(head="linear").head) == {}


def test_an_embedding_of_no_size_of_its_own_is_the_pooled_features():
    embedder = made(embedding_dim=0, pooling="gem").embedder
    pixels = np.random.default_rng(0).uniform(0, 255, (2, 16, 16, 3))
    found = embedder.represent(pixels)
    assert embedder.embedding_dim == 2
    np.testing.assert_allclose(found["projection"], found["pooled"], atol=1e-6)


@pytest.mark.parametrize("flag", ["images_per_class", "batch_size", "classes_per_batch"])
def test_batches_without_the_pairs_that_a_term_learns_from_are_refused(flag):
    settings = DataSettings(
        **{"sampling": "shuffle" if flag == "batch_size" else "class_balanced", flag: 1}
    )
    with pytest.raises(UserError, match=f"{flag}=1: contrastive"):
        build.check_pairs(settings, [MetricLoss(ContrastiveLoss(), name="contrastive")])


def learner(embedding_dim=4, classes=3, objective=None, backbone="conv4"):
    objectives = [objective or ProxyLoss(AMSoftmaxLoss(), classes, name="am_softmax")]
    made = MetricLearner(Embedder(backbone, embedding_dim=embedding_dim, image_size=16), objectives)
    made.build((None, 16, 16, 3))
    made.compile(build_optimizer("adam", made, 1e-3, {}))
    return made


def same_parts(one, other):
    """The parts whose weights are equal in both."""
    sides = [
        {part: values(weights) for part, weights in checkpoints.parts(each).items()}
        for each in (one, other)
    ]
    shared = [
        part
        for part, weights in sides[0].items()
        if weights and len(weights) == len(sides[1].get(part, []))
    ]
    return {part for part in shared if all(map(np.array_equal, sides[0][part], sides[1][part]))}


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
    ("name", "changes", "taken"),
    [
        ("", {}, ALL),
        ("embedder.keras", {}, ALL - {"objective am_softmax"}),
        ("", {"embedding_dim": 5}, {"backbone"}),
        ("", {"classes": 4}, {"backbone", "projection"}),
        ("", {"objective": ContrastiveLoss()}, {"backbone", "projection"}),
    ],
)
def test_the_parts_of_a_run_that_are_alike_are_taken_over_and_the_others_stay_new(
    name, changes, taken, old
):
    new = learner(**changes)
    assert same_parts(old[0], new) == set()
    start_from(str(old[1].path / name), new)
    assert same_parts(old[0], new) == taken
    assert int(new.optimizer.iterations) == 0


def test_another_backbone_and_what_is_no_run_are_refused_and_nothing_changes(old, tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    (tmp_path / "half.npz").write_bytes(
        (old[1].checkpoints / "step-00000003.npz").read_bytes()[:1000]
    )
    new = learner(backbone=resolve("conv4", 16, width=8))
    before = values(new.weights)
    for path, says in (
        (old[1].path, "another backbone"),
        (tmp_path, "neither a checkpoint"),
        (tmp_path / "note.txt", "cannot be loaded"),
        (tmp_path / "half.npz", "damaged"),
    ):
        with pytest.raises(UserError, match=says):
            start_from(str(path), new)
    assert all(map(np.array_equal, before, values(new.weights)))


class ClassMeans(Objective):
    """Keeps the mean projection of three classes."""

    adapts_to = "projection"

    def build_from(self, shapes):
        self.means = self.add_weight(
            shape=(3, shapes["projection"][-1]), trainable=False, name="means"
        )

    def adapt(self, features, labels):
        self.means.assign(np.stack([features[labels == c].mean(0) for c in range(3)]))

    def compute_pairs(self, pairs):
        return 0.0 * pairs["embedding"].anchors[0, 0]


def test_the_projection_is_whitened_by_the_training_images_before_objectives_measure_them():
    train, objective = runs.noise("train", 3, 0), ClassMeans()
    learner = MetricLearner(Embedder("conv4", embedding_dim=5, image_size=runs.SIZE), [objective])
    learner.build((None, runs.SIZE, runs.SIZE, 3))
    view = EvaluationTransform(resize=runs.SIZE, image_size=runs.SIZE)
    adapt(learner, train, view, Processes(), {"power": 1.0, "shrinkage": 0.0})
    found = np.asarray(learner.embedder.represent(train.images.data, training=False)["projection"])
    np.testing.assert_allclose(np.cov(found.T), np.eye(5), atol=1e-2)
    expected = np.stack([found[train.labels == c].mean(0) for c in range(3)])
    np.testing.assert_allclose(np.asarray(objective.means), expected, rtol=1e-3, atol=1e-3)
