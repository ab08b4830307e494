"""Checkpoints of every kind, written byte by byte, become weights of the backbones; wrong ones are named."""

import functools
import os
import pickle
import struct
import zipfile

import h5py
import keras
import numpy as np
import pytest

from tests.backbones.checkpoint_files import write_caffemodel, write_safetensors, write_torch
from tfdml import UserError, backbones
from tfdml.backbones.conversion import ARCHITECTURES, convert, read_checkpoint

pytestmark = pytest.mark.slow

GOOGLENET_BRANCHES = {
    "1x1": "branch1",
    "3x3_reduce": "branch2.0",
    "3x3": "branch2.1",
    "5x5_reduce": "branch3.0",
    "5x5": "branch3.1",
    "pool_proj": "branch4.1",
}
INCEPTIONS = ("3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b")
BLOCKS = {2: 3, 3: 4, 4: 6, 5: 3}


@functools.cache
def random_model(architecture):
    """A backbone with random weights, BatchNorm statistics among them."""
    model = backbones.resolve(architecture, 64).model
    generator = np.random.default_rng(0)
    for layer in model.layers:
        layer.set_weights([generator.uniform(0.1, 1.0, w.shape).astype("float32") for w in layer.weights])
    return model


def torchvision_names(architecture):
    """Keras layer -> torchvision's name."""
    if architecture == "googlenet_bn":
        stem = {"conv1_7x7_s2": "conv1", "conv2_3x3_reduce": "conv2", "conv2_3x3": "conv3"}
        units = stem | {
            f"inception_{m}_{k}": f"inception{m}.{v}" for m in INCEPTIONS for k, v in GOOGLENET_BRANCHES.items()
        }
        return {k: f"{v}.conv" for k, v in units.items()} | {f"{k}_bn": f"{v}.bn" for k, v in units.items()}
    table = {"conv1_conv": "conv1", "conv1_bn": "bn1"}
    for stage, blocks in BLOCKS.items():
        for b in range(1, blocks + 1):
            theirs = f"layer{stage - 1}.{b - 1}"
            for i in (1, 2, 3):
                table[f"conv{stage}_block{b}_{i}_conv"] = f"{theirs}.conv{i}"
                table[f"conv{stage}_block{b}_{i}_bn"] = f"{theirs}.bn{i}"
        table[f"conv{stage}_block1_0_conv"] = f"layer{stage - 1}.0.downsample.0"
        table[f"conv{stage}_block1_0_bn"] = f"layer{stage - 1}.0.downsample.1"
    return table


def weights(layer):
    return [keras.ops.convert_to_numpy(weight) for weight in layer.weights]


def torch_state(model, architecture):
    """The weights of a backbone as a PyTorch state dict, with what such files hold besides."""
    own = architecture in ("googlenet", "bn_inception")
    names = {layer.name: layer.name for layer in model.layers} if own else torchvision_names(architecture)
    state = {}
    for layer in model.layers:
        if isinstance(layer, keras.layers.Conv2D):
            kernel, *bias = weights(layer)
            state[f"{names[layer.name]}.weight"] = kernel.transpose(3, 2, 0, 1)
            if bias and architecture != "resnet50":
                state[f"{names[layer.name]}.bias"] = bias[0]
        elif isinstance(layer, keras.layers.BatchNormalization):
            for slot, array in zip(("weight", "bias", "running_mean", "running_var"), weights(layer), strict=True):
                state[f"{names[layer.name]}.{slot}"] = array
            state[f"{names[layer.name]}.num_batches_tracked"] = np.array(7)
    return state | {"fc.weight": np.zeros((7, 4), "float32"), "fc.bias": np.zeros(7, "float32")}


