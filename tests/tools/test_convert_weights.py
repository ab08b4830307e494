"""Checkpoints become weights of the backbones, or one line names what does not fit."""

import os

import keras
import numpy as np
import pytest

from tfdml import UserError
from tfdml.io.files import sha256_of
from tools import convert_weights
from tools.convert_weights import ARCHITECTURES, convert, main


def tiny():
    """The first layers of BN-Inception, and a convolution of a module."""
    x = inputs = keras.Input((None, None, 3))
    x = keras.layers.Conv2D(4, 7, name="conv1_7x7_s2")(x)
    x = keras.layers.BatchNormalization(epsilon=1e-5, name="conv1_7x7_s2_bn")(x)
    return keras.Model(inputs, keras.layers.Conv2D(5, (1, 3), name="inception_3a_1x1")(x))


def weights(layer):
    return [keras.ops.convert_to_numpy(weight) for weight in layer.weights]


def random_model():
    """The network with random weights, BatchNorm statistics among them."""
    model, generator = tiny(), np.random.default_rng(0)
    for layer in model.layers:
        layer.set_weights(
            [generator.uniform(0.1, 1.0, w.shape).astype("float32") for w in layer.weights]
        )
    return model


def torch_state():
    """The weights as a PyTorch state dict, with what such files hold besides."""
    _, first, norm, last = random_model().layers
    state = {
        "fc.weight": np.zeros((7, 4), "float32"),
        "conv1_7x7_s2_bn.num_batches_tracked": np.array(7),
    }
    for layer in (first, last):
        kernel, bias = weights(layer)
        state |= {f"{layer.name}.weight": kernel.transpose(3, 2, 0, 1), f"{layer.name}.bias": bias}
    for slot, array in zip(
        ("weight", "bias", "running_mean", "running_var"), weights(norm), strict=True
    ):
        state[f"{norm.name}.{slot}"] = array
    return state


def caffe_blobs(norm):
    """The weights as Caffe's blobs: of a BN layer, or sums over 2.5 batches and a Scale layer."""
    _, first, batch_norm, last = random_model().layers
    blobs = {"loss3/classifier": [np.zeros((7, 4)), np.zeros(7)]}
    for name, layer in (("conv1/7x7_s2", first), ("inception_3a/1x1", last)):
        kernel, bias = weights(layer)
        blobs[name] = [kernel.transpose(3, 2, 0, 1), bias.reshape(1, 1, 1, -1)]
    gamma, beta, mean, variance = weights(batch_norm)
    if norm == "BN":
        blobs["conv1/7x7_s2_bn"] = [
            array.reshape(1, -1, 1, 1) for array in (gamma, beta, mean, variance)
        ]
    else:
        blobs["conv1/7x7_s2_bn"] = [2.5 * mean, 2.5 * variance, np.array([2.5])]
        blobs[f"conv1/7x7_s2_{norm}"] = [gamma, beta]
    return {
        f"{name}.{index}": array
        for name, arrays in blobs.items()
        for index, array in enumerate(arrays)
    }


def assert_converted(model):
    for layer, source in zip(model.layers, random_model().layers, strict=True):
        for actual, wanted in zip(weights(layer), weights(source), strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-6, err_msg=layer.name)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "tiny", (tiny, convert_weights.same_name))


@pytest.mark.parametrize("prefix", ["", "module.backbone."])
def test_a_state_dict_becomes_the_backbones_weights(prefix, tmp_path):
    state = torch_state() | {"head.weight": np.zeros(3)}
    np.savez(tmp_path / "x.npz", **{prefix + name: array for name, array in state.items()})
    model, left_out = convert(tmp_path / "x.npz", "tiny", allow_extra=True)
    assert_converted(model)
    assert left_out == ["conv1_7x7_s2_bn.num_batches_tracked", "fc.weight", "head.weight"]


@pytest.mark.parametrize("norm", ["BN", "bn_scale", "scale"])
def test_caffes_blobs_become_the_backbones_weights(norm, tmp_path):
    np.savez(tmp_path / "x.npz", **caffe_blobs(norm))
    model, left_out = convert(tmp_path / "x.npz", "tiny")
    assert_converted(model)
    assert left_out == ["loss3_classifier.0", "loss3_classifier.1"]


