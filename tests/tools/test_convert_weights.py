"""Checkpoints become weights of the backbones, or one line names what does not fit."""

import functools
import os

import keras
import numpy as np
import pytest

from tfdml import UserError, backbones
from tools import convert_weights
from tools.convert_weights import ARCHITECTURES, convert, main, read_checkpoint

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


def tiny():
    """The first layers of BN-Inception, and a convolution of a module."""
    x = inputs = keras.Input((None, None, 3))
    x = keras.layers.Conv2D(4, 7, name="conv1_7x7_s2")(x)
    x = keras.layers.BatchNormalization(epsilon=1e-5, name="conv1_7x7_s2_bn")(x)
    return keras.Model(inputs, keras.layers.Conv2D(5, (1, 3), name="inception_3a_1x1")(x))


@functools.cache
def random_model(architecture):
    """A backbone with random weights, BatchNorm statistics among them."""
    model = tiny() if architecture == "tiny" else backbones.resolve(architecture, 64).model
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


def torch_state(architecture):
    """The weights of a random backbone as a PyTorch state dict, with what such files hold besides."""
    model = random_model(architecture)
    own = architecture in ("tiny", "googlenet", "bn_inception")
    names = {layer.name: layer.name for layer in model.layers} if own else torchvision_names(architecture)
    state = {}
    for layer in model.layers:
        if isinstance(layer, keras.layers.Conv2D):
            kernel, *bias = weights(layer)
            state[f"{names[layer.name]}.weight"] = kernel.transpose(3, 2, 0, 1)
            if bias:
                state[f"{names[layer.name]}.bias"] = bias[0]
        elif isinstance(layer, keras.layers.BatchNormalization):
            for slot, array in zip(("weight", "bias", "running_mean", "running_var"), weights(layer), strict=True):
                state[f"{names[layer.name]}.{slot}"] = array
            state[f"{names[layer.name]}.num_batches_tracked"] = np.array(7)
    return state | {"fc.weight": np.zeros((7, 4), "float32"), "fc.bias": np.zeros(7, "float32")}


def caffe_blobs(architecture, norm):
    """The weights of a random backbone as Caffe's blobs: of a BN layer, or sums over 2.5 batches and a Scale layer."""
    slashed = {"conv1_7x7_s2": "conv1/7x7_s2", "conv2_3x3_reduce": "conv2/3x3_reduce", "conv2_3x3": "conv2/3x3"}
    blobs = {}
    for layer in random_model(architecture).layers:
        plain = layer.name.removesuffix("_bn")
        name = slashed.get(plain) or plain[:12] + "/" + plain[13:]
        if isinstance(layer, keras.layers.Conv2D):
            kernel, bias = weights(layer)
            blobs[name] = [kernel.transpose(3, 2, 0, 1), bias.reshape(1, 1, 1, -1)]
        elif isinstance(layer, keras.layers.BatchNormalization):
            gamma, beta, mean, variance = weights(layer)
            if norm == "BN":
                blobs[f"{name}_bn"] = [array.reshape(1, -1, 1, 1) for array in (gamma, beta, mean, variance)]
            else:
                blobs[f"{name}_bn"] = [2.5 * mean, 2.5 * variance, np.array([2.5])]
                blobs[f"{name}_{norm}"] = [gamma, beta]
    blobs["loss3/classifier"] = [np.zeros((7, 4)), np.zeros(7)]
    return {f"{name}.{index}": array for name, arrays in blobs.items() for index, array in enumerate(arrays)}


def assert_converted(model, architecture):
    for layer, source in zip(model.layers, random_model(architecture).layers, strict=True):
        for actual, wanted in zip(weights(layer), weights(source), strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-6, err_msg=layer.name)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "tiny", (tiny, convert_weights.same_name))


ALL = ["tiny", *(pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES)]


@pytest.mark.parametrize("architecture", ALL)
def test_a_state_dict_becomes_the_backbones_weights(architecture, tmp_path):
    np.savez(tmp_path / "x.npz", **torch_state(architecture))
    model, left_out = convert(tmp_path / "x.npz", architecture)
    assert_converted(model, architecture)
    assert {"fc.weight", "fc.bias"} <= set(left_out)
    assert all(name.startswith("fc.") or name.endswith(".num_batches_tracked") for name in left_out)


@pytest.mark.parametrize("norm", ["BN", "bn_scale", "scale"])
@pytest.mark.parametrize(
    "architecture", ["tiny", *(pytest.param(n, marks=pytest.mark.slow) for n in ("googlenet", "bn_inception"))]
)
def test_caffes_blobs_become_the_backbones_weights(architecture, norm, tmp_path):
    np.savez(tmp_path / "x.npz", **caffe_blobs(architecture, norm))
    model, left_out = convert(tmp_path / "x.npz", architecture)
    assert_converted(model, architecture)
    assert left_out == ["loss3_classifier.0", "loss3_classifier.1"]


def test_statistics_over_no_batch_are_zero(tmp_path):
    blobs = caffe_blobs("tiny", "scale") | {"conv1/7x7_s2_bn.2": np.zeros(1)}
    np.savez(tmp_path / "x.npz", **blobs)
    layer = convert(tmp_path / "x.npz", "tiny")[0].get_layer("conv1_7x7_s2_bn")
    np.testing.assert_array_equal(layer.moving_mean, np.zeros(4))
    np.testing.assert_array_equal(layer.moving_variance, np.zeros(4))