def caffe_layers(model, architecture):
    """The weights of a backbone as blobs of Caffe's layers; statistics are sums over 2.5 batches."""
    slashed = {"conv1_7x7_s2": "conv1/7x7_s2", "conv2_3x3_reduce": "conv2/3x3_reduce", "conv2_3x3": "conv2/3x3"}
    blobs = {}
    for layer in model.layers:
        if architecture == "resnet50":
            stage, block, place = layer.name[4:5], layer.name[11:12], layer.name[13:14]
            tail = f"{stage}{chr(ord('a') + int(block) - 1)}_branch" if block.isdigit() else ""
            tail += {"0": "1", "1": "2a", "2": "2b", "3": "2c"}.get(place, "")
            conv, norm, scale = (f"res{tail}", f"bn{tail}", f"scale{tail}")
            if not block.isdigit():
                conv, norm, scale = "conv1", "bn_conv1", "scale_conv1"
        else:
            plain = layer.name.removesuffix("_bn")
            conv = slashed.get(plain) or plain[:12] + "/" + plain[13:]
            norm, scale = f"{conv}_bn", f"{conv}_bn_scale"
        if isinstance(layer, keras.layers.Conv2D):
            kernel, bias = weights(layer)
            hidden = architecture == "resnet50" and conv != "conv1"
            blobs[conv] = [kernel.transpose(3, 2, 0, 1)] + ([] if hidden else [bias])
        elif isinstance(layer, keras.layers.BatchNormalization):
            gamma, beta, mean, variance = weights(layer)
            blobs[norm] = [2.5 * mean, 2.5 * variance, np.array([2.5])]
            blobs[scale] = [gamma, beta]
    return blobs | {"loss3/classifier": [np.zeros((7, 4)), np.zeros(7)]}


def assert_converted(model, expected, biased=lambda name: True):
    """The weights agree, up to rounding; convolutions of which `biased` is false have a bias of 0."""
    for layer, source in zip(model.layers, expected.layers, strict=True):
        found, wanted = weights(layer), weights(source)
        if isinstance(layer, keras.layers.Conv2D) and not biased(layer.name):
            wanted[1] = np.zeros_like(wanted[1])
        for actual, value in zip(found, wanted, strict=True):
            np.testing.assert_allclose(actual, value, rtol=1e-6, err_msg=layer.name)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_state_dict_becomes_the_backbones_weights(architecture, tmp_path, monkeypatch):
    source = random_model(architecture)
    state = torch_state(source, architecture)
    for legacy in (False, True):
        write_torch(tmp_path / "x.pth", state, monkeypatch, legacy=legacy)
        converted = convert(tmp_path / "x.pth", architecture, stride_in_1x1=architecture == "resnet50")
        assert_converted(converted.model, source, biased=lambda name: architecture != "resnet50")
        assert {"fc.weight", "fc.bias"} <= set(converted.left_out)


@pytest.mark.slow
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("architecture", ["googlenet", "bn_inception", "resnet50"])
def test_a_caffemodel_becomes_the_backbones_weights(architecture, old, tmp_path):
    source = random_model(architecture)
    blobs = caffe_layers(source, architecture)
    write_caffemodel(tmp_path / "x.caffemodel", blobs, old=old)
    converted = convert(tmp_path / "x.caffemodel", architecture)
    assert_converted(converted.model, source, biased=lambda name: architecture != "resnet50" or name == "conv1_conv")
    assert converted.left_out == ("loss3_classifier.0", "loss3_classifier.1")


@pytest.mark.slow
def test_caffes_hdf5_and_its_bn_layer(tmp_path):
    source = random_model("bn_inception")
    blobs = caffe_layers(source, "bn_inception")
    with h5py.File(tmp_path / "x.caffemodel.h5", "w") as file:
        for name, arrays in blobs.items():
            if name.endswith("_bn_scale"):
                continue
            if name.endswith("_bn"):
                layer = source.get_layer(name.replace("/", "_"))
                arrays = [array.reshape(1, -1, 1, 1) for array in weights(layer)]
            for index, array in enumerate(arrays):
                file[f"data/{name}/{index}"] = array.astype("float32")
    assert_converted(convert(tmp_path / "x.caffemodel.h5", "bn_inception").model, source)


@pytest.fixture(scope="module")
def inception():
    source = random_model("bn_inception")
    return source, torch_state(source, "bn_inception")


@pytest.mark.one_quick_case
@pytest.mark.parametrize("kind", ["safetensors", "npz", "h5"])
def test_arrays_in_other_containers(kind, inception, tmp_path):
    source, state = inception
    path = tmp_path / f"x.{kind}"
    if kind == "safetensors":
        write_safetensors(path, state)
    elif kind == "npz":
        np.savez(path, **state)
    else:
        with h5py.File(path, "w") as file:
            for name, array in state.items():
                file[name] = array
    assert_converted(convert(path, "bn_inception").model, source)


