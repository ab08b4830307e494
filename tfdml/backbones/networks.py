"""Networks that keras.applications lacks: conv4, GoogLeNet, BN-Inception, torchvision's ResNet-50;
and their halves."""

import difflib

import keras

from tfdml.arguments import one_of
from tfdml.layers.feature_maps import CeilMaxPooling2D, LocalResponseNormalization
from tfdml.workarounds import producer_of


def conv4(input_shape=(None, None, 3), width: int = 64, name: str = "conv4") -> keras.Model:
    """Return the four-block network of the few-shot literature: (B, H, W, 3) -> (B, H/16, W/16,
    width).

    Each block is a 3 x 3 convolution, batch normalization, ReLU and 2 x 2 max pooling.

    Args:
        input_shape: Height, width and channels of the images; at least 16 pixels each way.
        width: Channels of every block.
        name: The model's name.

    Example:
        >>> conv4((64, 64, 3)).output_shape
        (None, 4, 4, 64)

    Source: Vinyals et al., "Matching Networks for One Shot Learning", NeurIPS 2016, sec. 4.1.
    """
    x = inputs = keras.Input(input_shape, name="images")
    for block in range(1, 5):
        x = keras.layers.Conv2D(width, 3, padding="same", use_bias=False, name=f"conv{block}")(x)
        x = keras.layers.BatchNormalization(name=f"bn{block}")(x)
        x = keras.layers.ReLU(name=f"relu{block}")(x)
        x = keras.layers.MaxPooling2D(name=f"pool{block}")(x)
    return keras.Model(inputs, x, name=name)


class _Inception:
    """Convolutions of one Inception network, with or without batch normalization.

    A unit called `prefix`, `suffix` consists of the layers `prefix_suffix` (convolution),
    `prefix_suffix_bn` if there is normalization, and `prefix_relu_suffix`: the names of the Caffe
    models with `/` written as `_`.

    Args:
        epsilon: Of batch normalization; None for none.
        use_bias: Whether convolutions have a bias.
    """

    def __init__(self, epsilon: float | None = None, use_bias: bool = True):
        self.epsilon = epsilon
        self.use_bias = use_bias

    def unit(self, x, prefix: str, suffix: str, filters: int, size: int, strides: int = 1):
        """Convolution of odd size, padded by half of it on every side, [normalization,] ReLU."""
        x = _convolution(
            x, f"{prefix}_{suffix}", filters, size, strides, self.epsilon, self.use_bias, ending=""
        )
        return keras.layers.ReLU(name=f"{prefix}_relu_{suffix.removesuffix('_s2')}")(x)

    def chain(self, x, prefix: str, *units: tuple):
        """Units one after another, each (suffix, filters, size[, strides])."""
        for suffix, *arguments in units:
            x = self.unit(x, prefix, suffix, *arguments)
        return x


# Channels of 1x1; 3x3 reduce, 3x3; 5x5 reduce, 5x5; pool projection (Szegedy et al., table 1).
GOOGLENET_MODULES = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


