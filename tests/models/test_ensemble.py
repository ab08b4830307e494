import keras
import numpy as np
import pytest

from tests.models.ensembles import cuttable_backbone, ensemble_learner, tiny_ensemble
from tests.models.networks import SIZE, colored_batch, config_of, images, values
from tests.support.mathematics import assert_close
from tfdml import backbones
from tfdml.models import AttentionEnsemble


def numpy(x):
    return keras.ops.convert_to_numpy(x)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("cut", [("first", "second"), ("first",), "second", ("second", "second")])
def test_each_head_is_the_rest_of_the_backbone_on_its_masked_map(cut):
    ensemble = tiny_ensemble(cut=cut, scaling="unit")
    x = images(size=3)
    r = {name: numpy(value) for name, value in ensemble.represent(x, detached=True).items()}
    at = cut if isinstance(cut, str) else cut[0]
    trunk, rest = backbones.cut(cuttable_backbone(), at)
    features = numpy(trunk(x / 255.0))
    # The attention network of a new ensemble is the backbone's own stretch.
    context = (
        numpy(backbones.cut(rest, "second")[0](features))
        if len(cut) == 2 and cut[0] == "first"
        else features
    )
    kernel, bias = values(ensemble.attention_heads.weights)
    weights, offset = values(ensemble.dense.weights)
    channels = features.shape[-1]
    for m in range(3):
        own = slice(m * channels, (m + 1) * channels)
        mask = 1.0 / (1.0 + np.exp(-(context @ kernel[0, 0, :, own] + bias[own])))
        assert_close(ensemble.masks(x)[:, m], mask)
        feature_map = numpy(rest(features * mask))
        pooled = feature_map.mean((1, 2))
        projection = pooled @ weights + offset
        assert_close(r["feature_map"][..., 6 * m : 6 * m + 6], feature_map)
        assert_close(r["pooled"][:, 6 * m : 6 * m + 6], pooled)
        assert_close(r["projection"][:, 2 * m : 2 * m + 2], projection)
        assert_close(r["heads"][:, m], unit(projection))
        assert_close(r["embedding"][:, 2 * m : 2 * m + 2], unit(projection) / np.sqrt(3))
    assert_close(r["detached_embedding"], r["embedding"])
    assert_close(r["detached_projection"], r["projection"])
    assert ensemble.representation_shapes(x.shape) == {
        name: value.shape for name, value in r.items()
    }
    assert_close(ensemble(x), r["embedding"])


def test_parts_divide_the_trainable_variables():
    for cut in (("first", "second"), "first"):
        ensemble = tiny_ensemble(cut=cut)
        ensemble.build((None, SIZE, SIZE, 3))
        parts = ensemble.parts()
        named = [id(variable) for variables in parts.values() for variable in variables]
        assert sorted(named) == sorted(id(variable) for variable in ensemble.trainable_variables)
        assert len(parts["projection"]) == 4
        ensemble.freeze_backbone()
        assert ensemble.parts()["backbone"] == []
        assert len(ensemble.trainable_variables) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch_norm", "training", "moving"),
    [("frozen", False, False), ("statistics", True, False), ("train", True, True)],
)
def test_the_attention_network_starts_as_a_copy_and_learns_by_itself(batch_norm, training, moving):
    learner = ensemble_learner(batch_norm=batch_norm)
    learner.build((None, SIZE, SIZE, 3))
    networks = (learner.embedder.backbone, learner.embedder.attention)
    norms = [
        x
        for model in networks
        for x in model.layers
        if isinstance(x, keras.layers.BatchNormalization)
    ]
    assert len(norms) == 4
    shared = [networks[0].get_layer("second_conv"), networks[1].get_layer("attention_second_conv")]
    first, second = (values([layer.kernel])[0] for layer in shared)
    np.testing.assert_array_equal(first, second)
    before = [values(norm.weights) for norm in norms]
    learner.compile(optimizer=keras.optimizers.SGD(0.5))
    labels, x = colored_batch()
    learner.fit(x, labels, batch_size=len(x), epochs=2, verbose=0)
    own, copied = (values([layer.kernel])[0] for layer in shared)
    assert (
        min(np.abs(own - first).max(), np.abs(copied - first).max(), np.abs(own - copied).max())
        > 1e-5
    )
    for norm, old in zip(norms, before, strict=True):
        changed = [
            not np.array_equal(*pair) for pair in zip(values(norm.weights), old, strict=True)
        ]
        assert changed == [training, training, moving, moving]


@pytest.mark.one_quick_case
@pytest.mark.parametrize("cut", [("first", "second"), ("second",)])
def test_saves_and_loads(tmp_path, cut, policy):
    ensemble = tiny_ensemble(cut=cut, scaling="caffe", pooling="max", batch_norm="train")
    x = images()
    for layer in ensemble.backbone.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.moving_mean.assign(np.linspace(-1, 1, layer.moving_mean.shape[0]))
    if ensemble.attention is not None:
        ensemble.attention.get_layer("attention_second_bn").beta.assign(np.linspace(-1, 1, 5))
    expected = ensemble.predict(x, verbose=0)
    ensemble.save(tmp_path / "ensemble.keras")
    keras.config.set_dtype_policy("float32")
    again = keras.saving.load_model(tmp_path / "ensemble.keras")
    assert isinstance(again, AttentionEnsemble)
    np.testing.assert_array_equal(again.predict(x, verbose=0), expected)
    assert config_of(again) == config_of(ensemble)
    assert [v.path for v in again.trainable_variables] == [
        v.path for v in ensemble.trainable_variables
    ]
