"""The published networks in PyTorch, written from their tables; each returns its last map."""

import torch
from torch import nn
from torch.nn import functional

GOOGLENET = """
3a 64 96 128 16 32 32
3b 128 128 192 32 96 64
4a 192 96 208 16 48 64
4b 160 112 224 24 64 64
4c 128 128 256 24 64 64
4d 112 144 288 32 64 64
4e 256 160 320 32 128 128
5a 256 160 320 32 128 128
5b 384 192 384 48 128 128
"""
# 1x1 | 3x3 reduce, 3x3 | double reduce, first, second | pooling, projection; "-" where there is
# none.
BN_INCEPTION = """
3a 64 64 64 64 96 96 avg 32
3b 64 64 96 64 96 96 avg 64
3c - 128 160 64 96 96 max -
4a 224 64 96 96 128 128 avg 128
4b 192 96 128 96 128 128 avg 128
4c 160 128 160 128 160 160 avg 128
4d 96 128 192 160 192 192 avg 128
4e - 128 192 192 256 256 max -
5a 352 192 320 160 224 224 avg 128
5b 352 192 320 192 224 224 max 128
"""
RESNET50 = ((3, 64), (4, 128), (6, 256), (3, 512))


def rows(table):
    return [line.split() for line in table.split("\n") if line]


def max_pool(x, stride=2):
    return functional.max_pool2d(x, 3, stride, 2 - stride, ceil_mode=True)


def lrn(x):
    return functional.local_response_norm(x, 5, alpha=1e-4, beta=0.75, k=1.0)


class Network(nn.Module):
    """Layers by the names of a published network, each made as it is first called."""

    def __init__(self, classifier, features):
        super().__init__()
        self.add_module(classifier, nn.Linear(features, 7))

    def state_dict(self):
        return {name.replace("/", "."): value for name, value in super().state_dict().items()}

    def layer(self, name, make, x):
        key = name.replace(".", "/")  # no attribute holds a dot
        if key not in self._modules:
            self.add_module(key, make(x.shape[1]))
        return self._modules[key](x)

    def conv(self, name, x, width, size, stride=1, norm=None):
        """A convolution, with BatchNorm of a name or a bias."""

        def make(inputs):
            return nn.Conv2d(inputs, int(width), size, stride, size // 2, bias=self.has_bias)

        x = self.layer(name, make, x)
        return x if norm is None else self.layer(norm, nn.BatchNorm2d, x)


class Inception(Network):
    """Blocks of branches side by side."""

    has_bias = True

    def unit(self, name, x, *sizes):
        norm = f"{name}_bn" if self.has_norm else None
        return functional.relu(self.conv(name, x, *sizes, norm=norm))

    def stem(self, x, normalize=lambda x: x):
        x = normalize(max_pool(self.unit("conv1_7x7_s2", x, 64, 7, 2)))
        x = self.unit("conv2_3x3", self.unit("conv2_3x3_reduce", x, 64, 1), 192, 3)
        return max_pool(normalize(x))


class CaffeGoogLeNet(Inception):
    """BVLC's GoogLeNet."""

    has_norm = False

    def __init__(self):
        super().__init__("loss3_classifier", 1024)

    def forward(self, x):
        x = self.stem(x, lrn)
        for name, a, b1, b2, c1, c2, d in rows(GOOGLENET):
            p = f"inception_{name}"
            branches = [
                self.unit(f"{p}_1x1", x, a, 1),
                self.unit(f"{p}_3x3", self.unit(f"{p}_3x3_reduce", x, b1, 1), b2, 3),
                self.unit(f"{p}_5x5", self.unit(f"{p}_5x5_reduce", x, c1, 1), c2, 5),
                self.unit(f"{p}_pool_proj", max_pool(x, 1), d, 1),
            ]
            x = torch.cat(branches, 1)
            if name in ("3b", "4e"):
                x = max_pool(x)
        return x


class BNInception(Inception):
    """BN-Inception as ported from Caffe."""

    has_norm = True

    def __init__(self):
        super().__init__("last_linear", 1024)

    def forward(self, x):
        x = self.stem(x)
        for name, a, b1, b2, c1, c2, c3, kind, d in rows(BN_INCEPTION):
            p, stride = f"inception_{name}", 2 if a == "-" else 1
            branches = [] if a == "-" else [self.unit(f"{p}_1x1", x, a, 1)]
            single = self.unit(f"{p}_3x3_reduce", x, b1, 1)
            branches.append(self.unit(f"{p}_3x3", single, b2, 3, stride))
            double = self.unit(f"{p}_double_3x3_reduce", x, c1, 1)
            double = self.unit(f"{p}_double_3x3_1", double, c2, 3)
            branches.append(self.unit(f"{p}_double_3x3_2", double, c3, 3, stride))
            if d == "-":
                # At an odd size the published network has a row and a column of windows too few to
                # go on.
                odd = [side % 2 for side in x.shape[2:]]
                branches.append(
                    max_pool(functional.pad(x, (0, odd[1], 0, odd[0]), value=-torch.inf))
                )
            else:
                average = functional.avg_pool2d(x, 3, 1, 1, ceil_mode=True)
                pooled = average if kind == "avg" else max_pool(x, 1)
                branches.append(self.unit(f"{p}_pool_proj", pooled, d, 1))
            x = torch.cat(branches, 1)
        return x


class ResNet50(Network):
    """torchvision's ResNet-50 (v1.5)."""

    has_bias = False

    def __init__(self):
        super().__init__("fc", 2048)

    def forward(self, x):
        x = functional.relu(self.conv("conv1", x, 64, 7, 2, norm="bn1"))
        x = functional.max_pool2d(x, 3, 2, 1)
        for stage, (blocks, width) in enumerate(RESNET50, start=1):
            for block in range(blocks):
                stride = 2 if stage > 1 and block == 0 else 1
                x = self.block(f"layer{stage}.{block}", x, width, stride, block == 0)
        return x

    def block(self, p, x, width, stride, downsample):
        y = functional.relu(self.conv(f"{p}.conv1", x, width, 1, norm=f"{p}.bn1"))
        y = functional.relu(self.conv(f"{p}.conv2", y, width, 3, stride, norm=f"{p}.bn2"))
        y = self.conv(f"{p}.conv3", y, 4 * width, 1, norm=f"{p}.bn3")
        if downsample:
            sizes = (4 * width, 1, stride, f"{p}.downsample.1")
            x = self.conv(f"{p}.downsample.0", x, *sizes)
        return functional.relu(y + x)


def randomize(network, scale):
    """Random weights, and BatchNorm parameters and statistics near those of images of +-scale."""
    torch.manual_seed(0)
    with torch.no_grad():
        network(torch.zeros(4, 3, 96, 96))  # makes the layers
        norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        for norm in norms:
            norm.weight.uniform_(0.5, 1.2)
            norm.bias.uniform_(-0.3, 0.3)
            norm.momentum = 1.0
        network(torch.empty(4, 3, 96, 96).uniform_(-scale, scale))
        for norm in norms:
            norm.running_var.mul_(torch.empty_like(norm.running_var).uniform_(0.7, 1.4))
    return network.eval()
