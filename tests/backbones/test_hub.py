"""Presets of KerasHub as backbones: small networks of each family, from folders."""

import shutil
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.backbones.hub_networks import (
    FAMILIES,
    OFFSET,
    PATCH,
    SCALE,
    SIZE,
    TRANSFORMERS,
    WIDTH,
    preset,
)
from tests.support.marks import has_keras_hub
from tfdml import UserError, backbones
from tfdml.export.saved_model import in_float32
from tfdml.models import Embedder, TextEmbedder

pytestmark = has_keras_hub
# The others take the same way, and seconds.
QUICK = ("dinov2", "siglip")
SOME = [
    family if family in QUICK else pytest.param(family, marks=pytest.mark.slow)
    for family in FAMILIES
]
SIZED = [
    "vit",
    *(pytest.param(family, marks=pytest.mark.slow) for family in TRANSFORMERS if family != "vit"),
]
OWN = {"siglip": "attention", "swin": "", "resnet": ""}


@pytest.fixture(scope="module")
def presets(tmp_path_factory):
    """Makes the preset of a family once: its backbone's name and its network."""
    made = {}

    def make(family):
        if family not in made:
            made[family] = preset(tmp_path_factory.mktemp("presets") / family, family)
        return made[family]

    return make


def images(count=3, size=SIZE):
    return np.random.default_rng(0).uniform(0, 255, (count, size, size, 3)).astype("float32")


def vision(network):
    return getattr(network, "vision_encoder", network)


def tokens_of(network, pixels):
    """The tokens that the network itself gives for scaled pixels, without the leading ones; and the
    first."""
    network = vision(network)
    if type(network).__name__ == "SigLIPVisionEncoder":
        inner = keras.Model(network.inputs[0], [network.post_layer_norm.output, network.output])
        return [np.array(part) for part in inner(pixels)]
    names = [tensor.name for tensor in network.inputs]
    tokens = np.array(network({names[0]: pixels} if isinstance(network.input, dict) else pixels))
    leading = {
        "DINOV2Backbone": 4,
        "DINOV3Backbone": 5,
        "DeiTBackbone": 2,
        "SwinTransformerBackbone": 0,
    }
    return tokens[:, leading.get(type(network).__name__, 1) :], tokens[:, 0]


@pytest.mark.one_quick_case
@pytest.mark.parametrize("family", SOME)
def test_the_map_is_that_of_the_preset_and_is_saved_with_the_embedder(presets, family, tmp_path):
    name, network = presets(family)
    backbone = backbones.resolve(name, SIZE)
    assert backbone.scaling == {"scale": pytest.approx(SCALE), "offset": pytest.approx(OFFSET)}
    embedder = Embedder(backbone, embedding_dim=0, image_size=SIZE)
    x = images()
    scaled = x * np.array(SCALE, "float32") + np.array(OFFSET, "float32")
    found = {key: np.array(value) for key, value in embedder.represent(x).items()}
    if family == "resnet":
        expected = np.array(network(scaled))
    else:
        patches, first = tokens_of(network, scaled)
        side = SIZE // PATCH
        expected = np.stack(
            [[patches[:, row * side + column] for column in range(side)] for row in range(side)]
        )
        expected = expected.transpose(2, 0, 1, 3)
        assert expected.shape == (3, side, side, WIDTH)
        if OWN.get(family, "cls"):
            both = backbone.model.with_vector(scaled)
            np.testing.assert_allclose(both[0], expected, atol=1e-5)
            np.testing.assert_allclose(both[1], first, atol=1e-5)
    np.testing.assert_allclose(found["feature_map"], expected, atol=1e-5)
    np.testing.assert_allclose(found["pooled"], expected.mean(axis=(1, 2)), atol=1e-5)
    # Without training the embedding is what the preset gives.
    lengths = np.linalg.norm(found["pooled"], axis=1, keepdims=True)
    np.testing.assert_allclose(found["embedding"], found["pooled"] / lengths, atol=1e-5)
    expected = embedder(x)
    embedder.save(tmp_path / "e.keras")
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "e.keras")(x), expected)


