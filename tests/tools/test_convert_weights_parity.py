"""Converted checkpoints give the features of the published PyTorch networks: torchvision's, and
those of pretrainedmodels, where the file of BN-Inception is from."""

import keras
import numpy as np
import pytest

from tools.convert_weights import ARCHITECTURES, convert, torchvision_googlenet

torch = pytest.importorskip("torch", reason="pip install 'tfdml[parity]'")
torchvision = pytest.importorskip("torchvision", reason="pip install 'tfdml[parity]'")
published = pytest.importorskip("pretrainedmodels", reason="pip install 'tfdml[parity]'")


def caffe_googlenet():
    """BVLC's: torchvision's with biases for BatchNorm, kernels of 5 x 5, and normalized maps."""
    network = googlenet()
    for name, module in [*network.named_modules()]:
        if type(module).__name__ == "BasicConv2d":
            conv = module.conv
            size = 5 if name.endswith("branch3.1") else conv.kernel_size[0]
            sizes = (conv.in_channels, conv.out_channels, size, conv.stride, size // 2)
            module.conv, module.bn = torch.nn.Conv2d(*sizes), torch.nn.Identity()
    lrn = torch.nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75, k=1.0)
    network.maxpool1 = torch.nn.Sequential(network.maxpool1, lrn)
    network.maxpool2 = torch.nn.Sequential(lrn, network.maxpool2)
    network.maxpool4 = torch.nn.MaxPool2d(3, 2, ceil_mode=True)
    return network


def googlenet():
    return torchvision.models.googlenet(weights=None, aux_logits=False, init_weights=False)


def bn_inception():
    return published.bninception(num_classes=7, pretrained=None)


def features_of(network):
    """What a network computes before its global pooling."""
    if hasattr(network, "features"):
        return network.features
    parts = [type(part).__name__ for part in network.children()]
    return torch.nn.Sequential(*network.children())[: parts.index("AdaptiveAvgPool2d")]


def randomize(network, features, scale):
    """Random weights, and BatchNorm's statistics near those of images of +-scale."""
    torch.manual_seed(0)
    for layer in network.modules():
        if isinstance(layer, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(layer.weight)
        if isinstance(layer, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(layer.weight, 0.5, 1.2)
            torch.nn.init.uniform_(layer.bias, -0.3, 0.3)
            layer.momentum = 0.8
    features(torch.empty(4, 3, 96, 96).uniform_(-scale, scale))
    network.eval()


# The network, the range of its pixels, and a size next to 224: one that it takes.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "make", "scale", "odd"),
    [
        ("googlenet", caffe_googlenet, 120.0, (97, 150)),
        ("googlenet_bn", googlenet, 1.0, (97, 150)),
        ("bn_inception", bn_inception, 120.0, (256, 192)),
        ("resnet50_v1_5", torchvision.models.resnet50, 2.0, (97, 150)),
    ],
)
@torch.no_grad()
def test_the_features_agree(architecture, make, scale, odd, tmp_path, monkeypatch):
    # torchvision's network has its own names for the layers of BVLC's.
    bvlc, _ = ARCHITECTURES["googlenet"]
    monkeypatch.setitem(ARCHITECTURES, "googlenet", (bvlc, torchvision_googlenet))
    network = make()
    features = features_of(network)
    randomize(network, features, scale)
    torch.save(network.state_dict(), tmp_path / "x.pth")
    model, _ = convert(tmp_path / "x.pth", architecture)
    for size in ((224, 224), odd):
        x = np.random.default_rng(sum(size)).uniform(-scale, scale, (1, *size, 3)).astype("float32")
        expected = features(torch.from_numpy(x.transpose(0, 3, 1, 2))).numpy().transpose(0, 2, 3, 1)
        found = keras.ops.convert_to_numpy(model(x))
        assert found.shape == expected.shape
        assert np.std(expected) > 1e-3
        assert np.max(np.abs(found - expected)) < 1e-4 * np.max(np.abs(expected)), size
