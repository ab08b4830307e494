"""Layers on images and feature maps: scaling, pooling, attention, and what Caffe networks need."""

import math

import keras
from keras import ops

from tfdml.arguments import boolean, integer, number, one_of
from tfdml.saving import SavedByArguments
from tfdml.workarounds import add_undecayed_weight

_IMAGENET_MEAN = (123.675, 116.28, 103.53)
_IMAGENET_STD = (58.395, 57.12, 57.375)
# Caffe models: blue, green, red, with these means taken off (keras.applications' own values, and
# those of the published GoogLeNet and BN-Inception).
_MEANS_BGR = {
    "caffe": (103.939, 116.779, 123.68),
    "googlenet": (104.0, 117.0, 123.0),
    "bn_inception": (104.0, 117.0, 128.0),
}


class InputScaling(SavedByArguments, keras.layers.Layer):
    """Pixels 0-255 in RGB order to what a backbone was trained on.

    Args:
        mode: `"none"`: pixels as they are (backbones with their own preprocessing); `"unit"`: x /
            255; `"tf"`: x / 127.5 - 1; `"torch"`: ImageNet mean and deviation; `"caffe"`: BGR minus
            the ImageNet mean; `"googlenet"` and `"bn_inception"`: BGR minus (104, 117, 123) and
            (104, 117, 128), as the Caffe models have it; or a mapping with `scale` and `offset`,
            three numbers each: x * scale + offset.

    Raises:
        ValueError: `mode` is none of these.

    Example:
        >>> np.array(InputScaling("tf")(keras.ops.full((1, 2, 2, 3), 255.0)))[0, 0, 0]
        array([1., 1., 1.], dtype=float32)
    """

    MODES = ("none", "unit", "tf", "torch", "caffe", "googlenet", "bn_inception")

    def __init__(self, mode="tf", **kwargs):
        super().__init__(**{**kwargs, "autocast": False})
        self.mode = _affine(mode) if isinstance(mode, dict) else one_of("mode", mode, self.MODES)

    def call(self, images):
        """(B, H, W, 3) of any dtype -> (B, H, W, 3) of the compute dtype."""
        # Scaled in float32 first: half precision has too few digits for differences of pixels.
        x = ops.cast(images, "float32")
        if isinstance(self.mode, dict):
            x = x * ops.array(self.mode["scale"], "float32") + ops.array(
                self.mode["offset"], "float32"
            )
        elif self.mode == "unit":
            x = x / 255.0
        elif self.mode == "tf":
            x = x / 127.5 - 1.0
        elif self.mode == "torch":
            x = (x - ops.array(_IMAGENET_MEAN, "float32")) / ops.array(_IMAGENET_STD, "float32")
        elif self.mode in _MEANS_BGR:
            x = ops.flip(x, axis=-1) - ops.array(_MEANS_BGR[self.mode], "float32")
        return ops.cast(x, self.compute_dtype)


def _affine(mode: dict) -> dict[str, list[float]]:
    if set(mode) != {"scale", "offset"} or any(len(numbers) != 3 for numbers in mode.values()):
        raise ValueError(f"mode must have scale and offset, three numbers each, not {mode!r}")
    affine = {}
    for name, numbers in mode.items():
        affine[name] = [number(name, part) for part in numbers]
    return affine