@pytest.mark.parametrize("prefix", ["module.", "module.backbone."])
def test_a_common_prefix_does_not_matter(prefix, tmp_path):
    np.savez(tmp_path / "x.npz", **{prefix + name: array for name, array in torch_state("tiny").items()})
    assert_converted(convert(tmp_path / "x.npz", "tiny")[0], "tiny")


def without(state, *names):
    return {name: array for name, array in state.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: without(s, "conv1_7x7_s2.weight"), r"conv1_7x7_s2.weight \(4, 3, 7, 7\) is missing"),
        (
            lambda s: {**s, "inception_3a_1x1.weight": np.zeros((5, 4, 3, 1), "f")},
            r"has shape \(5, 4, 3, 1\), not \(5, 4, 1, 3\)",
        ),
        (lambda s: {**s, "head.weight": np.zeros(3)}, "head.weight is not part of it; --allow_extra"),
        (lambda s: {"objects": np.array([{}], object)}, "is damaged or no checkpoint"),
    ],
)
def test_what_does_not_fit_is_named(change, says, tmp_path):
    with np.errstate(over="ignore"):
        np.savez(tmp_path / "x.npz", **change(torch_state("tiny")))
        with pytest.raises(UserError, match=says) as error:
            convert(tmp_path / "x.npz", "tiny")
    assert "\n" not in str(error.value)
    assert "x.npz" in str(error.value)


def test_extra_arrays_can_be_left_out(tmp_path):
    np.savez(tmp_path / "x.npz", **torch_state("tiny"), **{"head.weight": np.zeros(3)})
    model, left_out = convert(tmp_path / "x.npz", "tiny", allow_extra=True)
    assert_converted(model, "tiny")
    assert "head.weight" in left_out


def test_files_of_pytorch(tmp_path):
    torch = pytest.importorskip("torch", reason="pip install 'tfdml[parity]'")
    safetensors = pytest.importorskip("safetensors.torch", reason="pip install 'tfdml[parity]'")
    state = {name: torch.tensor(np.ascontiguousarray(array)) for name, array in torch_state("tiny").items()}
    parameters = {name: torch.nn.Parameter(t) if t.is_floating_point() else t for name, t in state.items()}
    torch.save(state, tmp_path / "plain.pth")
    torch.save(state, tmp_path / "before 1.6.pth", _use_new_zipfile_serialization=False)
    torch.save({"epoch": 3, "state_dict": parameters}, tmp_path / "nested.pth")
    safetensors.save_file(state, tmp_path / "x.safetensors")
    for path in tmp_path.iterdir():
        assert_converted(convert(path, "tiny")[0], "tiny")

    base = torch.arange(24.0)
    odd = {"t": base.reshape(4, 6).t(), "half": base.half() / 3, "brain": base.bfloat16() / 3, "none": base[:0]}
    torch.save(odd, tmp_path / "odd.pth")
    safetensors.save_file({name: tensor.contiguous() for name, tensor in odd.items()}, tmp_path / "odd.safetensors")
    for path in tmp_path.glob("odd*"):
        arrays = read_checkpoint(path)
        assert set(arrays) == set(odd)
        for name, tensor in odd.items():
            np.testing.assert_array_equal(arrays[name], tensor.float().numpy(), err_msg=name)


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
        content = {"state_dict": {"conv1_7x7_s2.weight": torch.zeros(4, 3, 7, 7)}, "hook": Hostile(made)}
        torch.save(content, path, _use_new_zipfile_serialization=kind == "pth")
    says = r"is damaged" if kind == "npz" else r"holds more than tensors \(\w+.mkdir\).*state_dict\(\)"
    with pytest.raises(UserError, match=says) as error:
        convert(path, "tiny")
    assert "\n" not in str(error.value)
    assert not made.exists()


@pytest.fixture
def checkpoint(tmp_path):
    np.savez(tmp_path / "x.npz", **torch_state("tiny"))
    return tmp_path / "x.npz"


def test_the_command_writes_a_file_that_fits(checkpoint, tmp_path, capsys):
    out = tmp_path / "tiny.weights.h5"
    command = [f"--from={checkpoint}", "--architecture=tiny", f"--out={out}"]
    main([*command, "--dry_run"])
    assert not out.exists()
    main(command)
    printed = capsys.readouterr().out
    for expected in ("8 arrays, 673 numbers", "left out, 3: conv1", f"--backbone=tiny --weights={out}"):
        assert expected in printed
    assert sorted(tmp_path.iterdir()) == [out, checkpoint]
    model = tiny()
    model.load_weights(out)
    assert_converted(model, "tiny")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--out=there.weights.h5"], "exists already"),
        (["--from=text.npz"], "--from=text.npz is damaged"),
    ],
)
def test_wrong_input_is_one_line_and_writes_nothing(flags, says, checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("text.npz", "there.weights.h5"):
        (tmp_path / name).write_text("precious")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit) as end:
        main([f"--from={checkpoint}", "--architecture=tiny", "--out=x.weights.h5", *flags])
    assert end.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "there.weights.h5").read_text() == "precious"
