import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.models.networks import (
    SIZE,
    colored_batch,
    config_of,
    images,
    tiny_backbone,
    tiny_embedder,
    values,
)
from tests.support.mathematics import assert_close
from tfdml import losses
from tfdml.errors import UserError
from tfdml.models import Embedder, Head, MetricLearner
from tfdml.objectives import MetricLoss


def batch_norm_of(embedder):
    (layer,) = [
        x for x in embedder.backbone.layers if isinstance(x, keras.layers.BatchNormalization)
    ]
    return layer


def test_dropout_leaves_out_pooled_features_before_the_projection_in_training_only():
    embedder, x = tiny_embedder(dim=8, dropout=0.5), images(size=3)
    plain = {name: np.asarray(value) for name, value in embedder.represent(x).items()}
    kernel, bias = values(embedder.dense.weights)
    assert_close(plain["projection"], plain["pooled"] @ kernel + bias)
    runs = [embedder.represent(x, training=True, detached=True) for _ in range(2)]
    for r in runs:
        np.testing.assert_array_equal(r["pooled"], plain["pooled"])
        # One mask for both.
        np.testing.assert_array_equal(r["detached_projection"], r["projection"])
        kept = (np.asarray(r["projection"]) - bias) @ np.linalg.pinv(kernel)
        assert np.all(
            np.isclose(kept, 0, atol=1e-3)
            | np.isclose(kept, 2 * plain["pooled"], rtol=1e-3, atol=1e-3)
        )
    assert np.any(np.asarray(runs[0]["projection"]) != np.asarray(runs[1]["projection"]))
    assert np.any(np.asarray(runs[0]["projection"]) != plain["projection"])
    assert not tiny_embedder().drop


@pytest.mark.parametrize("name", ["detached_projection", "detached_embedding"])
def test_the_gradient_of_detached_representations_ends_at_the_dense_layer(name):
    embedder = tiny_embedder(batch_norm="statistics")
    embedder.build((None, SIZE, SIZE, 3))
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(embedder.represent(images(size=3), detached=True)[name] ** 3)
    gradients = tape.gradient(value, [variable.value for variable in embedder.trainable_variables])
    reached = {
        id(v) for v, g in zip(embedder.trainable_variables, gradients, strict=True) if g is not None
    }
    assert reached == {id(variable) for variable in embedder.dense.trainable_variables}


def test_embedding_is_float32_of_unit_length_under_every_policy(policy):
    representations = tiny_embedder().represent(images())
    assert representations["embedding"].dtype == tf.float32
    assert representations["pooled"].dtype == keras.config.dtype_policy().compute_dtype
    assert_close(np.linalg.norm(representations["embedding"], axis=1), np.ones(8), 1e-6)


def trained(batch_norm, steps=2):
    """An embedder, and its BatchNorm's gamma, beta, mean and variance before and after training."""
    labels, x = colored_batch()
    embedder = tiny_embedder(batch_norm=batch_norm)
    learner = MetricLearner(embedder, losses.ContrastiveLoss())
    learner.compile(optimizer=keras.optimizers.SGD(0.1), run_eagerly=True)
    learner.build((None, SIZE, SIZE, 3))
    before = values(batch_norm_of(embedder).weights)
    learner.fit(x, labels, batch_size=len(x), epochs=steps, verbose=0)
    changed = [
        not np.array_equal(*pair)
        for pair in zip(before, values(batch_norm_of(embedder).weights), strict=True)
    ]
    return embedder, dict(zip(("gamma", "beta", "mean", "variance"), changed, strict=True))


@pytest.mark.parametrize(
    ("batch_norm", "training", "moving"),
    [("frozen", False, False), ("statistics", True, False), ("train", True, True)],
)
def test_batch_norm_mode_decides_what_changes(batch_norm, training, moving):
    embedder, changed = trained(batch_norm)
    assert changed == {"gamma": training, "beta": training, "mean": moving, "variance": moving}
    trainable = {id(variable) for variable in embedder.trainable_variables}
    norm = batch_norm_of(embedder)
    assert (id(norm.gamma) in trainable) is training
    assert (id(norm.beta) in trainable) is training
    assert {
        id(variable) for variables in embedder.parts().values() for variable in variables
    } == trainable
    assert id(embedder.dense.kernel) in trainable


