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
KERNELS = ("conv1_7x7_s2.weight", "inception_3a_1x1.weight")
NORM = ("weight", "bias", "running_mean", "running_var")
# In the order of the model's weights.
SHAPES = {KERNELS[0]: (4, 3, 7, 7), "conv1_7x7_s2.bias": (4,)}
SHAPES |= {f"conv1_7x7_s2_bn.{slot}": (4,) for slot in NORM}
SHAPES |= {KERNELS[1]: (5, 4, 1, 3), "inception_3a_1x1.bias": (5,)}


def tiny():
    """The first layers of BN-Inception, and a convolution of a module."""
    x = inputs = keras.Input((None, None, 3))
    x = keras.layers.Conv2D(4, 7, name="conv1_7x7_s2")(x)
    x = keras.layers.BatchNormalization(epsilon=1e-5, name="conv1_7x7_s2_bn")(x)
    return keras.Model(inputs, keras.layers.Conv2D(5, (1, 3), name="inception_3a_1x1")(x))


def torch_state():
    """Arrays of its shapes as a PyTorch state dict, with what such files hold besides."""
    rng = np.random.default_rng(0)
    state = {name: rng.uniform(0.1, 1.0, shape).astype("float32") for name, shape in SHAPES.items()}
    return state | {"fc.weight": np.zeros((7, 4), "float32"), COUNTER: np.array(7)}


def assert_converted(model, state):
    for weight, name in zip(model.weights, SHAPES, strict=True):
        wanted = state[name].transpose(2, 3, 1, 0) if name in KERNELS else state[name]
        np.testing.assert_array_equal(weight.numpy(), wanted, err_msg=name)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "tiny", (tiny, convert_weights.same_name))


@pytest.mark.parametrize("prefix", ["", "module.backbone."])
def test_a_state_dict_becomes_the_backbones_weights(prefix, tmp_path):
    state = torch_state() | {"head.weight": np.zeros(3)}
    # Layers of Caffe have slashes in their names.
    names = {name: prefix + name.replace("1_7", "1/7").replace("a_1", "a/1") for name in state}
    np.savez(tmp_path / "x.npz", **{names[name]: array for name, array in state.items()})
    model, left_out = convert(tmp_path / "x.npz", "tiny", allow_extra=True)
    assert_converted(model, state)
    assert left_out == [COUNTER, "fc.weight", "head.weight"]


@pytest.mark.parametrize(
    ("name", "array", "says"),
    [
        (KERNELS[0], None, r"conv1_7x7_s2.weight \(4, 3, 7, 7\) is missing"),
        (KERNELS[1], np.zeros((5, 4, 3, 1)), r"has shape \(5, 4, 3, 1\), not \(5, 4, 1, 3\)"),
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
    arrays = torch_state()
    state = {name: torch.tensor(array) for name, array in arrays.items()}
    torch.save(state, tmp_path / "before 1.6.pth", _use_new_zipfile_serialization=False)
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "nested.pth")
    safetensors.save_file(state, tmp_path / "x.safetensors")
    for path in tmp_path.iterdir():
        assert_converted(convert(path, "tiny")[0], arrays)


class Hostile:
    """Makes a folder as it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("made",)


@pytest.mark.parametrize("kind", ["pth", "pth before 1.6", "npz"])
def test_code_in_a_file_is_not_run(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"x.{kind.split()[0]}"
    if kind == "npz":
        np.savez(path, **{"conv1_7x7_s2.weight": np.array([Hostile()], object)})
    else:
        torch = pytest.importorskip("torch", reason="pip install 'tfdml[parity]'")
        content = {"state_dict": {"x": torch.zeros(4)}, "hook": Hostile()}
        torch.save(content, path, _use_new_zipfile_serialization=kind == "pth")
    with pytest.raises(UserError, match=r"is damaged|holds more than tensors"):
        convert(path, "tiny")
    assert list(tmp_path.iterdir()) == [path]


def test_the_command_writes_a_new_file_that_fits(tmp_path):
    np.savez(tmp_path / "x.npz", **torch_state())
    out = tmp_path / "tiny.weights.h5"
    command = [f"--from={tmp_path / 'x.npz'}", "--architecture=tiny", f"--out={out}"]
    main([*command, "--dry_run"])
    assert not out.exists()
    main(command)
    model = tiny()
    model.load_weights(out)
    assert_converted(model, torch_state())
    before = out.read_bytes()
    with pytest.raises(SystemExit, match="2"):
        main(command)
    assert out.read_bytes() == before
    checksum = tmp_path / "tiny.weights.h5.sha256"
    assert checksum.read_text() == f"{sha256_of(out)}  {out.name}\n"
    assert sorted(tmp_path.iterdir()) == [out, checksum, tmp_path / "x.npz"]