@pytest.mark.one_quick_case
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_trained_positions_of_dinov2_are_saved(presets, sign, tmp_path):
    embedder = Embedder(
        backbones.resolve(presets("dinov2")[0], 2 * SIZE), embedding_dim=8, image_size=2 * SIZE
    )
    embedder.build((None, 2 * SIZE, 2 * SIZE, 3))
    embedder.built = True
    (table,) = (
        v for v in embedder.backbone.variables if v.name == "interpolated_position_embeddings"
    )
    assert table.trainable
    table.assign(table + sign * np.abs(np.random.default_rng(1).normal(size=table.shape)))
    embedder.save(tmp_path / "e.keras")
    x = images(size=2 * SIZE)
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "e.keras")(x), embedder(x))


@pytest.mark.slow
@pytest.mark.parametrize("family", SIZED)
def test_another_size_keeps_every_weight_but_the_positions(presets, family):
    name, network = presets(family)
    native, larger = (backbones.resolve(name, size).model for size in (SIZE, 2 * SIZE))
    assert larger.output_shape == (None, 2 * SIZE // PATCH, 2 * SIZE // PATCH, WIDTH)
    learned = 0
    for ours, old, new in zip(
        vision(network).variables, native.variables, larger.variables, strict=family != "siglip"
    ):
        if family != "siglip":
            np.testing.assert_array_equal(ours, old)
        if old.shape == new.shape:
            np.testing.assert_array_equal(old, new)
            continue
        if new.name == "position_ids":
            np.testing.assert_array_equal(new, np.arange(new.shape[1])[None])
            continue
        learned += 1
        rows, grown = (np.array(part).reshape(-1, WIDTH) for part in (old, new))
        leading = len(rows) - (SIZE // PATCH) ** 2
        np.testing.assert_array_equal(rows[:leading], grown[:leading])
        grid = tf.image.resize(rows[leading:].reshape(1, 4, 4, WIDTH), (8, 8), method="bicubic")
        np.testing.assert_allclose(grown[leading:], np.array(grid).reshape(-1, WIDTH), atol=1e-6)
    assert learned == {"dinov3": 0, "swin": 0, "dinov2": 2}.get(family, 1)
    assert np.isfinite(np.array(larger(images(size=2 * SIZE) / 255))).all()


@pytest.mark.parametrize(
    "pooling", ["cls", *(pytest.param(p, marks=pytest.mark.slow) for p in ("gem", "attention"))]
)
def test_every_weight_gets_a_gradient(presets, pooling):
    family = "siglip" if pooling == "attention" else "dinov2"
    embedder = Embedder(
        backbones.resolve(presets(family)[0], SIZE),
        embedding_dim=8,
        image_size=SIZE,
        pooling=pooling,
    )
    embedder.build((None, SIZE, SIZE, 3))
    variables = embedder.trainable_variables
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(embedder(images()) * np.arange(8.0, dtype="float32"))
    gradients = tape.gradient(loss, [variable.value for variable in variables])
    gradients = [
        None if g is None else tf.convert_to_tensor(g) for g in gradients
    ]  # of a table, its rows
    # The bias of keys has none: softmax does not see it.
    still = [
        v.path
        for v, g in zip(variables, gradients, strict=True)
        if g is None or not np.abs(g).max() > 1e-9
    ]
    assert not [path for path in still if not path.endswith("key/bias")], still
    assert not any("mask_token" in variable.path for variable in variables)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_low_rank_changes_and_mixed_precision_are_gone_from_what_is_saved_and_exported(
    policy, tmp_path
):
    keras.config.set_dtype_policy(policy)
    try:
        network = preset(tmp_path / "preset", "dinov2")[1]
        network.enable_lora(2)
        mixed = Embedder(
            backbones.TokenBackbone(network), embedding_dim=0, image_size=SIZE, pooling="cls"
        )
        mixed.build((None, SIZE, SIZE, 3))
    finally:
        keras.config.set_dtype_policy("float32")
    for variable in mixed.backbone.variables:
        if "lora" in variable.name:
            variable.assign(np.random.default_rng(0).normal(scale=0.3, size=variable.shape))
    representations = mixed.represent(images())
    assert representations["feature_map"].dtype == policy.removeprefix("mixed_")
    exact = in_float32(mixed)
    cosines = (np.array(representations["embedding"]) * np.array(exact(images()))).sum(axis=1)
    assert cosines.min() > 0.999
    mixed(images())
    mixed.save(tmp_path / "e.keras")
    saved = keras.saving.load_model(tmp_path / "e.keras")
    assert not any("lora" in variable.name for variable in [*saved.variables, *exact.variables])
    np.testing.assert_allclose(in_float32(saved)(images()), exact(images()), atol=1e-5)


@pytest.mark.slow
def test_a_preset_of_texts_is_an_embedder_of_texts(tmp_path):
    from keras_hub import models

    keras.utils.set_random_seed(0)
    network = models.BertBackbone(12, 1, 2, 8, 16, max_sequence_length=16)
    network.save_to_preset(str(tmp_path))
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "a",
        "red",
        "blue",
        "car",
        "boat",
        "of",
        "wood",
    ]
    models.BertTokenizer(words).save_to_preset(str(tmp_path))
    texts = ["a red car", "a blue boat of wood"]
    vectors = {}
    for length in (16, 8, 10):
        encoder, tokenizer = backbones.load_text_preset(str(tmp_path), length)
        embedder = TextEmbedder(encoder, tokenizer, embedding_dim=0)
        assert embedder.tokenize(texts[:1]).shape == (1, length)
        vectors[length] = embedder.embed_texts(texts)
    # The mean of the last layer over the tokens of the text, without those that fill it up.
    tokens = np.array([[2, 5, 6, 8, 3]])
    inputs = {
        "token_ids": tokens,
        "padding_mask": np.ones_like(tokens),
        "segment_ids": np.zeros_like(tokens),
    }
    mean = np.array(network(inputs)["sequence_output"]).mean(axis=1)[0]
    np.testing.assert_allclose(vectors[16][0], mean / np.linalg.norm(mean), atol=1e-5)
    np.testing.assert_allclose(vectors[8], vectors[16], atol=1e-5)
    with pytest.raises(UserError, match=r"the first is text 1, 'a blue boat of wood'"):
        TextEmbedder(*backbones.load_text_preset(str(tmp_path), 6), embedding_dim=0).embed_texts(
            texts
        )
    embedder.save(tmp_path / "embedder.keras")
    again = keras.saving.load_model(tmp_path / "embedder.keras")
    np.testing.assert_allclose(again.embed_texts(texts), vectors[10], atol=1e-6)


def test_what_cannot_be_had_is_refused(presets, tmp_path, monkeypatch):
    name = presets("dinov2")[0]
    folder = tmp_path / "copy"
    shutil.copytree(name.removeprefix("hub:"), folder)
    (folder / "model.weights.h5").write_bytes(b"nothing")
    for wrong, size, options, says in (
        ("hub:dinov9", SIZE, {}, "no such folder"),
        (name, 30, {}, "try 32"),
        (name, SIZE, {"alpha": 1}, "has no options"),
        (name, SIZE, {"weights": "imagenet"}, "comes with its weights"),
        (f"hub:{folder}", SIZE, {}, "cannot be loaded"),
    ):
        with pytest.raises(UserError, match=says):
            backbones.resolve(wrong, size, **options)
    (folder / "image_converter.json").unlink()
    with pytest.raises(UserError, match=r"no image_converter\.json"):
        backbones.resolve(f"hub:{folder}", SIZE)
    monkeypatch.setitem(sys.modules, "keras_hub", None)
    with pytest.raises(UserError, match=r"tfdml\[hub\]"):
        backbones.resolve("hub:dinov2_small", SIZE)
