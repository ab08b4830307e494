"""PyTorch's side of `benchmarks.training`: MobileNetV2 with pytorch-metric-learning; it imports no
tfdml.

    python training_peer.py FOLDER THREADS [compile]

FOLDER holds what both sides get: `settings.json`, `weights.npz` (the network's in the order of its
layers, BatchNorm's as gamma, beta, mean, variance), `images.npy` (S, B, H, W, 3) uint8 and
`labels.npy` (S, B) of every step, `test.npy` (N, H, W, 3). It answers a line of "step" with the
seconds of a step on the first batch, as often as asked, and one of "train" by training from the
given weights and embedding the test images into `theirs.npy`. With "compile" the network goes
through torch.compile; the loss, whose shapes depend on the batch, stays as it is.
"""

import json
import pathlib
import sys
import time

import numpy as np
import torch
from pytorch_metric_learning import distances, losses, reducers
from torch import nn

# Of the blocks of MobileNetV2 (Sandler et al., CVPR 2018, table 2).
STRIDES = (1, 2, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1)


class Weights:
    """Arrays, taken one after another."""

    def __init__(self, path):
        arrays = np.load(path)
        self._left = [arrays[name] for name in arrays.files]

    def take(self):
        """The next."""
        return torch.tensor(self._left.pop(0))

    def next_width(self):
        """Whether the next is the kernel of a convolution by points, and how many channels it
        makes."""
        shape = self._left[0].shape
        return shape[-1] if shape[:2] == (1, 1) else None

    def convolution(self, stride=1, activation=True):
        """A convolution, its frozen BatchNorm and ReLU6, as Keras pads it: below and to the right
        at stride 2."""
        kernel = self.take()
        depthwise = kernel.shape[-1] == 1 and kernel.shape[0] == 3
        kernel = kernel.permute((2, 3, 0, 1) if depthwise else (3, 2, 0, 1)).contiguous()
        size, channels = kernel.shape[-1], kernel.shape[0]
        padding = 1 if size == 3 and stride == 1 else 0
        groups = channels if depthwise else 1
        made = nn.Conv2d(
            kernel.shape[1] * groups, channels, size, stride, padding, groups=groups, bias=False
        )
        made.weight.data = kernel
        norm = nn.BatchNorm2d(channels, eps=1e-3)
        norm.weight.data, norm.bias.data = self.take(), self.take()
        norm.running_mean, norm.running_var = self.take(), self.take()
        norm.weight.requires_grad = norm.bias.requires_grad = False
        pad = [nn.ZeroPad2d((0, 1, 0, 1))] if stride == 2 else []
        return nn.Sequential(*pad, made, norm, *([nn.ReLU6()] if activation else []))


class Block(nn.Module):
    """An inverted residual."""

    def __init__(self, weights, channels, stride, expands):
        super().__init__()
        parts = [weights.convolution()] if expands else []
        parts += [weights.convolution(stride), weights.convolution(activation=False)]
        self.parts = nn.Sequential(*parts)
        self.channels = parts[-1][-1].num_features
        self.residual = stride == 1 and self.channels == channels

    def forward(self, x):
        """(B, C, H, W) -> (B, C', H', W')."""
        return x + self.parts(x) if self.residual else self.parts(x)


class Network(nn.Module):
    """Images of pixels 0-255 to unit vectors."""

    def __init__(self, path):
        super().__init__()
        weights = Weights(path)
        layers = [weights.convolution(2)]
        channels = layers[0][-2].num_features
        for place, stride in enumerate(STRIDES):
            layers.append(Block(weights, channels, stride, expands=place > 0))
            channels = layers[-1].channels
        layers.append(weights.convolution())
        self.backbone = nn.Sequential(*layers)
        kernel, bias = weights.take(), weights.take()
        self.projection = nn.Linear(*kernel.shape)
        self.projection.weight.data, self.projection.bias.data = kernel.T.contiguous(), bias

    def forward(self, images):
        """(B, H, W, 3) -> (B, d)."""
        # Channels last, which PyTorch on a CPU is quicker with.
        x = (
            images.permute(0, 3, 1, 2).float().contiguous(memory_format=torch.channels_last) / 127.5
            - 1.0
        )
        pooled = self.backbone(x).mean(dim=(2, 3))
        return nn.functional.normalize(self.projection(pooled))

    def train(self, mode=True):
        """BatchNorm stays as it is."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


def trainer(folder, settings, compiled):
    """The network, and a function that takes a step."""
    network = Network(folder / "weights.npz").train()
    forward = torch.compile(network) if compiled else network
    loss = losses.ContrastiveLoss(
        neg_margin=1, distance=distances.LpDistance(power=2), reducer=reducers.SumReducer()
    )
    optimizer = torch.optim.Adam(
        [parameter for parameter in network.parameters() if parameter.requires_grad],
        lr=settings["learning_rate"],
        eps=1e-7,
    )
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [settings["drop_step"]], 0.1)

    def step(images, labels):
        optimizer.zero_grad()
        value = loss(forward(torch.from_numpy(images)), torch.from_numpy(labels))
        value.backward()
        optimizer.step()
        schedule.step()
        return value.item()

    return network, step


def main(folder, threads, compiled):
    """Answer the driver's lines."""
    torch.set_num_threads(threads)
    folder = pathlib.Path(folder)
    settings = json.loads((folder / "settings.json").read_text())
    images, labels, test = (
        np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("images", "labels", "test")
    )
    _, step = trainer(folder, settings, compiled)
    for line in sys.stdin:
        started = time.perf_counter()
        if line.strip() == "step":
            value = step(np.array(images[0]), np.array(labels[0]))
            print(
                json.dumps({"seconds": time.perf_counter() - started, "value": value}), flush=True
            )
            continue
        network, step = trainer(folder, settings, compiled)
        values = [
            step(np.array(batch), np.array(own)) for batch, own in zip(images, labels, strict=True)
        ]
        seconds = time.perf_counter() - started
        network.eval()
        with torch.no_grad():
            parts = [
                network(torch.from_numpy(np.array(test[at : at + 100])))
                for at in range(0, len(test), 100)
            ]
        np.save(folder / "theirs.npy", torch.cat(parts).numpy())
        print(json.dumps({"seconds": seconds, "values": values}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), compiled="compile" in sys.argv[3:])
