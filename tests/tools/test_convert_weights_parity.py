"""Converted checkpoints give the features of the PyTorch networks, stage by stage."""

import re

import keras
import numpy as np
import pytest

from tools.convert_weights import convert

torch = pytest.importorskip("torch", reason="pip install 'tfdml[parity]': the published networks run in PyTorch")
from tests.tools import torch_networks  # noqa: E402

# Architecture -> the PyTorch network, the range of its pixels, the number of stages compared.
NETWORKS = {
    "googlenet": (torch_networks.CaffeGoogLeNet, 120.0, 16),
    "googlenet_bn": (torch_networks.TorchvisionGoogLeNet, 1.0, 14),
    "bn_inception": (torch_networks.BNInception, 120.0, 14),
    "resnet50_v1_5": (torch_networks.ResNet50, 2.0, 18),
}
SIZES = ((224, 224), (299, 299), (97, 150))


@pytest.fixture(scope="module", params=NETWORKS)
def pair(request, tmp_path_factory):
    """A PyTorch network with random weights, and the Keras backbone that its file is converted to."""
    make, scale, stages = NETWORKS[request.param]
    network = torch_networks.randomize(make(), scale=scale)
    path = tmp_path_factory.mktemp("checkpoints") / f"{request.param}.pth"
    torch.save(network.state_dict(), path)
    model, left_out = convert(path, request.param)
    assert all(re.search("num_batches_tracked|fc|linear|aux|classifier", name) for name in left_out)
    return network, model, scale, stages


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
