"""What each layer of a backbone is called in the checkpoints of PyTorch and Caffe."""

from __future__ import annotations

import re

_BRANCHES = {
    "1x1": "branch1",
    "3x3_reduce": "branch2.0",
    "3x3": "branch2.1",
    "5x5_reduce": "branch3.0",
    "5x5": "branch3.1",
    "pool_proj": "branch4.1",
}
_STEMS = {"conv1_7x7_s2": "conv1", "conv2_3x3_reduce": "conv2", "conv2_3x3": "conv3"}
_RESNET = re.compile(r"conv(\d)_block(\d)_(\d)_(conv|bn)")


def same_name(layer: str) -> str:
    """The Inception networks of Caffe and their ports: the names are kept."""
    return layer


def torchvision_googlenet(layer: str) -> str:
    """`inception_3a_3x3_reduce_bn` -> `inception3a.branch2.0.bn`.

    Example:
        >>> torchvision_googlenet("conv1_7x7_s2"), torchvision_googlenet("inception_4b_pool_proj")
        ('conv1.conv', 'inception4b.branch4.1.conv')
    """
    kind = "bn" if layer.endswith("_bn") else "conv"
    layer = layer.removesuffix("_bn")
    if layer in _STEMS:
        return f"{_STEMS[layer]}.{kind}"
    _, module, branch = layer.split("_", 2)
    return f"inception{module}.{_BRANCHES[branch]}.{kind}"


def torchvision_resnet(layer: str) -> str:
    """`conv2_block1_0_conv` -> `layer1.0.downsample.0`.

    Example:
        >>> torchvision_resnet("conv1_bn"), torchvision_resnet("conv4_block6_2_bn")
        ('bn1', 'layer3.5.bn2')
    """
    if layer in ("conv1_conv", "conv1_bn"):
        return {"conv1_conv": "conv1", "conv1_bn": "bn1"}[layer]
    stage, block, place, kind = _RESNET.fullmatch(layer).groups()  # type: ignore[union-attr]
    inner = f"downsample.{int(kind == 'bn')}" if place == "0" else f"{kind}{place}"
    return f"layer{int(stage) - 1}.{int(block) - 1}.{inner}"


def caffe_resnet(layer: str) -> str:
    """`conv2_block1_2_bn` -> `bn2a_branch2b`, the name of the BatchNorm layer; that of the Scale follows from it.

    Example:
        >>> caffe_resnet("conv1_bn"), caffe_resnet("conv3_block4_0_conv")
        ('bn_conv1', 'res3d_branch1')
    """
    if layer in ("conv1_conv", "conv1_bn"):
        return {"conv1_conv": "conv1", "conv1_bn": "bn_conv1"}[layer]
    stage, block, place, kind = _RESNET.fullmatch(layer).groups()  # type: ignore[union-attr]
    branch = "branch1" if place == "0" else f"branch2{' abc'[int(place)]}"
    return f"{'res' if kind == 'conv' else 'bn'}{stage}{'abcdefgh'[int(block) - 1]}_{branch}"


def caffe_scales(norm: str) -> tuple[str, ...]:
    """The names under which the Scale layer of a BatchNorm layer is found.

    Example:
        >>> caffe_scales("bn2a_branch1")[0]
        'scale2a_branch1'
    """
    if norm.startswith("bn"):
        return (norm.replace("bn", "scale", 1),)
    return (f"{norm}_scale", f"{norm.removesuffix('_bn')}_scale")
