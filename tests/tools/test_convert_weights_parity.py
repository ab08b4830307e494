"""Converted checkpoints give the features of the PyTorch networks."""

import keras
import numpy as np
import pytest

from tools.convert_weights import convert

torch = pytest.importorskip(
    "torch", reason="pip install 'tfdml[parity]': the published networks run in PyTorch"
)
from tests.tools import torch_networks  # noqa: E402

# Architecture -> the PyTorch network, and the range of its pixels.
NETWORKS = {
    "googlenet": (torch_networks.CaffeGoogLeNet, 120.0),
    "bn_inception": (torch_networks.BNInception, 120.0),
    "resnet50_v1_5": (torch_networks.ResNet50, 2.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", NETWORKS)
def test_the_features_agree(architecture, tmp_path):
    make, scale = NETWORKS[architecture]
    network = torch_networks.randomize(make(), scale)
    torch.save(network.state_dict(), tmp_path / "x.pth")
    model, _ = convert(tmp_path / "x.pth", architecture)
    for size in ((224, 224), (299, 299), (97, 150)):
        x = np.random.default_rng(sum(size)).uniform(-scale, scale, (1, *size, 3)).astype("float32")
        with torch.no_grad():
            expected = (
                network(torch.from_numpy(x.transpose(0, 3, 1, 2))).numpy().transpose(0, 2, 3, 1)
            )
        found = keras.ops.convert_to_numpy(model(x))
        assert found.shape == expected.shape
        assert np.std(expected) > 1e-3
        assert np.max(np.abs(found - expected)) < 1e-4 * np.max(np.abs(expected)), size