def googlenet(
    input_shape=(None, None, 3), variant: str = "caffe", name: str | None = None
) -> keras.Model:
    """GoogLeNet without its classifiers: (B, H, W, 3) -> (B, H/32, W/32, 1024).

    Layers are called as in the Caffe model, `/` written as `_`: `conv1_7x7_s2`, `pool1_3x3_s2`,
    `pool1_norm1`, `inception_3a_1x1` ... The concatenation that ends a module has the module's
    name, `inception_3a` ... `inception_5b`.

    Args:
        input_shape: Height, width and channels of the images.
        variant: `"caffe"`: the network of the paper as BVLC trained it, with biases and local
            response normalization. `"batch_norm"`: torchvision's, where each convolution has batch
            normalization (epsilon 1e-3) and no bias, there is no local response normalization, what
            is called 5x5 has kernels of 3 x 3, and the fourth pooling is 2 x 2.
        name: The model's name; by default `googlenet` or `googlenet_bn`.

    Raises:
        ValueError: `variant` is neither of these.

    Example:
        >>> googlenet((224, 224, 3)).output_shape
        (None, 7, 7, 1024)

    Source: Szegedy et al., "Going Deeper with Convolutions", CVPR 2015, table 1.
    """
    one_of("variant", variant, ("caffe", "batch_norm"))
    caffe = variant == "caffe"
    blocks = _Inception() if caffe else _Inception(epsilon=1e-3, use_bias=False)
    wide = 5 if caffe else 3

    x = inputs = keras.Input(input_shape, name="images")
    x = blocks.unit(x, "conv1", "7x7_s2", 64, 7, 2)
    x = CeilMaxPooling2D(3, 2, name="pool1_3x3_s2")(x)
    if caffe:
        x = LocalResponseNormalization(name="pool1_norm1")(x)
    x = blocks.unit(x, "conv2", "3x3_reduce", 64, 1)
    x = blocks.unit(x, "conv2", "3x3", 192, 3)
    if caffe:
        x = LocalResponseNormalization(name="conv2_norm2")(x)
    x = CeilMaxPooling2D(3, 2, name="pool2_3x3_s2")(x)
    for module, channels in GOOGLENET_MODULES.items():
        x = _googlenet_module(blocks, x, f"inception_{module}", channels, wide)
        if module == "3b":
            x = CeilMaxPooling2D(3, 2, name="pool3_3x3_s2")(x)
        elif module == "4e":
            size = 3 if caffe else 2
            x = CeilMaxPooling2D(size, 2, name=f"pool4_{size}x{size}_s2")(x)
    return keras.Model(inputs, x, name=name or ("googlenet" if caffe else "googlenet_bn"))


def _googlenet_module(blocks: _Inception, x, prefix: str, channels: tuple[int, ...], wide: int):
    point, narrow_reduce, narrow, wide_reduce, wide_channels, projection = channels
    pooled = keras.layers.MaxPooling2D(3, 1, "same", name=f"{prefix}_pool")(x)
    ones = blocks.unit(x, prefix, "1x1", point, 1)
    threes = blocks.chain(x, prefix, ("3x3_reduce", narrow_reduce, 1), ("3x3", narrow, 3))
    fives = blocks.chain(x, prefix, ("5x5_reduce", wide_reduce, 1), ("5x5", wide_channels, wide))
    projected = blocks.unit(pooled, prefix, "pool_proj", projection, 1)
    return keras.layers.Concatenate(name=prefix)([ones, threes, fives, projected])


# Channels of 1x1 (0: none, and a stride of 2); 3x3 reduce, 3x3; double 3x3 reduce, 3x3; pool
# projection.
BN_INCEPTION_MODULES = {
    "3a": (64, 64, 64, 64, 96, 32),
    "3b": (64, 64, 96, 64, 96, 64),
    "3c": (0, 128, 160, 64, 96, 0),
    "4a": (224, 64, 96, 96, 128, 128),
    "4b": (192, 96, 128, 96, 128, 128),
    "4c": (160, 128, 160, 128, 160, 128),
    "4d": (96, 128, 192, 160, 192, 128),
    "4e": (0, 128, 192, 192, 256, 0),
    "5a": (352, 192, 320, 160, 224, 128),
    "5b": (352, 192, 320, 192, 224, 128),
}


def bn_inception(input_shape=(None, None, 3), name: str = "bn_inception") -> keras.Model:
    """BN-Inception without its classifier: (B, H, W, 3) -> (B, H/32, W/32, 1024).

    The Caffe model that was ported to PyTorch as `bninception`, where it takes BGR images minus
    (104, 117, 128): convolutions with bias, each followed by batch normalization (epsilon 1e-5) and
    ReLU. Layers are called as there: `conv1_7x7_s2`, `conv1_7x7_s2_bn`, `inception_3a_double_3x3_1`
    ...; the concatenation that ends a module has the module's name, `inception_3a` ...
    `inception_5b`. Modules 3c and 4e halve the map.

    Where a map of odd size is halved, which the published model cannot (its branches come out
    unequal; at 299 px for one), the pooling branch gets a window more, so that every image size
    works. At sizes that the published model takes, 224 and 256 px among them, nothing differs.

    Args:
        input_shape: Height, width and channels of the images.
        name: The model's name.

    Example:
        >>> bn_inception((224, 224, 3)).output_shape
        (None, 7, 7, 1024)

    Source: Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing
    Internal Covariate Shift", ICML 2015, fig. 5, with the channels of the published Caffe model.
    """
    blocks = _Inception(epsilon=1e-5)
    x = inputs = keras.Input(input_shape, name="images")
    x = blocks.unit(x, "conv1", "7x7_s2", 64, 7, 2)
    x = CeilMaxPooling2D(3, 2, name="pool1_3x3_s2")(x)
    x = blocks.unit(x, "conv2", "3x3_reduce", 64, 1)
    x = blocks.unit(x, "conv2", "3x3", 192, 3)
    x = CeilMaxPooling2D(3, 2, name="pool2_3x3_s2")(x)
    for module, channels in BN_INCEPTION_MODULES.items():
        x = _bn_inception_module(blocks, x, f"inception_{module}", channels)
    return keras.Model(inputs, x, name=name)