@pytest.mark.one_quick_case
@pytest.mark.parametrize("prefix", ["module.", "module.backbone.", ""])
def test_a_common_prefix_does_not_matter(prefix, inception, tmp_path):
    source, state = inception
    np.savez(tmp_path / "x.npz", **{prefix + name: array for name, array in state.items()})
    assert_converted(convert(tmp_path / "x.npz", "bn_inception").model, source)


def test_half_precision_is_widened(tmp_path):
    numbers = np.linspace(-3, 3, 24, dtype="float32").reshape(4, 6)
    bits = (numbers.view(np.uint32) >> 16).astype("<u2")
    write_safetensors(tmp_path / "x", {"half": numbers.astype("<f2"), "brain": bits, "double": numbers.astype("<f8")})
    arrays = read_checkpoint(tmp_path / "x")
    np.testing.assert_array_equal(arrays["half"], numbers.astype("float16").astype("float32"))
    assert arrays["half"].dtype == arrays["brain"].dtype == np.float32
    np.testing.assert_array_equal(arrays["brain"], (bits.astype(np.uint32) << 16).view(np.float32))
    np.testing.assert_array_equal(arrays["double"], numbers)


def without(state, *names):
    return {name: array for name, array in state.items() if name not in names}


@pytest.mark.one_quick_case
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: without(s, "conv1_7x7_s2.weight"), r"conv1_7x7_s2.weight \(64, 3, 7, 7\) is missing"),
        (lambda s: without(s, "inception_5b_1x1_bn.running_var"), "inception_5b_1x1_bn.running_var"),
        (
            lambda s: {**s, "conv2_3x3.weight": np.zeros((192, 64, 1, 1), "f")},
            r"\(192, 64, 1, 1\), not \(192, 64, 3, 3\)",
        ),
        (
            lambda s: {**s, "conv2_3x3_bn.bias": np.full(192, np.nan, "f")},
            "conv2_3x3_bn.bias holds numbers that are not",
        ),
        (lambda s: {**s, "head.weight": np.zeros(3, "f")}, "head.weight is not part of it; `allow_extra=True`"),
        (lambda s: {"head.weight": np.zeros(3, "f")}, "and 340 more; it has head.weight"),
    ],
    ids=["first missing", "missing", "shape", "nan", "extra", "another network"],
)
def test_what_does_not_fit_is_named(change, says, inception, tmp_path):
    np.savez(tmp_path / "x.npz", **change(inception[1]))
    with pytest.raises(UserError, match=says) as error:
        convert(tmp_path / "x.npz", "bn_inception")
    assert "\n" not in str(error.value)
    assert "x.npz" in str(error.value)


def test_extra_arrays_can_be_left_out(inception, tmp_path):
    source, state = inception
    np.savez(tmp_path / "x.npz", **{**state, "head.weight": np.zeros(3, "f")})
    converted = convert(tmp_path / "x.npz", "bn_inception", allow_extra=True)
    assert_converted(converted.model, source)
    assert "head.weight" in converted.left_out


@pytest.mark.slow
def test_statistics_over_no_batch_are_zero(tmp_path):
    source = random_model("resnet50")
    blobs = caffe_layers(source, "resnet50")
    blobs["bn_conv1"] = [np.ones(64), np.ones(64), np.zeros(1)]
    write_caffemodel(tmp_path / "x.caffemodel", blobs)
    layer = convert(tmp_path / "x.caffemodel", "resnet50").model.get_layer("conv1_bn")
    np.testing.assert_array_equal(layer.moving_mean, np.zeros(64))
    # Caffe's epsilon of 1e-5, under Keras's of 1.001e-5.
    np.testing.assert_allclose(layer.moving_variance, np.full(64, -1e-8), rtol=1e-4)


def test_pytorchs_resnet_is_not_poured_into_kerass(tmp_path):
    np.savez(tmp_path / "x.npz", **{"conv1.weight": np.zeros((64, 3, 7, 7), "f")})
    with pytest.raises(UserError, match="`architecture='resnet50_v1_5'`; or `stride_in_1x1=True`"):
        convert(tmp_path / "x.npz", "resnet50")