@pytest.mark.one_quick_case
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "scaling": "caffe",
            "pooling": "max",
            "batch_norm": "train",
            "resize": 20,
            "resize_mode": "squash",
        },
        {"batch_norm": "statistics", "name": "mine"},
        {
            "dropout": 0.25,
            "resize_mode": "pad",
            "pad_color": (255, 128, 0),
            "projection_bias": False,
        },
    ],
)
def test_saves_and_loads(tmp_path, options, policy):
    embedder = tiny_embedder(**options)
    batch_norm_of(embedder).moving_mean.assign(np.linspace(-1, 1, 6))
    x = images()
    expected = embedder.predict(x, verbose=0)
    embedder.save(tmp_path / "embedder.keras")
    keras.config.set_dtype_policy("float32")
    again = keras.saving.load_model(tmp_path / "embedder.keras")
    np.testing.assert_array_equal(again.predict(x, verbose=0), expected)
    assert config_of(again) == config_of(embedder)
    assert again.dtype_policy.name == policy
    assert again.dense.use_bias is options.get("projection_bias", True)
    assert [v.path for v in again.trainable_variables] == [
        v.path for v in embedder.trainable_variables
    ]


def vector_backbone():
    """Images to vectors (B, 6)."""
    inner = tiny_backbone()
    return keras.Model(
        inner.inputs[0], keras.layers.GlobalMaxPooling2D()(inner.output), name="vectors"
    )


def test_a_backbone_may_give_vectors(tmp_path):
    embedder = Embedder(vector_backbone(), embedding_dim=5, image_size=SIZE)
    embedder.build((None, SIZE, SIZE, 3))
    x = images(size=3)
    r = embedder.represent(x, detached=True)
    assert list(r) == [
        "pooled",
        "projection",
        "embedding",
        "detached_projection",
        "detached_embedding",
    ]
    assert_close(r["pooled"], embedder.backbone(x / 127.5 - 1.0))
    assert {
        name: tuple(value.shape) for name, value in r.items()
    } == embedder.representation_shapes((3, SIZE, SIZE, 3))
    assert Embedder(vector_backbone(), embedding_dim=0, image_size=SIZE).embedding_dim == 6
    embedder.save(tmp_path / "embedder.keras")
    np.testing.assert_array_equal(
        keras.saving.load_model(tmp_path / "embedder.keras")(x), embedder(x)
    )
    learner = MetricLearner(embedder, losses.ContrastiveLoss())
    learner.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
    labels, batch = colored_batch()
    before = values(embedder.trainable_variables)
    learner.train_on_batch(batch, labels)
    assert all(
        np.any(new != old)
        for new, old in zip(values(embedder.trainable_variables), before, strict=True)
    )
    with pytest.raises(
        ValueError, match="needs the representation 'feature_map', but there are only"
    ):
        MetricLearner(embedder, MetricLoss(losses.ContrastiveLoss(), "feature_map"))


def test_images_of_a_size_that_a_backbone_does_not_take_are_refused():
    fixed = keras.Sequential([keras.Input((16, 16, 3)), keras.layers.GlobalAveragePooling2D()])
    embedder = Embedder(fixed, embedding_dim=4, image_size=16)
    with pytest.raises(UserError, match=r"shape \(N, 16, 16, 3\), not \(2, 12, 16, 3\)"):
        embedder.predict(np.zeros((2, 12, 16, 3)), verbose=0)


def sequences_backbone():
    inputs = keras.Input((SIZE, SIZE, 3))
    return keras.Model(inputs, keras.layers.Reshape((-1, 3))(inputs))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": keras.layers.Dense(4), "embedding_dim": 5}, "embedding_dim=5"),
        ({"head": keras.layers.Reshape((2, 3))}, "head must give vectors"),
        ({"backbone": vector_backbone(), "pooling": "gem"}, "pooling='gem'"),
        ({"backbone": sequences_backbone()}, r"must give maps .* not \(None, 144, 3\)"),
    ],
)
def test_heads_and_backbones_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Embedder(**{"backbone": tiny_backbone(), "image_size": SIZE, **options})


@pytest.mark.parametrize("batch_norm", ["frozen", "statistics"])
def test_fit_warns_of_random_weights_behind_batch_norm_that_is_not_trained(batch_norm):
    norms = [keras.layers.BatchNormalization() for _ in range(11)]
    deep = keras.Sequential([keras.Input((12, 12, 3)), keras.layers.Conv2D(2, 1), *norms])
    learner = MetricLearner(
        Embedder(deep, 4, image_size=12, batch_norm=batch_norm), losses.ContrastiveLoss()
    )
    learner.compile("sgd", run_eagerly=True)
    with pytest.warns(UserWarning, match="BatchNorm statistics"):
        learner.fit(np.zeros((4, 12, 12, 3), "uint8"), np.arange(4) % 2, verbose=0)


