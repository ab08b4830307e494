"""The network that is trained, measured and shipped: from images to unit vectors."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from tfdml import backbones, workarounds
from tfdml.arguments import integer, number, one_of
from tfdml.errors import UserError
from tfdml.layers import (
    AttentionPooling2D,
    GeneralizedMeanPooling2D,
    InputScaling,
    L2Normalize,
    PrincipalComponents,
)
from tfdml.models.normalization import batch_norms, keep_statistics
from tfdml.saving import SavedAsFile, SavedByArguments, restore

BATCH_NORM_MODES = ("frozen", "statistics", "train")
POOLINGS = {
    "avg": keras.layers.GlobalAveragePooling2D,
    "max": keras.layers.GlobalMaxPooling2D,
    "gem": GeneralizedMeanPooling2D,
    "attention": AttentionPooling2D,
    "cls": None,
}


def build_once(layer: keras.layers.Layer, shape: Any) -> None:
    """Create the weights of a layer for inputs of this shape, if it has none yet."""
    if not layer.built:
        layer.build(shape)


def is_frozen(part: keras.layers.Layer) -> bool:
    """Whether no weight of a part of a network trains."""
    if not part.weights:
        return not part.trainable
    return not any(weight.trainable for weight in part.weights)


def mode_of(part: keras.layers.Layer, training: Any) -> Any:
    """Return the argument `training` of a part of a network: a frozen one is in inference mode."""
    return False if is_frozen(part) else training


def freeze_layers(model: Any) -> None:
    """Freeze all layers of a model that its constructor was told to freeze, as of a file."""
    if not model.trainable:
        model.trainable = False


def _gives_maps(shape: tuple, pooling: str) -> bool:
    """Whether a backbone of this output shape gives maps, and not vectors."""
    if len(shape) not in (2, 4) or shape[-1] is None:
        raise ValueError(
            f"backbone must give maps (B, h, w, c) or vectors (B, D), not {tuple(shape)}"
        )
    if len(shape) == 2 and pooling != "avg":
        raise ValueError(
            f"pooling={pooling!r}: the backbone gives vectors {tuple(shape)}, which nothing pools"
        )
    return len(shape) == 4


def _resolved(backbone: Any, image_size: int, scaling: Any) -> tuple[keras.Model, Any]:
    """Return the network of a backbone, and the scaling of its pixels."""
    if isinstance(backbone, str):
        backbone = backbones.resolve(backbone, image_size)
    if isinstance(backbone, backbones.Backbone):
        scaling = backbone.scaling if scaling is None else scaling
        backbone = backbone.model
    if isinstance(backbone, dict):
        backbone = keras.saving.deserialize_keras_object(backbone)
    if not isinstance(backbone, keras.Model):
        raise ValueError(f"backbone must be a name, a Backbone or a keras.Model, not {backbone!r}")
    return backbone, scaling


def _color(color: Any) -> list[int]:
    if len(color) != 3 or any(int(part) != part or not 0 <= part <= 255 for part in color):
        raise ValueError(f"pad_color must be three whole numbers of 0 to 255, not {color!r}")
    return [int(part) for part in color]


def _dimension(head: Any, features: Any, embedding_dim: int | None, projection_bias: bool) -> int:
    """Return the size of the vectors that a head gives, or the dense layer where there is none."""
    if head is not None:
        return _dim_of_head(head, int(features), embedding_dim, projection_bias)
    if embedding_dim is None:
        return 512
    integer("embedding_dim", embedding_dim, at_least=0)
    return int(embedding_dim) or int(features)


def _dim_of_head(head: Any, features: int, embedding_dim: int | None, projection_bias: bool) -> int:
    """D of the vectors that a head gives."""
    if not isinstance(head, keras.layers.Layer):
        raise ValueError(f"head must be a keras.layers.Layer or keras.Model, not {head!r}")
    if not projection_bias:
        raise ValueError(
            "projection_bias=False is of the dense layer, whose place head takes: leave out one "
            "of them"
        )
    shape = tuple(head.compute_output_shape((None, features)))
    if len(shape) != 2 or shape[1] is None:
        raise ValueError(
            f"head must give vectors (B, d) of pooled features (B, {features}), not {shape}"
        )
    if embedding_dim not in (None, shape[1]):
        raise ValueError(
            f"embedding_dim={embedding_dim}, and the head gives {shape[1]} components: leave it out"
        )
    return int(shape[1])


# Images of an array that are looked at for their pixels.
_COUNT = 100
# Networks this shallow, as conv4, learn without normalized features too.
_SHALLOW = 10


def untrained_batch_norm(embedder: Embedder) -> str:
    """Return what is wrong where a deep backbone keeps the BatchNorm statistics of its creation;
    else an empty text."""
    layers = [layer for layer in batch_norms(embedder.backbone) if layer.built]
    if embedder.batch_norm == "train" or len(layers) <= _SHALLOW:
        return ""
    # Statistics that were folded into the layers before leave their shift behind.
    last = [layers[-1].moving_mean, *([layers[-1].beta] if layers[-1].center else [])]
    if any(np.any(ops.convert_to_numpy(values)) for values in last):
        return ""
    return (
        f"batch_norm={embedder.batch_norm!r} keeps the BatchNorm statistics of "
        f"{embedder.backbone.name}, which are of "
        "no images, so that it hardly learns: load pretrained weights, weights='imagenet', or "
        "train it from scratch, "
        "batch_norm='train'"
    )


def first_batch(x: Any) -> tuple:
    """Return the parts of the first batch: arrays, or what describes them; nothing where a look
    would use it up.

    Batches of integers are not made for it: that may take as long as filling a buffer to shuffle.
    """
    if hasattr(x, "element_spec"):
        spec = x.element_spec if isinstance(x.element_spec, tuple | list) else (x.element_spec,)
        dtypes = [getattr(part, "dtype", None) for part in spec[:2]]
        if not hasattr(x, "take") or all(getattr(dtype, "is_integer", True) for dtype in dtypes):
            return tuple(spec)
        batch = next(iter(x.take(1)), tuple(spec))
    elif isinstance(x, keras.utils.PyDataset):
        batch = x[0]
    elif hasattr(x, "shape") or isinstance(x, dict):
        return (x,)
    else:
        return ()
    parts = batch if isinstance(batch, tuple | list) else (batch,)
    return tuple(keras.tree.map_structure(_as_numpy, part) for part in parts)


def _as_numpy(x: Any) -> Any:
    if x is None or hasattr(x, "is_compatible_with"):
        return x
    return ops.convert_to_numpy(x) if ops.is_tensor(x) else np.asarray(x)


def _expected_shape(embedder: Any) -> tuple:
    """Return the shape of the images (H, W, 3) that an embedder takes; None: any size."""
    shape = embedder.view_shape
    if len(shape) == 1:
        return shape
    backbone: Any = getattr(embedder.backbone, "input_shape", None)
    of_maps = isinstance(backbone, tuple) and len(backbone) == 4
    sizes = backbone[1:3] if of_maps else (None, None)
    return (*sizes, shape[-1])


def _check_shape(embedder: Any, shape: tuple) -> None:
    expected = _expected_shape(embedder)
    fits = len(shape) == 1 + len(expected)
    for size, expected_size in zip(shape[1:], expected, strict=False):
        fits = fits and (size == expected_size or size is None or expected_size is None)
    if fits:
        return
    advice = ""
    if len(expected) == 3 and _is_gray(shape):
        advice = ": of gray images np.repeat(x.reshape((*x.shape[:3], 1)), 3, axis=-1) makes such"
    names = ["N"]
    for name, size in zip("HWC", expected, strict=False):
        names.append(name if size is None else str(size))
    raise UserError(f"images must have shape ({', '.join(names)}), not {shape}{advice}")


def _is_gray(shape: tuple) -> bool:
    return len(shape) == 3 or (len(shape) == 4 and shape[-1] == 1)


def check_images(embedder: Any, images: Any, stacklevel: int = 3) -> None:
    """Refuse images of a shape that an embedder does not take, and warn once of pixels of another
    range.

    Args:
        embedder: Anything; what is no `Embedder` takes all images.
        images: (B, ...) an array, or what describes one; None says nothing.
        stacklevel: Of the warning; 2 is the caller.

    Raises:
        UserError: They are a dict, or have another rank, another number of channels or a size that
            the backbone does not take.
    """
    while not isinstance(embedder, Embedder) and hasattr(embedder, "embedder"):
        embedder = embedder.embedder
    if isinstance(embedder, Embedder) and isinstance(images, dict):
        raise UserError(f"the images must be an array, not a dict with {', '.join(images)}")
    shape = getattr(images, "shape", None)
    if not isinstance(embedder, Embedder) or shape is None or getattr(shape, "rank", 1) is None:
        return
    _check_shape(embedder, tuple(shape))
    if hasattr(images, "is_compatible_with"):
        return
    embedder.check_values(images)
    if not embedder.warns_of_small_pixels:
        return
    pixels = _as_numpy(images[:_COUNT])
    least, largest = (float(reduce(pixels, initial=0)) for reduce in (np.min, np.max))
    # Black images say nothing, and filters may overshoot; images of mean 0 go below it, and NaN is
    # between no bounds.
    if not (least == largest == 0 or (10 if least < 0 else 1) < largest <= 512):
        embedder.warns_of_small_pixels = False
        warnings.warn(
            f"the pixels of the first images are {least:g} to {largest:g}: an Embedder takes "
            "pixels of 0 to 255 and "
            "scales them itself; multiply images in 0..1 by 255",
            stacklevel=stacklevel,
        )


class EmbeddingModel(SavedByArguments, workarounds.SharedBatchModel):
    """Base of what turns images into embeddings: `predict`, whose images are checked first."""

    __repr__ = keras.Model.__repr__

    def predict(self, x, **kwargs):
        """Return the embeddings of the images, as NumPy (N, d); see `keras.Model.predict`."""
        check_images(self, next(iter(first_batch(x)), None))
        return super().predict(x, **kwargs)

    def predict_on_batch(self, x):
        """Return the embeddings of one batch of images, as NumPy (B, d)."""
        check_images(self, next(iter(first_batch(x)), None))
        return super().predict_on_batch(x)


class Embedder(SavedAsFile, EmbeddingModel):
    """Images of pixels 0-255 to L2-normalized embeddings.

    The embedder scales pixels itself, so feed it what an image file holds: 0 to 255 of any dtype.
    `fit` and `predict` warn of another range, unless `scaling` is `"none"` or a mapping.

    images (B, H, W, 3) -> scaling -> backbone -> feature map (B, h, w, c) -> pooling -> pooled (B,
    D)
      -> dense -> projection (B, d) -> L2 -> embedding (B, d) float32

    A backbone may also give vectors (B, D): they are the pooled features, and there is no feature
    map.

    `embedder(images)` returns embeddings; `embedder.represent(images)` the dict of `feature_map`,
    `pooled`, `projection` and `embedding`; with `detached=True` of `detached_projection` and
    `detached_embedding` too: the same values, whose gradient reaches the projection layer only.

    Args:
        backbone: A name that `tfdml.backbones.resolve` knows (random weights), a
            `tfdml.backbones.Backbone`, or any `keras.Model` from images to a feature map or to
            vectors (then `scaling` says what pixels it expects).
        embedding_dim: d, by default 512. 0: D, and the dense layer starts as the identity, so that
            an untrained embedder gives the pooled features themselves. With a `head`, d is what the
            head gives.
        image_size: Height and width in pixels of the images that it is fed in training; kept in the
            config for evaluation and export.
        resize: The size in pixels to which images are resized before the center crop of
            `image_size`, in evaluation and export; by default `image_size`.
        resize_mode: `"shorter"`: the shorter side becomes `resize`; `"squash"`: both sides do;
            `"pad"`: the longer side does, and `pad_color` fills up the square.
        scaling: A mode of `tfdml.layers.InputScaling`; by default the backbone's own, `"tf"` for a
            bare model.
        pooling: Over positions: `"avg"`, `"max"`; `"gem"`, a trained power mean; `"attention"`, to
            a trained query (of SigLIP its own pretrained head); or `"cls"`, the class token of a
            transformer. See `tfdml.layers`.
        batch_norm: `"frozen"`: the backbone's BatchNorm layers are constants; `"statistics"`: they
            use their moving statistics, but gamma and beta train (as in the JRD authors' code);
            `"train"`: ordinary training. Other layers, such as dropout, train in each, unless the
            whole backbone is frozen. In the first two a convolution applies the BatchNorm behind
            it, and returns the normalized map.
        dropout: The share of the pooled features that is left out before the dense layer, in
            training.
        pad_color: Red, green and blue, 0-255, of what `resize_mode="pad"` fills up.
        projection_bias: Whether the dense layer has a bias. The code of HORDE's authors has none.
        head: A layer or model from pooled features (B, D) to the projection (B, d), in the place of
            the dense layer. Its weights belong to the part `"projection"`. It is saved with the
            embedder: register classes of your own with `keras.saving.register_keras_serializable`.

    Raises:
        ValueError: An argument is none of the values above, or the backbone or the head gives
            another shape.
        UserError: The backbone's name is unknown.

    Example:
        >>> embedder = Embedder("conv4", embedding_dim=64, image_size=64)
        >>> tuple(embedder(keras.ops.zeros((2, 64, 64, 3))).shape)
        (2, 64)
        >>> head = keras.Sequential([keras.layers.Dense(32, activation="relu"),
        ...     keras.layers.Dense(16)])
        >>> Embedder("conv4", image_size=64, head=head).embedding_dim
        16
    """

    def __init__(
        self,
        backbone,
        embedding_dim=None,
        image_size=224,
        resize=None,
        resize_mode="shorter",
        scaling=None,
        pooling="avg",
        batch_norm="frozen",
        dropout=0.0,
        pad_color=(0, 0, 0),
        projection_bias=True,
        head=None,
        name="embedder",
        **kwargs,
    ):
        # Pixels are scaled in float32 before anything is cast to a narrower compute dtype.
        super().__init__(name=name, **{**kwargs, "autocast": False})
        backbone, scaling = _resolved(backbone, image_size, scaling)
        one_of("pooling", pooling, tuple(POOLINGS))
        one_of("batch_norm", batch_norm, BATCH_NORM_MODES)
        one_of("resize_mode", resize_mode, ("shorter", "squash", "pad"))
        dropout = number("dropout", dropout, at_least=0, below=1)
        self.backbone = backbone
        self.image_size = int(image_size)
        self.resize = int(resize or image_size)
        self.resize_mode = resize_mode
        self.pad_color = _color(pad_color)
        features = backbone.compute_output_shape((None, *self.view_shape))
        self.gives_maps = _gives_maps(features, pooling)
        self.head = restore(head)
        self.embedding_dim = _dimension(self.head, features[-1], embedding_dim, projection_bias)
        self.pooling = pooling
        self.batch_norm = batch_norm
        self.dropout = dropout
        self.projection_bias = bool(projection_bias)
        self.input_scaling = InputScaling(
            scaling or "tf", name="input_scaling", dtype=self.dtype_policy
        )
        self.scaling = self.input_scaling.mode
        self.pool = self._pooling_layer()
        self.drop = None
        if dropout:
            # Only where it is wanted: a layer with a random state has a place in every checkpoint.
            self.drop = keras.layers.Dropout(dropout, name="dropout", dtype=self.dtype_policy)
        self.dense = self.head
        if self.head is None:
            self.dense = self._dense_layer("identity" if embedding_dim == 0 else "glorot_uniform")
        self.normalize = L2Normalize(name="normalize")
        #: Whether images in 0..1 are still to be warned of: with these modes pixels have the
        #: backbone's own range.
        self.warns_of_small_pixels = self.scaling != "none" and not isinstance(self.scaling, dict)
        self.keep_batch_norm()
        freeze_layers(self)

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Return the embedder of `get_config`, in which the backbone is whole.

        Raises:
            UserError: The backbone is a name, such as `hub:hf://...`: what is loaded opens no other
                place.
        """
        if isinstance(config.get("backbone"), str):
            raise UserError(
                f"the saved model names its backbone, {config['backbone']!r}, and does not hold "
                "it: nothing else is opened for a file; build it with tfdml.models.Embedder and "
                "load its weights, if you trust it"
            )
        return super().from_config(config, custom_objects)

    def compile(self, optimizer="rmsprop", *args, **kwargs):
        """As in Keras; a learned power of the pooling takes no weight decay."""
        super().compile(optimizer, *args, **kwargs)
        with workarounds.scope_of(self):
            build_once(self, (None, *self.view_shape))
        workarounds.exclude_from_decay(self.optimizer, self.trainable_variables)

    def check_values(self, images) -> None:
        """Refuse values that it has no embedding of; by default none."""

    def keep_batch_norm(self) -> None:
        """Bring the backbone's BatchNorm layers into the mode `batch_norm`, which a network's
        `trainable = True` undoes."""
        keep_statistics(self.backbone, self.batch_norm)

    def _pooling_layer(self) -> Any:
        """Return the layer from the feature map to its pooled features; None where the backbone has
        them."""
        if not self.gives_maps:
            return None
        own_pooling = getattr(self.backbone, "own_pooling", "")
        if self.pooling == own_pooling:
            if hasattr(self.backbone, "head"):
                self.backbone.head.trainable = True
            return None
        pool = POOLINGS[self.pooling]
        if pool is None:
            raise ValueError(
                f"pooling='cls': {self.backbone.name} has no class token; use 'avg' or another"
            )
        return pool(name="pool", dtype=self.dtype_policy)

    def _dense_layer(self, initializer: str) -> keras.layers.Dense:
        """Return the layer from pooled features to the embedding, where there is no head."""
        return keras.layers.Dense(
            self.embedding_dim,
            use_bias=self.projection_bias,
            kernel_initializer=initializer,
            name="projection",
            dtype=self.dtype_policy,
        )

    def build(self, input_shape):
        """Create the weights that the backbone does not have yet."""
        shapes = self.representation_shapes(input_shape)
        if self.pool is not None:
            build_once(self.pool, shapes["feature_map"])
        build_once(self.dense, shapes["pooled"])
        if type(self).project is not Embedder.project:
            # Layers that a subclass has added are built where they are used.
            self.project(keras.KerasTensor(shapes["pooled"], dtype=self.compute_dtype))
        workarounds.freeze_new_weights(self)

    def represent(self, images, training=None, detached=False) -> dict:
        """Every representation of the images, by name.

        Args:
            images: (B, H, W, 3) pixels 0-255, of any dtype.
            training: As in Keras. Of a backbone or projection that is frozen, dropout and the like
                are off.
            detached: Whether to add those whose gradient ends at the projection layer.

        Returns:
            `feature_map` (B, h, w, c), `pooled` (B, D), `projection` (B, d), before normalization,
            and `embedding` (B, d) float32 of length 1; if wanted, `detached_projection` and
            `detached_embedding`, the same from pooled features whose gradient is stopped. A
            backbone of vectors has no `feature_map`.
        """
        scaled = self.input_scaling(images)
        of_backbone = mode_of(self.backbone, training)
        if not self.gives_maps:
            pooled = self.backbone(scaled, training=of_backbone)
            return {"pooled": pooled, **self._projected(pooled, training, detached)}
        if self.pool is None:
            feature_map, pooled = self.backbone.with_vector(scaled, training=of_backbone)
        else:
            feature_map = self.backbone(scaled, training=of_backbone)
            pooled = self.pool(feature_map)
        return {
            "feature_map": feature_map,
            "pooled": pooled,
            **self._projected(pooled, training, detached),
        }

    def project(self, pooled) -> dict:
        """`projection` and `embedding` of pooled features (B, D), as `represent` names them."""
        projection = self.dense(pooled, training=mode_of(self.dense, None))
        return {"projection": projection, "embedding": self.normalize(projection)}

    def _projected(self, pooled, training, detached) -> dict:
        if self.drop is not None:
            # Once, so that the detached forms have the same values.
            pooled = self.drop(pooled, training=bool(mode_of(self.dense, training)))
        if not detached:
            return self.project(pooled)
        scope: Any = contextlib.nullcontext()
        if self.head is not None:
            # The second pass begins as the first one does, for the same random numbers, and changes
            # nothing.
            build_once(self.head, (None, pooled.shape[-1]))
            backbone = {id(variable) for variable in self.backbone.variables}
            of_projection = [
                variable for variable in self.variables if id(variable) not in backbone
            ]
            before = [(variable, ops.copy(variable)) for variable in of_projection]
            scope = keras.StatelessScope(before, initialize_variables=False)
        vectors = self.project(pooled)
        with scope:
            again = self.project(ops.stop_gradient(pooled))
        return {
            **vectors,
            **{f"detached_{name}": again[name] for name in ("projection", "embedding")},
        }

    def call(self, images, training=None):
        """(B, H, W, 3) -> (B, d), unit vectors."""
        return self.represent(images, training=training)["embedding"]

    @property
    def representations(self) -> tuple[str, ...]:
        """The names that `represent` gives, the detached ones among them."""
        return tuple(self.representation_shapes((None, *self.view_shape)))

    @property
    def view_shape(self) -> tuple[int, ...]:
        """(S, S, 3), the shape of an image that it is fed; (D,) of a `Head`."""
        return (self.image_size, self.image_size, 3)

    def compute_output_shape(self, input_shape):
        """(B, d)."""
        return (input_shape[0], self.embedding_dim)

    def representation_shapes(self, input_shape) -> dict:
        """Return the shape of each representation of images of this shape."""
        batch = input_shape[0]
        features = tuple(self.backbone.compute_output_shape((batch, *input_shape[1:])))
        names = ("projection", "embedding", "detached_projection", "detached_embedding")
        vectors = dict.fromkeys(names, (batch, self.embedding_dim))
        maps = {"feature_map": features} if self.gives_maps else {}
        return {**maps, "pooled": (batch, features[-1]), **vectors}

    def parts(self) -> dict[str, list]:
        """Return the trainable variables by part: the `backbone`'s, and all others as the
        `projection`'s."""
        backbone = self.backbone.trainable_variables
        of_backbone = {id(variable) for variable in backbone}
        projection = [
            variable for variable in self.trainable_variables if id(variable) not in of_backbone
        ]
        return {"backbone": backbone, "projection": projection}

    def freeze_backbone(self) -> None:
        """Keep the backbone as it is; the dense layer trains."""
        self.backbone.trainable = False

    def whiten(self, pooled: np.ndarray, power: float = 1.0, shrinkage: float = 0.0) -> None:
        """Start the projection as the PCA whitening of pooled features, before the first step.

        Its output is z = C (x - mean), as that of `tfdml.layers.PrincipalComponents`: of what the
        backbone knows already it keeps the directions in which the training images differ, where
        random weights keep any.

        Args:
            pooled: (N, D), what `represent` calls `pooled`, of N > d training images.
            power: 1: all components vary alike; 0: as if not whitened.
            shrinkage: 0 .. 1: how far the variances are drawn to their mean.

        Raises:
            ValueError: The projection is not a dense layer with a bias; N or D is too small, a
                number is not finite, or an argument is out of range.

        Example:
            >>> pooled = np.random.default_rng(0).normal(size=(100, 64)).astype("float32")
            >>> head = Head(64, embedding_dim=8)
            >>> head.whiten(pooled)
            >>> projected = np.asarray(head.represent(pooled)["projection"])
            >>> bool(np.allclose(np.cov(projected.T), np.eye(8), atol=1e-3))
            True
        """
        if not isinstance(self.dense, keras.layers.Dense) or not self.dense.use_bias:
            raise ValueError("whitening needs a projection with a bias, of one dense layer")
        build_once(self, (None, *self.view_shape))
        whitening = PrincipalComponents(self.embedding_dim, True, power, shrinkage)
        whitening.adapt(pooled)
        mean, components = map(ops.convert_to_numpy, whitening.weights)
        self.dense.kernel.assign(components)
        self.dense.bias.assign(-mean @ components)


class Head(Embedder):
    """Stored vectors (B, D) to L2-normalized embeddings (B, d): an embedder whose backbone has run
    before.

    It trains, is measured, saved and exported as an embedder is, on vectors in the place of images.
    `represent` returns the vectors as `pooled`; there is no `feature_map`. `stack` puts it behind
    the embedder that the vectors come from.

    Args:
        dimension: D.
        embedding_dim: As of `Embedder`.
        dropout: Likewise.
        projection_bias: Likewise.
        head: Likewise.

    Raises:
        ValueError: An argument does not fit, or it is called with anything else than (B, D).

    Example:
        >>> tuple(Head(768, embedding_dim=64)(np.ones((2, 768), "float32")).shape)
        (2, 64)
    """

    fixed = (
        "backbone",
        "image_size",
        "resize",
        "resize_mode",
        "scaling",
        "pooling",
        "batch_norm",
        "pad_color",
    )

    def __init__(
        self,
        dimension,
        embedding_dim=None,
        dropout=0.0,
        projection_bias=True,
        head=None,
        name="head",
        **kwargs,
    ):
        vectors = keras.Input((integer("dimension", dimension, at_least=1),), name="vectors")
        backbone = keras.Model(vectors, keras.layers.Identity()(vectors), name="vectors")
        options = {"dropout": dropout, "projection_bias": projection_bias, "head": head}
        super().__init__(backbone, embedding_dim, 1, scaling="none", name=name, **options, **kwargs)
        self.dimension = int(dimension)

    @property
    def view_shape(self) -> tuple[int, ...]:
        """(D,)."""
        return tuple(self.backbone.input_shape[1:])

    def represent(self, images, training=None, detached=False):
        """See `Embedder.represent`, of vectors (B, D)."""
        if tuple(images.shape[1:]) != self.view_shape:
            raise ValueError(
                f"this head takes (B, {self.view_shape[0]}), not {images.shape}: see "
                "tfdml.models.stack"
            )
        return super().represent(images, training, detached)

    def align(self, vectors: np.ndarray, targets: np.ndarray) -> None:
        """Set the projection to the rotation that turns vectors nearest to others of the same
        images, such as those of an older model.

        It is the orthogonal W that makes the sum of |x W - t|^2 least: nothing is trained, and
        where both have as many dimensions the distances between the vectors stay.

        Args:
            vectors: (N, D).
            targets: (N, d) of the same images in the same order.

        Raises:
            ValueError: The projection is not a dense layer, an array has another shape, or a number
                is not finite.

        Example:
            >>> old = np.random.default_rng(0).normal(size=(100, 8))
            >>> old /= np.linalg.norm(old, axis=1, keepdims=True)
            >>> new = old[:, ::-1]
            >>> head = Head(8, embedding_dim=8)
            >>> head.align(new, old)
            >>> bool(np.allclose(head(new), old, atol=1e-5))
            True

        Source: Schoenemann, "A generalized solution of the orthogonal Procrustes problem",
        Psychometrika, 1966.
        """
        if not isinstance(self.dense, keras.layers.Dense):
            raise ValueError("a rotation needs a projection of one dense layer")
        sizes = (len(vectors), self.dimension), (len(vectors), self.embedding_dim)
        shapes = np.shape(vectors), np.shape(targets)
        if shapes != sizes:
            raise ValueError(f"vectors and targets must be {sizes[0]} and {sizes[1]}, not {shapes}")
        products = np.asarray(vectors, np.float64).T @ np.asarray(targets, np.float64)
        if not np.isfinite(products).all():
            raise ValueError("the vectors or the targets are not all finite")
        build_once(self, (None, self.dimension))
        left, _, right = np.linalg.svd(products, full_matrices=False)
        self.dense.kernel.assign(left @ right)
        if self.dense.use_bias:
            self.dense.bias.assign(np.zeros(self.embedding_dim))
