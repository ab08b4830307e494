"""A run is made of what the flags say; what cannot train is refused, and what does not exist before images are read."""

import dataclasses
import types

import keras
import numpy as np
import pytest
from PIL import Image

from tests.models.networks import values
from tests.training import runs
from tfdml import losses, objectives
from tfdml.backbones import resolve
from tfdml.data.dataset import ImageDataset
from tfdml.data.images import ArrayImages, VectorImages
from tfdml.data.pipeline import training_batches
from tfdml.data.sampling import ClassBalancedSampler
from tfdml.data.transforms import EvaluationTransform, TrainTransform
from tfdml.errors import UserError
from tfdml.losses import AMSoftmaxLoss, ContrastiveLoss
from tfdml.models import Embedder, MetricLearner, stack
from tfdml.objectives import CrossBatchMemory, MetricLoss, Objective, ProxyLoss
from tfdml.objectives.terms import build_objectives
from tfdml.training import Experiment, RunFolder, build, checkpoints
from tfdml.training.build import build_components, calibrate, check_start, start_from
from tfdml.training.checkpoints import TrainingState
from tfdml.training.images import load_splits
from tfdml.training.optimizers import build_optimizer
from tfdml.training.settings import DataSettings, ModelSettings


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("backbone", "resnet5", "unknown backbone 'resnet5'; did you mean 'resnet50'?"),
        ("backbone", "conv4(hight=3)", "backbone 'conv4' has no option 'hight'"),
        ("weights", "/no/such.weights.h5", "`weights`: there is no file /no/such.weights.h5"),
        ("weights", "imagenet", "there are no ImageNet weights for 'conv4'"),
        ("objectives", "am_softmaxx + jrs", "unknown loss or objective 'am_softmaxx'; did you mean 'am_softmax'?"),
        ("objectives", "am_softmax(margn=0.1)", "am_softmax: no argument 'margn'; it has"),
        ("objectives", "am_softmax + jrs(kernels=laplacian)", "unknown kernel or loss 'laplacian'"),
        ("policy", "0.5 * blurr", "unknown `policy` 'blurr'"),
        ("optimizer", "adamm", "--optimizer=adamm: must be one of adam"),
    ],
)
def test_what_does_not_exist_is_found_before_the_images_are_read(flag, value, says, tmp_path, monkeypatch):
    def read(*arguments):
        raise AssertionError("the images were read")

    monkeypatch.setattr(build, "load_splits", read)
    with pytest.raises(UserError) as caught:
        build_components(runs.experiment(tmp_path / "run", **{flag: value}))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def _noise(monkeypatch):
    monkeypatch.setattr(build, "load_splits", lambda *arguments: runs.SPLITS)


