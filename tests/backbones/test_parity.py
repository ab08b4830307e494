"""Converted checkpoints give the features of the PyTorch networks, stage by stage."""

import re

import keras
import numpy as np
import pytest

from tfdml import UserError
from tfdml.backbones.conversion import convert

torch = pytest.importorskip("torch", reason="pip install 'tfdml[parity]': the published networks run in PyTorch")
from tests.backbones import torch_networks  # noqa: E402

# Architecture -> the PyTorch network, how it is converted, the range of its pixels, the number of stages compared.
NETWORKS = {
    "googlenet": (torch_networks.CaffeGoogLeNet, {}, 120.0, 16),
    "googlenet_bn": (torch_networks.TorchvisionGoogLeNet, {}, 1.0, 14),
    "bn_inception": (torch_networks.BNInception, {}, 120.0, 14),
    "resnet50_v1_5": (torch_networks.ResNet50, {}, 2.0, 18),
    "resnet50": (lambda: torch_networks.ResNet50(stride_in_1x1=True), {"stride_in_1x1": True}, 120.0, 18),
}
SIZES = ((224, 224), (227, 227), (256, 256), (299, 299), (97, 150))


@pytest.fixture(scope="module", params=NETWORKS)
def pair(request, tmp_path_factory):
    """A PyTorch network with random weights, and the Keras backbone that its file is converted to."""
    make, options, scale, stages = NETWORKS[request.param]
    network = torch_networks.randomise(make(), scale=scale)
    path = tmp_path_factory.mktemp("checkpoints") / f"{request.param}.pth"
    torch.save(network.state_dict(), path)
    converted = convert(path, request.param, **options)
    assert all(re.search("num_batches_tracked|fc|linear|aux|classifier", name) for name in converted.left_out)
    return network, converted.model, scale, stages


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_every_stage_agrees(pair, size):
    network, model, scale, stages = pair
    x = np.random.default_rng(sum(size)).uniform(-scale, scale, (1, *size, 3)).astype("float32")
    with torch.no_grad():
        expected = network(torch.from_numpy(x.transpose(0, 3, 1, 2)))
    assert len(expected) == stages
    names = list(expected)
    actual = keras.Model(model.inputs[0], [model.get_layer(name).output for name in names])(x)
    for name, found in zip(names, actual, strict=True):
        wanted = expected[name].numpy().transpose(0, 2, 3, 1)
        assert found.shape == wanted.shape, name
        assert np.std(wanted) > 1e-3, name
        error = np.max(np.abs(keras.ops.convert_to_numpy(found) - wanted)) / np.max(np.abs(wanted))
        assert error < 1e-4, f"{name}: {error:.2g}"


def state(seed=0):
    return torch_networks.randomise(torch_networks.BNInception(), seed).state_dict()


def assert_same(model, other):
    for first, second in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(first), keras.ops.convert_to_numpy(second))


@pytest.mark.slow
def test_every_way_of_saving_gives_the_same_weights(tmp_path):
    plain = state()
    files = {
        "old format": (plain, {"_use_new_zipfile_serialization": False}),
        "under a key": ({"epoch": 3, "state_dict": plain}, {}),
        "data parallel": ({f"module.{name}": tensor for name, tensor in plain.items()}, {}),
        "parameters": ({name: torch.nn.Parameter(t) if t.is_floating_point() else t for name, t in plain.items()}, {}),
    }
    torch.save(plain, tmp_path / "plain.pth")
    expected = convert(tmp_path / "plain.pth", "bn_inception").model
    for name, (content, options) in files.items():
        torch.save(content, tmp_path / f"{name}.pth", **options)
        assert_same(convert(tmp_path / f"{name}.pth", "bn_inception").model, expected)


def test_transposed_and_shared_storages_come_out_right(tmp_path):
    from tfdml.backbones.conversion import read_checkpoint

    base = torch.arange(24.0)
    tensors = {
        "slice.weight": base[4:16].reshape(3, 4),
        "transposed.weight": base.reshape(4, 6).t(),
        "expanded.weight": base[:3, None].expand(3, 5),
        "empty.weight": torch.zeros(0, 3),
        "number.weight": torch.tensor(7.5),
        "half.weight": base.half() / 3,
        "brain.weight": base.bfloat16() / 3,
        "double.weight": base.double() / 3,
        "long.weight": base.long(),
    }
    for zipped in (True, False):
        torch.save(tensors, tmp_path / "x.pth", _use_new_zipfile_serialization=zipped)
        arrays = read_checkpoint(tmp_path / "x.pth")
        assert set(arrays) == set(tensors)
        for name, tensor in tensors.items():
            wanted = tensor.float() if tensor.dtype in (torch.half, torch.bfloat16) else tensor
            np.testing.assert_array_equal(arrays[name], wanted.numpy(), err_msg=name)


def test_a_pickled_module_is_refused_with_what_to_do(tmp_path):
    for zipped in (True, False):
        torch.save(torch.nn.Linear(2, 2), tmp_path / "x.pth", _use_new_zipfile_serialization=zipped)
        with pytest.raises(UserError, match=r"torch.nn.modules.linear.Linear.*state_dict\(\)"):
            convert(tmp_path / "x.pth", "bn_inception")


def test_torchvisions_resnet_is_refused_where_it_would_be_wrong(tmp_path):
    torch.save(torch_networks.ResNet50().state_dict(), tmp_path / "x.pth")
    with pytest.raises(UserError, match="resnet50_v1_5"):
        convert(tmp_path / "x.pth", "resnet50")