class CeilMaxPooling2D(SavedByArguments, keras.layers.Layer):
    """Max pooling whose windows start at the first row and column, and whose last ones may hang
    over the edge.

    For n rows, windows of k rows and a stride of s, there are ceil((n - k) / s) + 1 rows of windows
    (never fewer than one), and a window takes the maximum over the part of it that lies inside.
    This is Caffe's pooling without padding, and PyTorch's `MaxPool2d(k, s, ceil_mode=True)`.
    Keras's `"valid"` drops the windows that hang over; its `"same"` starts before the first row
    where n is odd.

    Args:
        pool_size: k.
        strides: s, at most k.
        cover: Put a window at every s-th row: ceil(n / s) of them, as many as a convolution of odd
            size, padded by half of it, has. For k = 3 and s = 2 that is one more where n is odd,
            and no difference where it is even.

    Raises:
        ValueError: A size is not positive, or windows would leave rows out.

    Example:
        >>> tuple(CeilMaxPooling2D(3, 2)(keras.ops.zeros((1, 112, 113, 8))).shape)
        (1, 56, 56, 8)
    """

    def __init__(self, pool_size=3, strides=2, cover=False, **kwargs):
        super().__init__(**kwargs)
        self.pool_size = integer("pool_size", pool_size, at_least=1)
        self.strides = integer("strides", strides, at_least=1)
        self.cover = boolean("cover", cover)
        if strides > pool_size:
            raise ValueError(
                f"{self.name}: need pool_size >= strides >= 1, not {pool_size} and {strides}"
            )

    def call(self, x):
        """(B, h, w, c) -> (B, h', w', c)."""
        for axis in (1, 2):
            rows = ops.shape(x)[axis]
            needed = (self._windows(rows) - 1) * self.strides + self.pool_size
            # The last row again changes no maximum of a window that holds it, and unlike -inf it
            # can be quantized.
            last = x[:, -1:] if axis == 1 else x[:, :, -1:]
            x = ops.concatenate([x] + [last] * (self.pool_size - 1), axis=axis)
            x = x[:, :needed] if axis == 1 else x[:, :, :needed]
        return ops.max_pool(
            x, self.pool_size, self.strides, padding="valid", data_format="channels_last"
        )

    def _windows(self, rows):
        if self.cover:
            return (rows + self.strides - 1) // self.strides
        hanging = rows - self.pool_size
        count = (hanging + self.strides - 1) // self.strides + 1
        return max(count, 1) if isinstance(rows, int) else ops.maximum(count, 1)

    def compute_output_shape(self, input_shape):
        """(B, h', w', c)."""
        sides = [None if rows is None else self._windows(rows) for rows in input_shape[1:3]]
        return (input_shape[0], *sides, input_shape[3])


@keras.saving.register_keras_serializable("tfdml")
class LocalResponseNormalization(keras.layers.Layer):
    """Divides each activation by those of neighboring channels at its position, in float32.

    y_c = x_c / (1 + 1e-4 / 5 * sum of x_j^2 over |j - c| <= 2)^0.75

    as in Caffe's GoogLeNet, which divides by the number of channels
    (`tf.nn.local_response_normalization` does not).

    Example:
        >>> tuple(LocalResponseNormalization()(keras.ops.ones((1, 2, 2, 64))).shape)
        (1, 2, 2, 64)

    Source: Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks",
    NeurIPS 2012, sec. 3.3.
    """

    def call(self, x):
        """(B, h, w, c) -> (B, h, w, c)."""
        wide = ops.cast(x, "float32")
        squares = ops.pad(ops.square(wide), [[0, 0]] * 3 + [[2, 2]])
        total = sum(squares[..., shift : shift + x.shape[-1]] for shift in range(5))
        return ops.cast(wide * ops.power(1.0 + 1e-4 / 5 * total, -0.75), x.dtype)


_LARGEST_POWER = 100.0


class GeneralizedMeanPooling2D(SavedByArguments, keras.layers.Layer):
    """The generalized mean of each channel over the positions, with a trained power p (GeM).

    f_c = (1/N sum_i max(x_ic, 1e-6)^p)^(1/p)

    p = 1 is the average, p -> infinity the maximum; one p for all channels, kept between 1 and 100
    in training. Features below 1e-6 count as 1e-6: of a network whose features have both signs,
    such as a transformer, the negative ones have no part in it. Computed in float32 under every
    dtype policy.

    Args:
        power: p at the start, 1 to 100.

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> x = keras.ops.reshape(keras.ops.array([1.0, 3.0]), (1, 1, 2, 1))
        >>> float(GeneralizedMeanPooling2D(power=1.0)(x)[0, 0])
        2.0

    Source: Radenovic, Tolias and Chum, "Fine-Tuning CNN Image Retrieval with No Human Annotation",
    TPAMI 2019, eq. 3.
    """

    def __init__(self, power=3.0, **kwargs):
        super().__init__(**{**kwargs, "autocast": False})
        self.power = number("power", power, at_least=1, at_most=_LARGEST_POWER)

    def build(self, input_shape):
        """Create p."""
        self.p = add_undecayed_weight(
            self,
            shape=(),
            dtype="float32",
            initializer=keras.initializers.Constant(self.power),
            constraint=_within_powers,
            name="power",
        )

    def call(self, x):
        """(B, h, w, c) -> (B, c)."""
        x = ops.maximum(ops.cast(x, "float32"), 1e-6)
        # The mean of x / m, times m: powers of features stay in float32's range. Its value does not
        # depend on m.
        largest = ops.stop_gradient(ops.max(x, axis=(1, 2), keepdims=True))
        p = ops.convert_to_tensor(self.p)
        mean = ops.mean(ops.power(x / largest, p), axis=(1, 2))
        return ops.cast(ops.power(mean, 1.0 / p) * largest[:, 0, 0], self.compute_dtype)