def _bn_inception_module(blocks: _Inception, x, prefix: str, channels: tuple[int, ...]):
    pointwise, narrow_reduce, narrow, double_reduce, double, projection = channels
    strides = 1 if pointwise else 2
    branches = [blocks.unit(x, prefix, "1x1", pointwise, 1)] if pointwise else []
    branches.append(
        blocks.chain(x, prefix, ("3x3_reduce", narrow_reduce, 1), ("3x3", narrow, 3, strides))
    )
    doubled = [("double_3x3_reduce", double_reduce, 1), ("double_3x3_1", double, 3)]
    branches.append(blocks.chain(x, prefix, *doubled, ("double_3x3_2", double, 3, strides)))
    if strides == 2:
        branches.append(CeilMaxPooling2D(3, 2, cover=True, name=f"{prefix}_pool")(x))
    else:
        if prefix.endswith("5b"):
            pooled = keras.layers.MaxPooling2D(3, 1, "same", name=f"{prefix}_pool")(x)
        else:
            # Zeros outside count in the average, unlike those of Keras's "same".
            padded = keras.layers.ZeroPadding2D(1, name=f"{prefix}_pool_pad")(x)
            pooled = keras.layers.AveragePooling2D(3, 1, "valid", name=f"{prefix}_pool")(padded)
        branches.append(blocks.unit(pooled, prefix, "pool_proj", projection, 1))
    return keras.layers.Concatenate(name=prefix)(branches)


# Blocks and inner channels of each stage (He et al., table 1).
RESNET50_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))


def resnet50_v1_5(input_shape=(None, None, 3), name: str = "resnet50_v1_5") -> keras.Model:
    """ResNet-50 v1.5 without its classifier: (B, H, W, 3) -> (B, H/32, W/32, 2048).

    The version of torchvision and of most PyTorch checkpoints: the 3 x 3 convolution of a block has
    its stride. In `keras.applications.ResNet50`, as in Caffe, the first 1 x 1 convolution holds it,
    so that weights of one are not weights of the other, although every shape agrees. Layers are
    called as in keras.applications: `conv1_conv`, `conv2_block1_1_conv` ... `conv5_block3_out`.
    Convolutions have no bias; batch normalization has epsilon 1e-5.

    Args:
        input_shape: Height, width and channels of the images.
        name: The model's name.

    Example:
        >>> resnet50_v1_5((224, 224, 3)).output_shape
        (None, 7, 7, 2048)

    Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, table 1, with the
    stride moved.
    """
    x = inputs = keras.Input(input_shape, name="images")
    x = _convolution(x, "conv1", 64, 7, 2)
    x = keras.layers.ReLU(name="conv1_relu")(x)
    # Zeros outside change no maximum of what a ReLU gives.
    x = keras.layers.ZeroPadding2D(1, name="pool1_pad")(x)
    x = keras.layers.MaxPooling2D(3, 2, name="pool1_pool")(x)
    for stage, (blocks, channels) in enumerate(RESNET50_STAGES, start=2):
        for block in range(1, blocks + 1):
            is_first = block == 1
            halves = is_first and stage > 2
            strides = 2 if halves else 1
            x = _bottleneck(x, f"conv{stage}_block{block}", channels, strides, project=is_first)
    return keras.Model(inputs, x, name=name)