@pytest.mark.parametrize(("architecture", "other"), [("googlenet_bn", "googlenet"), ("resnet50_v1_5", "resnet50")])
def test_architectures_that_caffe_never_had(architecture, other, tmp_path):
    write_caffemodel(tmp_path / "x.caffemodel", {"conv1": [np.zeros((64, 3, 7, 7))]})
    with pytest.raises(UserError, match=f"none of {architecture}, but of {other}"):
        convert(tmp_path / "x.caffemodel", architecture)


class Harmful:
    """Would make a folder as it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("legacy", [False, True])
def test_what_a_pickle_asks_for_is_not_done(legacy, tmp_path, monkeypatch):
    path, made = tmp_path / "x.pth", tmp_path / "made"
    state = {"conv1_7x7_s2.weight": np.zeros((64, 3, 7, 7), "f")}
    wrap = lambda state: {"state_dict": state, "hook": Harmful(made)}  # noqa: E731
    write_torch(path, state, monkeypatch, legacy=legacy, wrap=wrap)
    with pytest.raises(UserError, match=r"posix.mkdir.*state_dict\(\)"):
        convert(path, "bn_inception")
    assert not made.exists()


def damaged_files(folder, monkeypatch):
    """Name -> (file, what is said of it)."""
    state = {"conv1_7x7_s2.weight": np.ones((64, 3, 7, 7), "f")}
    files = {}

    def path(name, says="damaged", suffix=".pth"):
        files[name] = (folder / f"{len(files)}{suffix}", says)
        return files[name][0]

    for legacy in (False, True):
        write_torch(folder / "whole", state, monkeypatch, legacy=legacy)
        data = (folder / "whole").read_bytes()
        path(f"cut {legacy}", "of no known kind|damaged").write_bytes(data[: len(data) // 2])
    write_torch(path("list", "holds no state dict"), state, monkeypatch, wrap=lambda s: [1, 2])
    write_torch(path("too deep", "holds no state dict"), state, monkeypatch, wrap=lambda s: {"mine": {"yours": s}})
    with zipfile.ZipFile(path("other zip", "a zip file, but no PyTorch checkpoint"), "w") as archive:
        archive.writestr("readme.txt", "hello")
    path("text", "of no known kind").write_text("not a checkpoint\n" * 9)
    path("empty", "of no known kind").write_bytes(b"")
    path("short header").write_bytes(struct.pack("<Q", 10**9) + b"{}")
    path("random", suffix=".caffemodel").write_bytes(b"\xff" * 99)
    path("no layers", "holds no arrays", suffix=".caffemodel").write_bytes(b"\x0a\x03net")
    write_caffemodel(folder / "whole", {"conv1": [np.ones((64, 3, 7, 7))]})
    path("cut caffe", suffix=".caffemodel").write_bytes((folder / "whole").read_bytes()[:5000])
    path("bare pickle", "of no known kind").write_bytes(pickle.dumps({"conv1_7x7_s2.weight": 1}))
    np.savez(path("objects", suffix=".npz"), a=np.array([{}], object))
    files["missing"] = (folder / "nowhere.pth", "cannot be read")
    files["a folder"] = (folder, "cannot be read")
    return files


def test_damaged_files_are_named_in_one_line(tmp_path, monkeypatch):
    for name, (path, says) in damaged_files(tmp_path, monkeypatch).items():
        with pytest.raises(UserError, match=says) as error:
            convert(path, "bn_inception")
        assert "\n" not in str(error.value), name
        assert str(path) in str(error.value), name


def test_a_tensor_beyond_its_storage_is_refused(tmp_path, monkeypatch):
    write_torch(tmp_path / "x.pth", {"a.weight": np.ones((4, 4), "f")}, monkeypatch)
    with zipfile.ZipFile(tmp_path / "x.pth") as archive:
        content = archive.read("archive/data.pkl")
    with zipfile.ZipFile(tmp_path / "y.pth", "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/data/0", b"\0" * 16)
    with pytest.raises(UserError, match="reaches beyond its storage"):
        read_checkpoint(tmp_path / "y.pth")


def test_unknown_architecture_is_refused():
    with pytest.raises(UserError, match="must be one of bn_inception, googlenet"):
        convert("x.pth", "vgg16")
