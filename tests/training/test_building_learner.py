"""The learner, the images and their checks are what the flags of a run say."""

import dataclasses
import types

import keras
import numpy as np
import pytest
from PIL import Image

from tests.models.networks import values
from tests.training.runs import learner
from tfdml.errors import UserError
from tfdml.training import Experiment, building
from tfdml.training.building import load_splits

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
    return learner(dataclasses.replace(TINY, **changes), num_classes=4, steps_per_epoch=5)


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
    tiny = made(gradient_cache=16, cross_batch_memory=32, xbm_start=3, objectives="contrastive")
    assert tiny.gradient_cache == 16
    assert (tiny.objectives[0].size, tiny.objectives[0].start) == (32, 3)
    with pytest.raises(UserError, match="--xbm_start=3 needs --cross_batch_memory"):
        made(xbm_start=3)
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(UserError, match="--gradient_cache=16 works on TensorFlow, and KERAS_BACKEND is jax"):
        made(gradient_cache=16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_cache": 16}, "do not go with `gradient_cache=16`, whose chunks"),
        ({"cross_batch_memory": 16}, "auto weights do not go with contrastive, whose loss goes on changing"),
        ({"objectives": "rank_mi + auto * gor"}, "do not go with rank_mi, whose steps alternate"),
        ({"objectives": "contrastive + auto(steps=5) * gor + auto * ecaml"}, r"the same steps, not \[5, 100\]"),
    ],
)
def test_weights_that_cannot_be_measured_are_refused(changes, message):
    with pytest.raises(UserError, match=f"^--objectives='.*': .*{message}"):
        made(**{"objectives": "contrastive + auto * gor", **changes})


def test_weights_are_not_measured_on_jax(monkeypatch):
    assert made(objectives="contrastive + auto * gor").term_weights() == {"contrastive": 1.0, "gor": 0.0}
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(UserError, match="measured on Keras's TensorFlow backend, and this is jax: write numbers"):
        made(objectives="contrastive + auto * gor")


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
    monkeypatch.setattr(building.tf.distribute, "get_strategy", lambda: types.SimpleNamespace(num_replicas_in_sync=2))
    assert [building._compiles(setting) for setting in ("auto", "false")] == [False, False]
    with pytest.raises(UserError, match="--jit_compile=true goes with one device"):
        building._compiles("true")


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
    return dataclasses.replace(TINY, dataset="folder", data_dir=str(folder), **changes).data


def test_images_of_both_splits_are_checked_as_the_flags_say(photos):
    splits = load_splits(of_folder(photos, check_images="headers"), seed=0)
    assert (len(splits.train), len(splits.test)) == (4, 4)
    with pytest.raises(UserError, match=r"7\.png"):
        load_splits(of_folder(photos, check_images="decode"), seed=0)
    splits = load_splits(of_folder(photos, check_images="decode", bad_images="skip"), seed=0)
    assert (len(splits.train), len(splits.test)) == (4, 3)


def test_training_classes_are_numbered_from_zero():
    glyphs = dataclasses.replace(TINY, dataset="glyphs", dataset_options="images_per_class=1, size=16")
    splits = load_splits(dataclasses.replace(glyphs, holdout_classes=0.3).data, seed=0)
    assert splits.train.classes.tolist() == list(range(splits.train.num_classes))
    assert splits.validation is not None
    assert not set(splits.train.class_names.values()) & set(splits.validation.class_names.values())


def test_lora_has_its_flag():
    with pytest.raises(UserError, match="--lora_rank=4: LoRA changes attention layers, and conv4 has none"):
        made(lora_rank=4)
    with pytest.raises(UserError, match="--lora_rank=4 trains changes of the backbone, and with --backbone_rate=0"):
        made(lora_rank=4, backbone_rate=0.0)


def test_an_embedding_of_no_size_of_its_own_is_the_pooled_features():
    embedder = made(embedding_dim=0, pooling="gem").embedder
    pixels = np.random.default_rng(0).uniform(0, 255, (2, 16, 16, 3))
    found = embedder.represent(pixels)
    assert embedder.embedding_dim == 2
    np.testing.assert_allclose(found["projection"], found["pooled"], atol=1e-6)
    with pytest.raises(UserError, match=r"--backbone=conv4.*pooling='cls'"):
        made(pooling="cls")