def test_a_head_is_a_dense_layer_and_a_division_by_the_length(tmp_path):
    head = Head(6, embedding_dim=4)
    x = np.random.default_rng(0).normal(size=(3, 6)).astype("float32")
    found = keras.ops.convert_to_numpy(head(x))
    kernel, bias = map(keras.ops.convert_to_numpy, head.dense.weights)
    projected = x.astype("float64") @ kernel + bias
    np.testing.assert_allclose(
        found, projected / np.linalg.norm(projected, axis=1, keepdims=True), atol=1e-6
    )
    assert "feature_map" not in head.representations
    np.testing.assert_array_equal(head.represent(x)["pooled"], x)
    head.save(tmp_path / "head.keras")
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "head.keras")(x), found)


def test_a_whitened_projection_has_uncorrelated_components_of_equal_variance():
    rng = np.random.default_rng(0)
    vectors = (rng.normal(size=(200, 6)) @ rng.normal(size=(6, 6)) + 3).astype("float32")
    head = Head(6, embedding_dim=4)
    head.whiten(vectors)
    projected = np.array(head.represent(vectors)["projection"])
    np.testing.assert_allclose(projected.mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(np.cov(projected.T), np.eye(4), atol=1e-3)
    whole = Head(6, embedding_dim=6)
    whole.whiten(vectors, power=0)
    rotated = np.array(whole.represent(vectors)["projection"])
    np.testing.assert_allclose(
        np.var(rotated, axis=0).sum(), np.var(vectors, axis=0).sum(), rtol=1e-4
    )


@pytest.mark.parametrize("batch_norm", ["frozen", "statistics", "train"])
def test_random_layers_train_in_every_mode_of_batch_norm(batch_norm, tmp_path):
    inner = keras.Sequential(
        [keras.Input((6, 6, 4)), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    )
    images = keras.Input((8, 8, 3))
    backbone = keras.Model(images, inner(keras.layers.Conv2D(4, 3)(images)))
    embedder = Embedder(backbone, embedding_dim=4, image_size=8, batch_norm=batch_norm)
    x = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3)).astype("float32")
    embedder(x)
    norm = inner.layers[0]
    norm.moving_mean.assign([0.1, 0.2, 0.3, 0.4])
    norm.moving_variance.assign([0.5, 1.0, 1.5, 2.0])
    embedder.save(tmp_path / "e.keras")
    for model in (embedder, keras.saving.load_model(tmp_path / "e.keras")):
        maps = [
            np.asarray(model.represent(x, training=training)["feature_map"])
            for training in (False, True)
        ]
        dropped = maps[1] == 0
        assert 0.3 < dropped.mean() < 0.7
        # What is left is twice what inference gives, where statistics are those of inference.
        same = np.allclose(maps[1][~dropped], 2 * maps[0][~dropped], rtol=1e-4, atol=1e-5)
        assert same == (batch_norm != "train")


def test_a_head_turns_vectors_to_those_of_another_model():
    """It undoes a rotation exactly, keeps distances, and refuses other images."""
    rng = np.random.default_rng(0)
    old = rng.normal(size=(60, 6))
    old /= np.linalg.norm(old, axis=1, keepdims=True)
    turn = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    head = Head(6, embedding_dim=6)
    head.align(old @ turn, old)
    np.testing.assert_allclose(head(old @ turn), old, atol=1e-5)
    noisy = old @ turn + 0.3 * rng.normal(size=(60, 6))
    noisy /= np.linalg.norm(noisy, axis=1, keepdims=True)
    head.align(noisy, old)
    turned = np.asarray(head(noisy))
    np.testing.assert_allclose(turned @ turned.T, noisy @ noisy.T, atol=1e-5)
    for vectors, targets in ((noisy, old[1:]), (noisy[:, 1:], old), (noisy, old[:, 1:])):
        with pytest.raises(ValueError, match="must be"):
            head.align(vectors, targets)
    with pytest.raises(ValueError, match="not all finite"):
        head.align(noisy * np.nan, old)
