import keras
import numpy as np
import pytest

from tfdml import UserError, backbones
from tfdml.io.files import sha256_of
from tfdml.models import Embedder

# Small enough to be quick; every network takes images of this size.
SIZE = 75


def weights_of(model):
    return [keras.ops.convert_to_numpy(weight) for weight in model.weights]


# One of each kind of layer that keeps state: normalization, squeeze and excitation, layer scale,
# pixel statistics.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mobilenetv3small", "efficientnetb0", "convnexttiny", "bn_inception"]
)
def test_every_backbone_takes_its_own_weights_file(name, tmp_path):
    keras.utils.set_random_seed(1)
    source = backbones.resolve(name, SIZE).model
    # A file may hold the state of an optimizer, too.
    source.compile("adam")
    source.optimizer.build(source.trainable_variables)
    path = str(tmp_path / "x.weights.h5")
    source.save_weights(path)
    loaded = backbones.resolve(name, SIZE, weights=path)
    for actual, expected in zip(weights_of(loaded.model), weights_of(source), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert loaded.model.output_shape[-1] >= 64
    keras.backend.clear_session()


@pytest.mark.parametrize(
    ("name", "application"),
    [
        ("resnet50", "resnet"),
        ("resnet50v2", "resnet_v2"),
        ("inceptionv3", "inception_v3"),
        ("mobilenetv2", "mobilenet_v2"),
        ("mobilenetv3small", "mobilenet_v3"),
        ("efficientnetb0", "efficientnet"),
        ("efficientnetv2b0", "efficientnet_v2"),
        ("convnexttiny", "convnext"),
        ("densenet121", "densenet"),
    ],
)
def test_scaling_is_the_one_the_published_weights_expect(name, application):
    from tfdml.backbones import resolver
    from tfdml.layers import InputScaling

    pixels = np.random.default_rng(0).uniform(0, 255, (1, 4, 4, 3)).astype("float32")
    expected = getattr(keras.applications, application).preprocess_input(pixels.copy())
    actual = InputScaling(resolver._BACKBONES[name].scaling)(pixels)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "scaling", "channels", "parameters"),
    [
        # The published counts, less those of the classifier, plus those of BatchNorm's statistics.
        ("googlenet", "googlenet", 1024, 6_998_552 - 1_025_000),
        ("googlenet_bn", "tf", 1024, 6_624_904 - 1_025_000 + 2 * 7_280),
        ("bn_inception", "bn_inception", 1024, 11_295_240 - 1_025_000 + 2 * 10_016),
        ("resnet50_v1_5", "torch", 2048, 25_557_032 - 2_049_000 + 2 * 26_560),
    ],
)
def test_the_papers_backbones_have_their_published_size(name, scaling, channels, parameters):
    backbone = backbones.resolve(name, 224)
    assert backbone.scaling == scaling
    assert backbone.model.output_shape == (None, 7, 7, channels)
    assert backbone.model.count_params() == parameters
    assert backbone.ensemble_cut


def test_a_changed_byte_is_found_by_the_checksum_next_to_the_weights(tmp_path):
    model, path = backbones.resolve("conv4(width=4)", 32).model, tmp_path / "x.weights.h5"
    model.save_weights(path)
    checksum = tmp_path / "x.weights.h5.sha256"
    checksum.write_text(f"{sha256_of(path)}  x.weights.h5\n")
    backbones.load_weights(model, str(path))
    before = weights_of(model)
    data = bytearray(path.read_bytes())
    place = data.find(before[0].tobytes())
    data[place + 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"damaged or was changed"):
        backbones.load_weights(model, str(path))
    for actual, expected in zip(weights_of(model), before, strict=True):
        np.testing.assert_array_equal(actual, expected)
    checksum.write_text("")
    with pytest.raises(UserError, match=r"damaged or was changed"):
        backbones.load_weights(model, str(path))


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["another alpha", "with its top", "text", "cut short"])
def test_wrong_weights_file_is_refused_and_changes_nothing(wrong, tmp_path):
    model, path = backbones.resolve("mobilenetv2", 32, alpha=0.35).model, tmp_path / "x.weights.h5"
    other = keras.applications.MobileNetV2(
        input_shape=(32, 32, 3),
        alpha=0.5 if wrong == "another alpha" else 0.35,
        weights=None,
        include_top=wrong == "with its top",
        classes=10,
    )
    other.save_weights(path)
    if wrong == "text":
        path.write_text("not weights\n" * 100)
    elif wrong == "cut short":
        path.write_bytes(path.read_bytes()[:20_000])
    before = weights_of(model)
    with pytest.raises(UserError, match=str(path)):
        backbones.load_weights(model, str(path))
    for actual, expected in zip(weights_of(model), before, strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": "resnet5"}, "did you mean 'resnet50'"),
        ({"name": "resnet50", "alpha": 0.5}, "has no option 'alpha'"),
        ({"name": "mobilenetv2(alpha=-1)"}, "alpha must be positive"),
        ({"name": "mobilenetv2(alpha="}, "cannot be read"),
        ({"name": "conv4", "weights": "imagenet"}, "no ImageNet weights"),
        ({"name": "resnet50", "weights": "no/such.weights.h5"}, "there is no file"),
    ],
)
def test_names_are_checked_without_building_as_they_are_with_it(arguments, says, monkeypatch):
    monkeypatch.setattr(keras.applications, "ResNet50", None)
    for call in (backbones.check, lambda name, **options: backbones.resolve(name, 32, **options)):
        with pytest.raises(UserError, match=says):
            call(**arguments)


@pytest.mark.parametrize("name", ["ResNet50", "res-net_50", "RESNET.50"])
def test_case_and_punctuation_of_a_name_do_not_matter(name):
    backbones.check(name)
    with pytest.raises(UserError, match="unknown"):
        backbones.check(f"{name}0")


def test_a_name_may_have_its_options_with_it():
    narrow = backbones.resolve("MobileNetV2(alpha=0.35)", 32).model
    assert (
        narrow.count_params()
        == backbones.resolve("mobilenetv2", 32, alpha=0.35).model.count_params()
    )
    assert Embedder("conv4(width=8)", embedding_dim=4, image_size=32).backbone.output_shape[-1] == 8
    for name, size in (("inceptionv3", 32), ("conv4", 8), ("mobilenetv2", -1)):
        with pytest.raises(UserError, match=f"{size} px"):
            backbones.resolve(name, size)