def _bottleneck(x, name: str, channels: int, strides: int, project: bool):
    shortcut = _convolution(x, f"{name}_0", 4 * channels, 1, strides) if project else x
    x = keras.layers.ReLU(name=f"{name}_1_relu")(_convolution(x, f"{name}_1", channels, 1))
    x = keras.layers.ReLU(name=f"{name}_2_relu")(_convolution(x, f"{name}_2", channels, 3, strides))
    x = _convolution(x, f"{name}_3", 4 * channels, 1)
    x = keras.layers.Add(name=f"{name}_add")([shortcut, x])
    return keras.layers.ReLU(name=f"{name}_out")(x)


def _convolution(x, name, filters, size, strides=1, epsilon=1e-5, use_bias=False, ending="_conv"):
    """Convolution of odd size, padded by half of it on every side, and normalization unless
    `epsilon` is None."""
    if size > 1 and strides > 1:
        # "same" pads unevenly where the stride meets an even size.
        x = keras.layers.ZeroPadding2D(size // 2, name=f"{name}_pad")(x)
    padding = "same" if strides == 1 else "valid"
    x = keras.layers.Conv2D(
        filters, size, strides, padding, use_bias=use_bias, name=f"{name}{ending}"
    )(x)
    if epsilon is None:
        return x
    # PyTorch's default momentum, 0.1, counts the other way round.
    return keras.layers.BatchNormalization(epsilon=epsilon, momentum=0.9, name=f"{name}_bn")(x)


def cut(model: keras.Model, at: str) -> tuple[keras.Model, keras.Model]:
    """Return the part of a network up to a layer, that layer included, and the rest.

    Both parts share their layers, and so their weights, with `model`: rest(trunk(x)) is model(x).

    Args:
        model: A functional model with one input and one output.
        at: The name of a layer that everything passes through, such as `inception_4a` or
            `conv4_block1_out`.

    Returns:
        The trunk and the rest.

    Raises:
        ValueError: There is no such layer, something goes past it, or the model is not a functional
            one.

    Example:
        >>> model = tfdml.backbones.resolve("googlenet", image_size=224).model
        >>> trunk, rest = cut(model, at="pool3_3x3_s2")
        >>> trunk.output_shape, rest.output_shape
        ((None, 14, 14, 480), (None, 7, 7, 1024))
    """
    if not getattr(model, "inputs", None) or len(model.inputs) != 1 or len(model.outputs) != 1:
        raise ValueError(
            f"{model.name} cannot be cut: it is no functional model with one input and one output"
        )
    names = [layer.name for layer in model.layers]
    if at not in names:
        alike = difflib.get_close_matches(at, names, n=4, cutoff=0.5)
        hint = f"; near: {', '.join(alike)}" if alike else ""
        raise ValueError(f"{model.name} has no layer {at!r} to cut at{hint}")
    made = [tensor for tensor in ancestors_of(model).values() if producer_of(tensor)[0].name == at]
    if len(made) != 1 or at in [
        producer_of(end)[0].name for end in (model.inputs[0], model.outputs[0])
    ]:
        raise ValueError(f"{model.name} cannot be cut at {at!r}: nothing would be left on one side")
    if model.inputs[0] is ancestors_of(model, not_through=at).get(id(model.inputs[0])):
        raise ValueError(f"{model.name} cannot be cut at {at!r}: other layers go past it")
    trunk = keras.Model(model.inputs[0], made[0], name=f"{model.name}_to_{at}")
    rest = keras.Model(made[0], model.outputs[0], name=f"{model.name}_from_{at}")
    return trunk, rest


def ancestors_of(model: keras.Model, not_through: str = "") -> dict[int, keras.KerasTensor]:
    """Return the tensors from which the output is computed, by id: without the inputs of the layer
    `not_through`, unless another layer needs them."""
    ancestors: dict[int, keras.KerasTensor] = {}
    waiting = list(model.outputs)
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in ancestors:
            continue
        ancestors[id(tensor)] = tensor
        # A layer may have been called in other models too: only the call that made this tensor
        # counts.
        operation, inputs = producer_of(tensor)
        if operation.name != not_through:
            waiting.extend(inputs)
    return ancestors