@pytest.mark.usefixtures("_noise")
def test_the_parts_are_those_of_the_settings(tmp_path):
    parts = build_components(
        runs.experiment(tmp_path / "run", steps_per_epoch=0, cache="true", objectives="am_softmax")
    )
    assert parts.splits is runs.SPLITS
    assert (parts.sampler.batch_size, parts.steps_per_epoch) == (8, 4)
    assert (
        parts.train_view.image_size
        == parts.evaluation_view.image_size
        == parts.learner.embedder.image_size
        == runs.SIZE
    )
    assert [term.name for term in parts.learner.objectives] == ["am_softmax"]
    assert parts.learner.objectives[0].class_proxies.num_classes == 8
    assert (parts.cache.training, parts.cache.evaluation) == (True, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_noise")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"images_per_class": 1}, "--images_per_class=1: contrastive learns from pairs"),
        ({"moment_embedder": True}, "--moment_embedder needs one horde"),
        ({"evaluate_orders": "epochs"}, "--evaluate_orders=epochs needs one horde"),
        ({"ks": "1,100"}, "--ks=1,100"),
        ({"classes_per_batch": 9}, "the data has 8 classes"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(changes, says, tmp_path):
    with pytest.raises(UserError) as caught:
        build_components(runs.experiment(tmp_path / "run", **changes))
    assert says in str(caught.value)


def test_one_held_out_class_selects_nothing(tmp_path, monkeypatch):
    one = dataclasses.replace(runs.SPLITS, validation=runs.noise("train", 1, 1, images_per_class=12))
    monkeypatch.setattr(build, "load_splits", lambda *arguments: one)
    with pytest.raises(UserError, match=r"--selection=validation: one held-out class selects nothing"):
        build_components(runs.experiment(tmp_path / "run", selection="validation", holdout_classes=0.1))


TINY = Experiment(
    run_dir="runs/any",
    backbone="conv4(width=2)",
    batch_norm="train",
    embedding_dim=3,
    image_size=16,
    resize=16,
    optimizer="sgd",
    momentum=0.0,
    learning_rate=0.5,
)


def made(**changes):
    return runs.learner(dataclasses.replace(TINY, **changes), num_classes=4, steps_per_epoch=5)


def moved(learner, steps=1, scale=1.0):
    """How far each part's first variable moves by gradients of `scale` everywhere."""
    before = {part: values(variables[:1]) for part, variables in learner.parts().items()}
    for _ in range(steps):
        learner.optimizer.apply([scale * keras.ops.ones(v.shape) for v in learner.trainable_variables])
    after = {part: values(variables[:1]) for part, variables in learner.parts().items()}
    return {part: after[part][0] - old[0] for part, old in before.items() if old}


def test_each_part_has_the_rate_of_its_flag():
    steps = moved(made(backbone_rate=0.1, projection_rate=0.2, objective_rate=0.3))
    for part, rate in (("backbone", 0.1), ("projection", 0.2), ("objectives", 0.3)):
        np.testing.assert_allclose(steps[part], -rate, rtol=1e-5)


def test_a_backbone_rate_of_zero_takes_the_backbone_out_of_training():
    tiny = made(backbone_rate=0.0)
    assert tiny.parts()["backbone"] == []
    assert tiny.embedder.backbone.trainable is False
    assert len(tiny.parts()["projection"]) == 2


def test_large_batches_have_their_flags(monkeypatch):
    assert made(gradient_cache=16, objectives="contrastive").gradient_cache == 16
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(UserError, match="--gradient_cache works on TensorFlow, and KERAS_BACKEND is jax"):
        made(gradient_cache=16)


def test_the_rates_drop_after_the_epochs_of_the_flag():
    tiny = made(drop_epochs="1,2", drop_factor=0.1)
    for rate in (0.5, 0.05, 0.005):
        np.testing.assert_allclose(moved(tiny, 5)["projection"], -5 * rate, rtol=1e-4)


def test_decay_and_clipping_are_those_of_the_flags():
    tiny = made(weight_decay=0.25)
    weight = values(tiny.parts()["projection"][:1])[0]
    np.testing.assert_allclose(moved(tiny)["projection"], -0.5 * (1 + 0.25 * weight), rtol=1e-4, atol=1e-6)
    tiny = made(clip_norm=0.5)
    size = sum(int(np.prod(variable.shape)) for variable in tiny.trainable_variables)
    np.testing.assert_allclose(moved(tiny, scale=100.0)["projection"], -0.25 / np.sqrt(size), rtol=1e-3)


def test_momentum_and_epsilon_are_those_of_the_flags():
    np.testing.assert_allclose(moved(made(momentum=0.5), 2)["projection"], -0.5 * 2.5, rtol=1e-5)
    # Adam's first step is the rate, unless epsilon is as large as the gradient.
    np.testing.assert_allclose(moved(made(optimizer="adam"))["projection"], -0.5, rtol=1e-3)
    assert np.all(np.abs(moved(made(optimizer="adam", epsilon=3.0))["projection"]) < 0.15)


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


def test_xla_compiles_where_it_is_asked_for(monkeypatch):
    assert [made(jit_compile=setting).jit_compile for setting in ("auto", "true", "false")] == [False, True, False]
    monkeypatch.setattr(build.tf.distribute, "get_strategy", lambda: types.SimpleNamespace(num_replicas_in_sync=2))
    assert [build._compiles(setting) for setting in ("auto", "false")] == [False, False]
    with pytest.raises(UserError, match="--jit_compile=true goes with one device"):
        build._compiles("true")


@pytest.fixture
def photos(tmp_path):
    """Two training and two test classes of two photos each; one test image is damaged between header and end."""
    for number in range(8):
        path = tmp_path / ("train", "test")[number // 4] / f"class {number // 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (20, 20, 3), np.uint8)).save(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 100] = bytes(100)
    path.write_bytes(data)
    return tmp_path


def of_folder(folder, **changes):
    return dataclasses.replace(TINY, dataset="folder", data_dir=str(folder), **changes)


def test_images_of_both_splits_are_checked_as_the_flags_say(photos):
    splits = load_splits(of_folder(photos, check_images="headers"), seed=0)
    assert (len(splits.train), len(splits.test)) == (4, 4)
    with pytest.raises(UserError, match=r"7\.png"):
        load_splits(of_folder(photos, check_images="decode"), seed=0)
    splits = load_splits(of_folder(photos, check_images="decode", bad_images="skip"), seed=0)
    assert (len(splits.train), len(splits.test)) == (4, 3)


def test_lora_has_its_flag():
    with pytest.raises(UserError, match="--lora_rank=4: LoRA changes attention layers, and conv4 has none"):
        made(lora_rank=4)
    with pytest.raises(UserError, match="--lora_rank=4 trains the backbone, and --backbone_rate=0"):
        made(lora_rank=4, backbone_rate=0.0)


def test_an_embedding_of_no_size_of_its_own_is_the_pooled_features():
    embedder = made(embedding_dim=0, pooling="gem").embedder
    pixels = np.random.default_rng(0).uniform(0, 255, (2, 16, 16, 3))
    found = embedder.represent(pixels)
    assert embedder.embedding_dim == 2
    np.testing.assert_allclose(found["projection"], found["pooled"], atol=1e-6)
    with pytest.raises(UserError, match=r"--backbone=conv4.*pooling='cls'"):
        made(pooling="cls")


PAIRS = objectives.MetricLoss(losses.ContrastiveLoss(), name="contrastive")
PROXIES = objectives.ProxyLoss(losses.AMSoftmaxLoss(), 3)
HORDE = objectives.HighOrderMomentLoss(losses.ContrastiveLoss(), orders=2, dim=4)
HORDE_OF_PROXIES = objectives.HighOrderMomentLoss(losses.AMSoftmaxLoss(), orders=2, dim=4, num_classes=3)


@pytest.mark.parametrize(
    ("term", "flags", "says"),
    [
        (PAIRS, {"images_per_class": 1}, "--images_per_class=1: contrastive learns from pairs of images of one class"),
        (PAIRS, {"classes_per_batch": 1}, "--classes_per_batch=1: contrastive learns from pairs of images of diff"),
        (PAIRS, {"classes_per_batch": 1, "images_per_class": 1}, "no batch would hold one"),
        (PAIRS, {"sampling": "shuffle", "batch_size": 1}, "--batch_size=1: contrastive"),
        (HORDE, {"images_per_class": 1}, "--images_per_class=1"),
        (objectives.DensityAdaptivity(3), {"images_per_class": 1}, "--images_per_class=1"),
        (objectives.GlobalOrthogonal(), {"classes_per_batch": 1}, "--classes_per_batch=1"),
        (objectives.RankMI(), {"classes_per_batch": 1}, "--classes_per_batch=1"),
    ],
)
def test_batches_without_the_pairs_that_a_term_learns_from_are_refused(term, flags, says):
    with pytest.raises(UserError, match=says):
        build.check_pairs(DataSettings(**flags), [PROXIES, term])


@pytest.mark.parametrize(
    ("term", "flags"),
    [
        (PAIRS, {"classes_per_batch": 2, "images_per_class": 2}),
        (PAIRS, {"sampling": "shuffle", "batch_size": 2, "images_per_class": 1}),
        (PROXIES, {"classes_per_batch": 1, "images_per_class": 1}),
        (HORDE_OF_PROXIES, {"images_per_class": 1}),
        (objectives.GlobalOrthogonal(), {"images_per_class": 1}),
        (objectives.DensityAdaptivity(3), {"classes_per_batch": 1}),
    ],
)
def test_batches_that_hold_them_are_not(term, flags):
    build.check_pairs(DataSettings(**flags), [term])


def test_a_memory_that_never_starts_is_refused():
    terms = [objectives.CrossBatchMemory(losses.ContrastiveLoss(), size=8, start=100, name="xbm")]
    build.check_starts(terms, 101)
    build.check_starts(terms, 0)
    with pytest.raises(UserError, match=r"xbm: its memory starts after 100 steps, and the run has 100"):
        build.check_starts(terms, 100)


def test_the_memory_of_a_step_by_hand():
    embedder = Embedder("conv4", embedding_dim=4, image_size=32)
    view = TrainTransform(resize=32, image_size=32)
    # Each block's convolution and batch norm, of 64 channels, at 32, 16, 8 and 4 px a side.
    activations = 2 * 64 * (32**2 + 16**2 + 8**2 + 4**2)
    images = 3 * 32**2
    resized = 4 * 3 * 32**2
    assert build.step_memory(embedder, view, 6) == resized + 6 * (images * 5 + activations * 4)
    assert build.step_memory(embedder, view, 6, chunk=64) == build.step_memory(embedder, view, 6)
    # All images, and the work on two of them.
    some = resized + 6 * images + 2 * (images * 4 + activations * 4)
    assert build.step_memory(embedder, view, 6, chunk=2) == some
    large = TrainTransform("multi_resolution", image_size=32, resolutions=(0.8, 100.0))
    assert build.step_memory(embedder, large, 6) > 4 * 3 * 3200**2
    half = Embedder("conv4", embedding_dim=4, image_size=32, dtype="mixed_bfloat16")
    assert build.step_memory(half, view, 6) == resized + 6 * (images * 5 + activations * 2)
    embedder.freeze_backbone()
    assert build.step_memory(embedder, view, 6) == resized + 6 * (images * 5 + 2 * 64 * 32**2 * 4)


def test_representations_are_refused_before_they_are_made(monkeypatch):
    learner = MetricLearner(Embedder("conv4", embedding_dim=4, image_size=32), [PAIRS])
    learner.build((None, 32, 32, 3))
    monkeypatch.setattr("tfdml.memory.free_memory", lambda: 4 * 4 * (2 * 2 * 64 + 64 + 4 * 4) - 1.0)
    with pytest.raises(UserError, match="a step on 4 images of --image_size=32 would take"):
        build._try_objectives(learner, np.array([0, 0, 1, 1]))


def test_on_a_gpu_the_images_have_to_fit_the_host(monkeypatch):
    embedder, view = Embedder("conv4", embedding_dim=4, image_size=32), TrainTransform(resize=32, image_size=32)
    host = 4 * 3 * 32**2 + 6 * 3 * 32**2
    assert build.images_memory(view, 6) == host
    asked = []
    monkeypatch.setattr(build, "require_memory", lambda size, *words: asked.append(size))
    for on_gpu in (False, True):
        monkeypatch.setattr(build.workers, "on_gpu", lambda on_gpu=on_gpu: on_gpu)
        build.check_memory(embedder, view, 6)
    assert asked == [build.step_memory(embedder, view, 6), host]


def exact_backbone():
    """A frozen convolution, BatchNorm in inference and mean of integers: no sum is rounded, in whatever order."""
    network = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(6, 3, padding="same", activation="relu"),
            keras.layers.BatchNormalization(epsilon=0.0),
        ]
    )
    kernel, bias, *_ = network.weights
    kernel.assign(np.random.default_rng(1).integers(-2, 3, kernel.shape))
    bias.assign(np.arange(6))
    network.layers[1].moving_mean.assign(np.full(6, 4.0))
    return network


@pytest.mark.parametrize(
    ("head", "terms"),
    [
        ("linear", "am_softmax(margin=0.1) + 0.4 * jrs(levels=[pooled, embedding])"),
        pytest.param("mlp(hidden=5)", "cross_batch_memory(loss=contrastive, size=24)", marks=pytest.mark.slow),
        pytest.param("linear", "rank_mi", marks=pytest.mark.slow),
    ],
)
def test_a_head_trains_as_behind_a_frozen_backbone_to_the_last_bit(head, terms):
    train, settings = runs.SPLITS.train, ModelSettings(head=head, embedding_dim=4)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (len(train), 8, 8, 3), np.uint8)
    sampler = ClassBalancedSampler(train.labels, 4, 2, seed=3)
    whole = Embedder(exact_backbone(), image_size=8, scaling="none", **build._projection(settings.head_call(), 4))
    whole.freeze_backbone()
    vectors = np.array(whole.represent(images)["pooled"])
    alone = build.make_embedder(settings, EvaluationTransform(8, 8), vectors.shape[1])
    start, ends = [], []
    for embedder, dataset in (
        (whole, ImageDataset(images=images, labels=train.labels)),
        (alone, ImageDataset(images=VectorImages(vectors), labels=train.labels)),
    ):
        keras.utils.set_random_seed(7)
        learner = MetricLearner(embedder, build_objectives(terms, train.num_classes))
        learner.build((None, *embedder.view_shape))
        weights = checkpoints.parts(learner)
        weights.pop("backbone")
        start = start or {name: values(part) for name, part in weights.items()}
        for name, part in weights.items():
            for weight, array in zip(part, start[name], strict=True):
                weight.assign(array)
        learner.compile(build_optimizer("adam", learner, 0.01, {}))
        view = TrainTransform(resize=8, image_size=8, flip=False)
        learner.fit(training_batches(dataset, sampler, view, num_steps=6), verbose=0, shuffle=False)
        ends.append({name: values(part) for name, part in weights.items()})
    assert ends[0].keys() == ends[1].keys()
    for name, arrays in ends[0].items():
        assert any(np.any(array != before) for array, before in zip(arrays, start[name], strict=True)) or not arrays
        for array, other in zip(arrays, ends[1][name], strict=True):
            np.testing.assert_array_equal(array, other)
    np.testing.assert_array_equal(stack(whole, alone, "pooled")(images), whole(images))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head": "mlpp"}, "--head=mlpp: must be one of linear, mlp, whitened"),
        ({"head": "mlp(width=3)"}, "--head=mlp.width=3.: there is no option 'width', only hidden"),
        ({"head": "mlp(hidden=0)"}, "hidden"),
        ({"head": "mlp", "embedding_dim": 0}, "it needs an --embedding_dim"),
        ({"head": "mlp", "projection_bias": False}, "projection_bias=False"),
        ({"head": "whitened", "projection_bias": False}, "leave out --projection_bias=false"),
        ({"head": "whitened(power=2)"}, "power"),
        ({"head": "mlp", "ensemble_heads": 2}, "the heads of --ensemble_heads are linear"),
    ],
)
def test_heads_that_cannot_be_are_refused(changes, says):
    def make():
        settings = ModelSettings(**{"embedding_dim": 4, **changes})
        return build.make_embedder(settings, EvaluationTransform(1, 1), 6)

    with pytest.raises(UserError, match=says):
        make()


