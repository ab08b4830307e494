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


def lrn(x):
    return functional.local_response_norm(x, 5, alpha=1e-4, beta=0.75, k=1.0)


class Named(nn.Module):
    """Modules under names that attributes could not have (none of them holds a dot)."""

    def conv(self, name, inputs, outputs, size, stride=1, norm=None, bias=True):
        self.add_module(name, nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=bias))
        if norm is not None:
            self.add_module(f"{name}_bn", nn.BatchNorm2d(outputs, eps=norm))

    def run(self, name, x):
        x = self.get_submodule(name)(x)
        if f"{name}_bn" in dict(self.named_children()):
            x = self.get_submodule(f"{name}_bn")(x)
        return functional.relu(x)


class CaffeGoogLeNet(Named):
    """BVLC's GoogLeNet."""

    def __init__(self):
        super().__init__()
        self.conv("conv1_7x7_s2", 3, 64, 7, 2)
        self.conv("conv2_3x3_reduce", 64, 64, 1)
        self.conv("conv2_3x3", 64, 192, 3)
        channels = 192
        for name, *widths in rows(GOOGLENET):
            a, b1, b2, c1, c2, d = map(int, widths)
            self.conv(f"inception_{name}_1x1", channels, a, 1)
            self.conv(f"inception_{name}_3x3_reduce", channels, b1, 1)
            self.conv(f"inception_{name}_3x3", b1, b2, 3)
            self.conv(f"inception_{name}_5x5_reduce", channels, c1, 1)
            self.conv(f"inception_{name}_5x5", c1, c2, 5)
            self.conv(f"inception_{name}_pool_proj", channels, d, 1)
            channels = a + b2 + c2 + d
        self.loss3_classifier = nn.Linear(1024, 7)

    def forward(self, x):
        x = self.run("conv1_7x7_s2", x)
        x = lrn(functional.max_pool2d(x, 3, 2, ceil_mode=True))
        x = lrn(self.run("conv2_3x3", self.run("conv2_3x3_reduce", x)))
        x = functional.max_pool2d(x, 3, 2, ceil_mode=True)
        for name, *_ in rows(GOOGLENET):
            p = f"inception_{name}"
            branches = [
                self.run(f"{p}_1x1", x),
                self.run(f"{p}_3x3", self.run(f"{p}_3x3_reduce", x)),
                self.run(f"{p}_5x5", self.run(f"{p}_5x5_reduce", x)),
                self.run(f"{p}_pool_proj", functional.max_pool2d(x, 3, 1, 1)),
            ]
            x = torch.cat(branches, 1)
            if name in ("3b", "4e"):
                x = functional.max_pool2d(x, 3, 2, ceil_mode=True)
        return x


class BNInception(Named):
    """BN-Inception as ported from Caffe."""

    def __init__(self):
        super().__init__()
        self.conv("conv1_7x7_s2", 3, 64, 7, 2, norm=1e-5)
        self.conv("conv2_3x3_reduce", 64, 64, 1, norm=1e-5)
        self.conv("conv2_3x3", 64, 192, 3, norm=1e-5)
        channels = 192
        for name, a, b1, b2, c1, c2, c3, _, d in rows(BN_INCEPTION):
            p, stride = f"inception_{name}", 2 if a == "-" else 1
            b1, b2, c1, c2, c3 = map(int, (b1, b2, c1, c2, c3))
            if a != "-":
                self.conv(f"{p}_1x1", channels, int(a), 1, norm=1e-5)
            self.conv(f"{p}_3x3_reduce", channels, b1, 1, norm=1e-5)
            self.conv(f"{p}_3x3", b1, b2, 3, stride, norm=1e-5)
            self.conv(f"{p}_double_3x3_reduce", channels, c1, 1, norm=1e-5)
            self.conv(f"{p}_double_3x3_1", c1, c2, 3, norm=1e-5)
            self.conv(f"{p}_double_3x3_2", c2, c3, 3, stride, norm=1e-5)
            if d != "-":
                self.conv(f"{p}_pool_proj", channels, int(d), 1, norm=1e-5)
            channels = b2 + c3 + (channels if d == "-" else int(a) + int(d))
        self.last_linear = nn.Linear(1024, 7)

    def forward(self, x):
        x = self.run("conv1_7x7_s2", x)
        x = functional.max_pool2d(x, 3, 2, ceil_mode=True)
        x = self.run("conv2_3x3", self.run("conv2_3x3_reduce", x))
        x = functional.max_pool2d(x, 3, 2, ceil_mode=True)
        for name, a, *_, kind, d in rows(BN_INCEPTION):
            p = f"inception_{name}"
            branches = [self.run(f"{p}_1x1", x)] if a != "-" else []
            branches.append(self.run(f"{p}_3x3", self.run(f"{p}_3x3_reduce", x)))
            double = self.run(f"{p}_double_3x3_1", self.run(f"{p}_double_3x3_reduce", x))
            branches.append(self.run(f"{p}_double_3x3_2", double))
            if d == "-":
                # At an odd size the published network has a row and a column of windows too few to
                # go on.
                odd = [side % 2 for side in x.shape[2:]]
                ended = functional.pad(x, (0, odd[1], 0, odd[0]), value=-torch.inf)
                branches.append(functional.max_pool2d(ended, 3, 2, ceil_mode=True))
            else:
                average = functional.avg_pool2d(x, 3, 1, 1, ceil_mode=True, count_include_pad=True)
                pooled = (
                    average if kind == "avg" else functional.max_pool2d(x, 3, 1, 1, ceil_mode=True)
                )
                branches.append(self.run(f"{p}_pool_proj", pooled))
            x = torch.cat(branches, 1)
        return x


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = (
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.downsample = None
        if stride > 1 or inputs != 4 * width:
            norm = nn.BatchNorm2d(4 * width)
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), norm
            )

    def forward(self, x):
        y = functional.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(functional.relu(self.bn2(self.conv2(y)))))
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet50(nn.Module):
    """torchvision's ResNet-50 (v1.5)."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        inputs = 64
        for stage, (blocks, width) in enumerate(RESNET50, start=1):
            made = []
            for block in range(blocks):
                made.append(Bottleneck(inputs, width, 2 if stage > 1 and block == 0 else 1))
                inputs = 4 * width
            self.add_module(f"layer{stage}", nn.Sequential(*made))
        self.fc = nn.Linear(2048, 7)

    def forward(self, x):
        x = functional.relu(self.bn1(self.conv1(x)))
        x = functional.max_pool2d(x, 3, 2, 1)
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        return x


def randomize(network, seed=0, scale=1.0):
    """Random weights, and BatchNorm parameters and statistics near those of images of +-scale."""
    torch.manual_seed(seed)
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        for norm in norms:
            norm.weight.uniform_(0.5, 1.2)
            norm.bias.uniform_(-0.3, 0.3)
            norm.momentum = 1.0
        network.train()
        network(torch.empty(4, 3, 96, 96).uniform_(-scale, scale))
        for norm in norms:
            norm.running_var.mul_(torch.empty_like(norm.running_var).uniform_(0.7, 1.4))
    return network.eval()