def _within_powers(p):
    return ops.clip(p, 1.0, _LARGEST_POWER)


@keras.saving.register_keras_serializable("tfdml")
class AttentionPooling2D(keras.layers.Layer):
    """The mean over the positions, weighted by how well each fits a trained query q.

    f = sum_i a_i x_i,  a = softmax_i(<q, x_i> / sqrt(c))

    q starts at zero, so that the first weights are those of the average. Computed in float32 under
    every dtype policy.

    Example:
        >>> x = keras.random.normal((2, 7, 7, 16))
        >>> tuple(AttentionPooling2D()(x).shape)
        (2, 16)

    Source: Lee et al., "Set Transformer", ICML 2019, sec. 3.2: pooling by attention to one seed,
    without projections of its own (those of the network before it and the embedder's after it are
    there already).
    """

    def __init__(self, **kwargs):
        super().__init__(**{**kwargs, "autocast": False})

    def build(self, input_shape):
        """Create q."""
        self.query = self.add_weight(
            shape=(input_shape[-1],), dtype="float32", initializer="zeros", name="query"
        )

    def weights_of(self, x):
        """Return the weight of each position: (B, h, w, c) -> (B, h, w) float32, of sum 1 in each
        image."""
        height, width = ops.shape(x)[1:3]
        logits = ops.matmul(ops.cast(x, "float32"), self.query) / math.sqrt(x.shape[-1])
        weights = ops.softmax(ops.reshape(logits, (-1, height * width)), axis=-1)
        return ops.reshape(weights, (-1, height, width))

    def call(self, x):
        """(B, h, w, c) -> (B, c)."""
        pooled = ops.sum(self.weights_of(x)[..., None] * ops.cast(x, "float32"), axis=(1, 2))
        return ops.cast(pooled, self.compute_dtype)


class AttentionHeads(SavedByArguments, keras.layers.Layer):
    """The feature map as each of M heads sees it.

    z_m = x * sigmoid(V_m u + b_m), m = 1 .. M, at every position

    with x the features, u the context (what an attention network makes of x), and V_m a 1 x 1
    convolution to as many channels as x has. The M convolutions are one with M c channels; each
    head's weights start Glorot-uniform.

    Args:
        heads: M.

    Raises:
        ValueError: `heads` is not positive, or the maps differ in height or width.

    Example:
        >>> x, u = keras.random.normal((2, 14, 14, 480)), keras.random.normal((2, 14, 14, 832))
        >>> tuple(AttentionHeads(8)([x, u]).shape)
        (2, 8, 14, 14, 480)

    Source: Kim et al., "Attention-based Ensemble for Deep Metric Learning", ECCV 2018, sec. 3.2.
    """

    def __init__(self, heads=8, **kwargs):
        super().__init__(**kwargs)
        self.heads = integer("heads", heads, at_least=1)

    def build(self, input_shape):
        """Create the convolutions."""
        features, context = input_shape
        # One convolution's own initializer would take all heads for one layer and start them too
        # small.
        bound = math.sqrt(6.0 / (context[-1] + features[-1]))
        initializer = keras.initializers.RandomUniform(-bound, bound)
        self.convolution = keras.layers.Conv2D(
            self.heads * features[-1],
            1,
            activation="sigmoid",
            kernel_initializer=initializer,
            name="masks",
            dtype=self.dtype_policy,
        )
        self.convolution.build(context)

    def masks(self, context):
        """Return the masks of a context (B, h, w, c'): (B, M, h, w, c), between 0 and 1."""
        masks = self.convolution(context)
        height, width = ops.shape(masks)[1:3]
        channels = masks.shape[-1] // self.heads
        by_position = ops.reshape(masks, (-1, height, width, self.heads, channels))
        return ops.transpose(by_position, (0, 3, 1, 2, 4))

    def call(self, inputs):
        """Features (B, h, w, c) and context (B, h, w, c') -> (B, M, h, w, c)."""
        features, context = inputs
        return self.masks(context) * features[:, None]

    def compute_output_shape(self, input_shape):
        """(B, M, h, w, c)."""
        features, context = input_shape
        if tuple(features[1:3]) != tuple(context[1:3]):
            raise ValueError(
                f"{self.name}: the masks are {context[1:3]}, the features {features[1:3]} in size"
            )
        return (features[0], self.heads, *features[1:])
