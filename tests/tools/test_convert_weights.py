"""Checkpoints become weights of the backbones, or one line names what does not fit."""

import os

import keras
import numpy as np
import pytest

from tfdml import UserError
from tfdml.io.files import sha256_of
from tools import convert_weights
from tools.convert_weights import ARCHITECTURES, convert, main

COUNTER = "conv1_7x7_s2_bn.num_batches_tracked"


def tiny():
    """The first layers of BN-Inception, and a convolution of a module."""
    x = inputs = keras.Input((None, None, 3))
    x = keras.layers.Conv2D(4, 7, name="conv1_7x7_s2")(x)
    x = keras.layers.BatchNormalization(epsilon=1e-5, name="conv1_7x7_s2_bn")(x)
    return keras.Model(inputs, keras.layers.Conv2D(5, (1, 3), name="inception_3a_1x1")(x))


def random_weights():
    """In the order of the network's: both of a convolution, four of BatchNorm, and two."""
    rng = np.random.default_rng(0)
    return [rng.uniform(0.1, 1.0, weight.shape).astype("float32") for weight in tiny().weights]


def torch_state():
    """The weights as a PyTorch state dict, with what such files hold besides."""
    first, bias, gamma, beta, mean, variance, last, last_bias = random_weights()
    return {
        "fc.weight": np.zeros((7, 4), "float32"),
        COUNTER: np.array(7),
        "conv1_7x7_s2.weight": first.transpose(3, 2, 0, 1),
        "conv1_7x7_s2.bias": bias,
        "conv1_7x7_s2_bn.weight": gamma,
        "conv1_7x7_s2_bn.bias": beta,
        "conv1_7x7_s2_bn.running_mean": mean,
        "conv1_7x7_s2_bn.running_var": variance,
        "inception_3a_1x1.weight": last.transpose(3, 2, 0, 1),
        "inception_3a_1x1.bias": last_bias,
    }


def caffe_blobs(norm):
    """The weights as Caffe's blobs: of a BN layer, or sums over 2.5 batches and a Scale layer."""
    first, bias, gamma, beta, mean, variance, last, last_bias = random_weights()
    blobs = {
        "loss3/classifier": [np.zeros((7, 4)), np.zeros(7)],
        "conv1/7x7_s2": [first.transpose(3, 2, 0, 1), bias.reshape(1, 1, 1, -1)],
        "inception_3a/1x1": [last.transpose(3, 2, 0, 1), last_bias.reshape(1, 1, 1, -1)],
    }
    if norm == "BN":
        vectors = [array.reshape(1, -1, 1, 1) for array in (gamma, beta, mean, variance)]
        blobs["conv1/7x7_s2_bn"] = vectors
    else:
        blobs["conv1/7x7_s2_bn"] = [2.5 * mean, 2.5 * variance, np.array([2.5])]
        blobs[f"conv1/7x7_s2_{norm}"] = [gamma, beta]
    state = {}
    for name, arrays in blobs.items():
        state |= {f"{name}.{index}": array for index, array in enumerate(arrays)}
    return state


def assert_converted(model):
    for weight, wanted in zip(model.weights, random_weights(), strict=True):
        np.testing.assert_allclose(weight.numpy(), wanted, rtol=1e-6, err_msg=weight.path)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "tiny", (tiny, convert_weights.same_name))


@pytest.mark.parametrize("prefix", ["", "module.backbone."])
def test_a_state_dict_becomes_the_backbones_weights(prefix, tmp_path):
    state = torch_state() | {"head.weight": np.zeros(3)}
    np.savez(tmp_path / "x.npz", **{prefix + name: array for name, array in state.items()})
    model, left_out = convert(tmp_path / "x.npz", "tiny", allow_extra=True)
    assert_converted(model)
    assert left_out == [COUNTER, "fc.weight", "head.weight"]


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


WRONG_SHAPE = np.zeros((5, 4, 3, 1))


@pytest.mark.parametrize(
    ("name", "array", "says"),
    [
        ("conv1_7x7_s2.weight", None, r"conv1_7x7_s2.weight \(4, 3, 7, 7\) is missing"),
        ("inception_3a_1x1.weight", WRONG_SHAPE, r"has shape \(5, 4, 3, 1\), not \(5, 4, 1, 3\)"),
        ("conv1_7x7_s2.bias", np.full(4, np.nan), "not finite"),
        ("head.weight", np.zeros(3), "head.weight is not part of it"),
    ],
)
def test_what_does_not_fit_is_named(name, array, says, tmp_path):
    state = torch_state() | {name: array}
    if array is None:
        del state[name]
    np.savez(tmp_path / "x.npz", **state)
    with pytest.raises(UserError, match=says):
        convert(tmp_path / "x.npz", "tiny")


def test_files_of_pytorch(tmp_path):
    torch = pytest.importorskip("torch", reason="pip install 'tfdml[parity]'")
    safetensors = pytest.importorskip("safetensors.torch", reason="pip install 'tfdml[parity]'")
    state = {name: torch.tensor(array.copy()) for name, array in torch_state().items()}
    counter = {COUNTER: state.pop(COUNTER)}
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in state.items()} | counter
    state |= counter
    torch.save(state, tmp_path / "before 1.6.pth", _use_new_zipfile_serialization=False)
    torch.save({"epoch": 3, "state_dict": parameters}, tmp_path / "nested.pth")
    contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
    safetensors.save_file(contiguous, tmp_path / "x.safetensors")
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
        content = {"state_dict": {"x": torch.zeros(4)}, "hook": Hostile(made)}
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