@pytest.mark.parametrize(
    ("architecture", "layer", "name"),
    [
        ("bn_inception", "inception_3a_1x1_bn", "inception_3a_1x1_bn"),
        ("googlenet_bn", "conv2_3x3_reduce_bn", "conv2.bn"),
        ("googlenet_bn", "inception_4e_5x5_reduce", "inception4e.branch3.0.conv"),
        ("resnet50_v1_5", "conv1_bn", "bn1"),
        ("resnet50_v1_5", "conv2_block1_0_bn", "layer1.0.downsample.1"),
        ("resnet50_v1_5", "conv5_block3_2_conv", "layer4.2.conv2"),
    ],
)
def test_layers_have_the_names_of_the_published_checkpoints(architecture, layer, name):
    assert ARCHITECTURES[architecture][1](layer) == name


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"conv1_7x7_s2.weight": None}, r"conv1_7x7_s2.weight \(4, 3, 7, 7\) is missing"),
        (
            {"inception_3a_1x1.weight": np.zeros((5, 4, 3, 1))},
            r"has shape \(5, 4, 3, 1\), not \(5, 4, 1, 3\)",
        ),
        ({"conv1_7x7_s2.bias": np.full(4, np.nan)}, "not finite"),
        ({"head.weight": np.zeros(3)}, "head.weight is not part of it"),
    ],
)
def test_what_does_not_fit_is_named(change, says, tmp_path):
    state = {name: array for name, array in (torch_state() | change).items() if array is not None}
    np.savez(tmp_path / "x.npz", **state)
    with pytest.raises(UserError, match=says):
        convert(tmp_path / "x.npz", "tiny")


def test_files_of_pytorch(tmp_path):
    torch = pytest.importorskip("torch", reason="pip install 'tfdml[parity]'")
    safetensors = pytest.importorskip("safetensors.torch", reason="pip install 'tfdml[parity]'")
    state = {
        name: torch.tensor(np.ascontiguousarray(array)) for name, array in torch_state().items()
    }
    parameters = {
        name: torch.nn.Parameter(t) if t.is_floating_point() else t for name, t in state.items()
    }
    torch.save(state, tmp_path / "before 1.6.pth", _use_new_zipfile_serialization=False)
    torch.save({"epoch": 3, "state_dict": parameters}, tmp_path / "nested.pth")
    safetensors.save_file(state, tmp_path / "x.safetensors")
    for path in tmp_path.iterdir():
        assert_converted(convert(path, "tiny")[0])


class Hostile:
    """Would make a folder as it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["pth", "pth before 1.6", "npz"])
def test_code_in_a_file_is_not_run(kind, tmp_path):
    path, made = tmp_path / f"x.{kind.split()[0]}", tmp_path / "made"
    if kind == "npz":
        np.savez(path, **{"conv1_7x7_s2.weight": np.array([Hostile(made)], object)})
    else:
        torch = pytest.importorskip("torch", reason="pip install 'tfdml[parity]'")
        content = {
            "state_dict": {"conv1_7x7_s2.weight": torch.zeros(4, 3, 7, 7)},
            "hook": Hostile(made),
        }
        torch.save(content, path, _use_new_zipfile_serialization=kind == "pth")
    with pytest.raises(UserError, match=r"is damaged|holds more than tensors"):
        convert(path, "tiny")
    assert not made.exists()


def test_the_command_writes_a_new_file_that_fits(tmp_path):
    np.savez(tmp_path / "x.npz", **torch_state())
    out = tmp_path / "tiny.weights.h5"
    command = [f"--from={tmp_path / 'x.npz'}", "--architecture=tiny", f"--out={out}"]
    main([*command, "--dry_run"])
    assert not out.exists()
    main(command)
    model = tiny()
    model.load_weights(out)
    assert_converted(model)
    before = out.read_bytes()
    with pytest.raises(SystemExit, match="2"):
        main(command)
    assert out.read_bytes() == before
    checksum = tmp_path / "tiny.weights.h5.sha256"
    assert checksum.read_text() == f"{sha256_of(out)}  {out.name}\n"
    assert sorted(tmp_path.iterdir()) == [out, checksum, tmp_path / "x.npz"]