def test_a_head_of_images_may_have_a_layer():
    network = {"backbone": "conv4(width=4)", "embedding_dim": 4}
    view = EvaluationTransform(16, 16)
    made = build.make_embedder(ModelSettings(head="mlp(hidden=3)", **network), view)
    made.build((None, *made.view_shape))
    assert [tuple(weight.shape) for weight in made.head.weights] == [(4, 3), (3,), (3, 4), (4,)]


def test_terms_of_feature_maps_need_a_backbone(tmp_path):
    np.savez(tmp_path / "x.npz", embeddings=np.random.default_rng(0).normal(size=(20, 6)), labels=np.arange(20) // 5)
    settings = runs.experiment(
        tmp_path / "run", features=str(tmp_path / "x.npz"), objectives="contrastive + horde(loss=contrastive)"
    )
    with pytest.raises(UserError, match=r"needs the representation 'feature_map'"):
        build_components(dataclasses.replace(settings, classes_per_batch=2))


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


class ClassMeans(Objective):
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


def projection_of(learner, train):
    return np.asarray(learner.embedder.represent(train.images.data, training=False)["projection"])


def test_the_projection_is_whitened_by_the_training_images_before_objectives_measure_them():
    train, objective = train_split(), ClassMeans()
    objective.calibrates_on = "projection"
    objective.build_from = lambda _: setattr(objective, "means", objective.add_weight(shape=(3, 5), trainable=False))
    learner = learner_with(MetricLoss(ContrastiveLoss()), objective)
    calibrate(learner, train, TRANSFORM, 4, whitening={"power": 1.0, "shrinkage": 0.0})
    found = projection_of(learner, train)
    np.testing.assert_allclose(np.cov(found.T), np.eye(5), atol=1e-2)
    expected = np.stack([found[train.labels == c].mean(0) for c in range(3)])
    np.testing.assert_allclose(np.asarray(objective.means), expected, rtol=1e-3, atol=1e-3)


def test_a_projection_stays_random_where_images_are_too_few_to_whiten_it(caplog):
    train = train_split().take(np.arange(5))
    learner = learner_with(ContrastiveLoss())
    before = projection_of(learner, train)
    calibrate(learner, train, TRANSFORM, 4, whitening={})
    np.testing.assert_array_equal(projection_of(learner, train), before)
    assert "64 pooled features of 5 images are too few for 5 dimensions" in caplog.text
