"""Presets of KerasHub as backbones: DINOv2, DINOv3, ViT, DeiT, Swin, CLIP, SigLIP, and
convolutional networks.

Of vision transformers the patch tokens are a feature map.
"""

import importlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
from keras import ops
from typing_extensions import override

from tfdml.arguments import integer
from tfdml.errors import ERROR_TEXT, UserError, user_errors
from tfdml.saving import SavedByArguments, restore

# How many tokens come before those of the patches: class, distillation and register tokens.
_LEADING: dict[str, Callable[[Any], int]] = {
    "DINOV2Backbone": lambda network: 1 + network.num_register_tokens,
    "DINOV3Backbone": lambda network: 1 + network.num_register_tokens,
    "ViTBackbone": lambda network: int(network.use_class_token),
    "DeiTBackbone": lambda network: 2,
    "CLIPVisionEncoder": lambda network: 1,
    "SigLIPVisionEncoder": lambda network: 0,
    "SwinTransformerBackbone": lambda network: 0,
}
# The layer after which nothing but the patches' map is left, for an attention ensemble.
PATCH_MAP = "patch_map"


def require_keras_hub() -> Any:
    """KerasHub, imported.

    Raises:
        UserError: It is not installed.
    """
    with user_errors(
        ImportError, f"a `hub:` backbone needs KerasHub ({ERROR_TEXT}): pip install 'tfdml[hub]'"
    ):
        return importlib.import_module("keras_hub")


class PatchMap(SavedByArguments, keras.layers.Layer):
    """Tokens to the map of the patches, which lie in a square, row by row: (B, k + h h, c) -> (B,
    h, h, c).

    Args:
        side: h. Given, since the number of tokens is not always known beforehand (DINOv3), nor
            always stated right (SigLIP).
        leading: k, how many tokens come before those of the patches.

    Example:
        >>> PatchMap(side=4, leading=1).compute_output_shape((None, 17, 8))
        (None, 4, 4, 8)
    """

    def __init__(self, side, leading=0, **kwargs):
        super().__init__(**kwargs)
        self.side = integer("side", side, at_least=1)
        self.leading = integer("leading", leading, at_least=0)

    def call(self, tokens):
        """(B, k + h h, c) -> (B, h, h, c)."""
        return ops.reshape(tokens[:, self.leading :], (-1, self.side, self.side, tokens.shape[-1]))

    def compute_output_spec(self, tokens):
        """By the shape below: `call` on tokens whose number is stated wrong would fail."""
        return keras.KerasTensor(self.compute_output_shape(tokens.shape), dtype=self.compute_dtype)

    def compute_output_shape(self, input_shape):
        """(B, h, h, c)."""
        return (input_shape[0], self.side, self.side, input_shape[2])


@keras.saving.register_keras_serializable("tfdml")
class TokenBackbone(keras.Model):
    """A vision transformer from images to the map of its patches: (B, H, W, 3) -> (B, h, w, c).

    The tokens of the patches, after the network's last normalization, row by row as they lie in the
    image; class, distillation and register tokens are kept apart. What the network itself makes of
    a whole image is its class token, or in SigLIP the output of its attention head: `own_pooling`
    says which (`"cls"`, `"attention"` or `""` for none), and `with_vector` gives it next to the
    map.

    It is a functional model of the network's own layers, so that `tfdml.backbones.cut` works on it;
    everything passes through the layer `patch_map`.

    Args:
        network: A backbone of KerasHub, such as `ViTBackbone`, or its serialized form.

    Raises:
        UserError: KerasHub is missing, or the network is of another family.

    Example:
        >>> import keras_hub
        >>> network = keras_hub.models.ViTBackbone((32, 32, 3), 8, num_layers=1, num_heads=2,
        ...     hidden_dim=16, mlp_dim=32)
        >>> backbone = TokenBackbone(network)
        >>> backbone.output_shape, backbone.own_pooling
        ((None, 4, 4, 16), 'cls')
    """

    def __init__(self, network, name="tokens", **kwargs):
        require_keras_hub()
        network = restore(network)
        family = type(network).__name__
        if family not in _LEADING:
            raise UserError(
                f"a `hub:` backbone must be one of {', '.join(sorted(_LEADING))}, not {family}"
            )
        leading = _LEADING[family](network)
        head = getattr(network, "head", None) if family == "SigLIPVisionEncoder" else None
        tokens = network.output if head is None else network.post_layer_norm.output
        # KerasHub states a token too many for SigLIP, which has no class token; the root does not
        # see it.
        side = math.isqrt(tokens.shape[1] - leading)
        # Its own policy, not that of the process that loads it.
        policy = network.dtype_policy
        patches = PatchMap(side, leading, dtype=policy, name=PATCH_MAP)(tokens)
        feature_map = keras.layers.Identity(dtype=policy, name="feature_map")(patches)
        super().__init__(network.inputs[0], feature_map, name=name, **kwargs)
        self.own_pooling = "cls" if leading else ""
        if head is not None and not leading:
            self.own_pooling = "attention"
        self._network = json.dumps(keras.saving.serialize_keras_object(network))
        self.with_both: Any = None
        if self.own_pooling:
            vector = tokens[:, 0] if head is None else head(tokens)
            # A method, so that Keras does not take these shared layers for layers of their own.
            self.with_both = keras.Model(network.inputs[0], [feature_map, vector]).__call__
        if head is not None:
            self.head = head
            head.trainable = False  # until `with_vector` is wanted
        for variable in self.variables:
            if variable.name == "mask_token":
                variable.trainable = False  # of the network's own pretraining

    def with_vector(self, images, training=None):
        """Return the map (B, h, w, c), and the vector (B, c) that the network makes of each image.

        Raises:
            ValueError: It makes none.
        """
        if self.with_both is None:
            raise ValueError(f"{self.name} has no class token and no head of its own")
        return self.with_both(images, training=training)

    def save_own_variables(self, store):
        """Keep positions that were trained: KerasHub restores DINOv2's from a table that it may not
        have updated."""
        tables = {
            variable.name: variable
            for variable in self.variables
            if "position_embeddings" in variable.name
        }
        if "interpolated_position_embeddings" in tables:
            tables["position_embeddings"].assign(tables["interpolated_position_embeddings"])
        super().save_own_variables(store)

    @override
    def get_config(self):
        return {
            "name": self.name,
            "trainable": self.trainable,
            "network": json.loads(self._network),
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Return the backbone, from the configuration of its network."""
        return cls(**config)


_CONFIG, _CONVERTER = "config.json", "image_converter.json"
# Networks of images and text, of which the part that sees images is taken.
_TWO_TOWERS = ("CLIPBackbone", "SigLIPBackbone")
_FAMILIES_OF_BOTH = ("CLIP", "SigLIP", "MetaCLIP2")
_POSITIONS = ("position_embedding", "position_embeddings", "interpolated_position_embeddings")


def check_preset(name: str) -> None:
    """Refuse a preset that `load_preset` would not know; nothing is fetched.

    Args:
        name: As in `load_preset`.

    Raises:
        UserError: KerasHub is missing, or there is no such preset or folder.
    """
    hub = require_keras_hub()
    if "://" in name or name in hub.models.Backbone.presets:
        return
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"backbone 'hub:{name}': KerasHub has no such preset, and there is no such folder"
        )
    for file in (_CONFIG, _CONVERTER):
        if not (folder / file).is_file():
            raise UserError(
                f"backbone 'hub:{name}': the folder has no {file}; KerasHub's save_to_preset "
                "writes it"
            )


def load_preset(
    name: str, image_size: int
) -> tuple[keras.Model, dict[str, list[float]], tuple[str, ...] | None]:
    """Return a preset's network for images of a size, with its weights.

    At another size than the preset's own, learned positions are interpolated (see `resized`);
    DINOv3 has rotary positions, and Swin relative ones, which need none.

    Args:
        name: A preset of KerasHub, such as `dinov2_small`; a handle, `kaggle://...` or `hf://...`;
            or a folder that `save_to_preset` wrote.
        image_size: S, height and width of the images in pixels.

    Returns:
        The network, (B, S, S, 3) -> (B, h, w, c); the `scale` and `offset` that turn pixels 0-255
        into what it expects; and where an attention ensemble can cut it.

    Raises:
        UserError: It cannot be fetched or read, is of no family that is known here, or cannot take
            the size.
    """
    check_preset(name)
    hub = require_keras_hub()
    folder = os.path.expanduser(name)
    path = folder if os.path.isdir(folder) else name
    how = (
        "is the folder whole?"
        if os.path.isdir(path)
        else "offline? where there is a network write it with `save_to_preset` (of the backbone "
        "and of its image converter), and pass 'hub:FOLDER'"
    )
    # Each of the places from which it fetches has errors of its own.
    with user_errors(Exception, f"backbone 'hub:{name}' cannot be loaded: {ERROR_TEXT}; {how}"):
        network = hub.models.Backbone.from_preset(path)
        scaling = _scaling(hub, path)
    if type(network).__name__ in _TWO_TOWERS:
        network = network.vision_encoder
    with user_errors(
        Exception, f"cannot build backbone 'hub:{name}' at {image_size} px: {ERROR_TEXT}"
    ):
        network = resized(network, image_size)
    if type(network).__name__ in _LEADING:
        return TokenBackbone(network), scaling, (PATCH_MAP,)
    if (
        len(network.inputs) != 1
        or not hasattr(network.output, "shape")
        or len(network.output.shape) != 4
    ):
        families = ", ".join(sorted(_LEADING))
        raise UserError(
            f"backbone 'hub:{name}' is a {type(network).__name__}; known are {families}"
        )
    return network, scaling, None


class HubTokenizer(SavedByArguments, keras.layers.Layer):
    """Strings to the `token_ids` and the `padding_mask` of a preprocessor of KerasHub, a dict of
    (B, T).

    Args:
        preprocessor: Of a text backbone, such as `BertTextClassifierPreprocessor`, or of images and
            texts, such as `CLIPPreprocessor`.
    """

    def __init__(self, preprocessor, **kwargs):
        require_keras_hub()
        super().__init__(**kwargs)
        self.preprocessor = restore(preprocessor)

    def __call__(self, texts):
        """(B,) strings -> a dict of (B, T)."""
        of_both = type(self.preprocessor).__name__.startswith(_FAMILIES_OF_BOTH)
        output = self.preprocessor({"images": None, "prompts": texts} if of_both else texts)
        return {name: output[name] for name in ("token_ids", "padding_mask")}


def load_text_preset(name: str, length: int = 0) -> tuple[keras.Model, HubTokenizer]:
    """Return the network of texts of a preset with its weights, and its tokenizer.

    Of CLIP, SigLIP and MetaCLIP 2 it is the text half, from token ids to vectors in the space of
    the images.

    Args:
        name: As in `load_preset`.
        length: How many tokens a text has, those of its start and end included; 0: as many as the
            preset says.

    Raises:
        UserError: It cannot be fetched or read, or has no texts.
    """
    hub = require_keras_hub()
    folder = os.path.expanduser(name)
    path = folder if os.path.isdir(folder) else name
    with user_errors(Exception, f"text backbone 'hub:{name}' cannot be loaded: {ERROR_TEXT}"):
        network = hub.models.Backbone.from_preset(path)
        family = type(network).__name__.removesuffix("Backbone")
        kinds = ("Preprocessor", "CausalLMPreprocessor", "TextClassifierPreprocessor")
        preprocessor = next(
            getattr(hub.models, family + kind)
            for kind in kinds
            if hasattr(hub.models, family + kind)
        )
        options = {"sequence_length": length} if length else {}
        return text_network(network), HubTokenizer(preprocessor.from_preset(path, **options))


def text_network(network: keras.Model) -> keras.Model:
    """Return the text half of a network of images and texts of KerasHub, (B, T) -> (B, D); any
    other as it is."""
    if not hasattr(network, "get_text_embeddings"):
        return network
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    return keras.Model(tokens, network.get_text_embeddings(tokens), name="text_half")


def _scaling(hub: Any, path: str) -> dict[str, list[float]]:
    """Return what the preset's image converter does to pixels, besides resizing them."""
    if os.path.isdir(path):
        with open(Path(path) / _CONVERTER, encoding="utf-8") as file:
            converter = keras.saving.deserialize_keras_object(json.load(file))
    else:
        converter = hub.layers.ImageConverter.from_preset(path)

    scale = 1.0 if converter.scale is None else converter.scale
    offset = 0.0 if converter.offset is None else converter.offset
    return {"scale": _per_channel(scale), "offset": _per_channel(offset)}


def _per_channel(value: Any) -> list[float]:
    if isinstance(value, (list, tuple)):
        return [float(part) for part in value]
    return [float(value)] * 3


def resized(network: keras.Model, image_size: int) -> keras.Model:
    """Return a network of KerasHub for images of another size, and of today's dtype policy, with
    the same weights.

    A table of learned positions is interpolated over the patches by cubic convolution, those of
    class and other tokens stay; at the network's own size every weight keeps its value.

    Args:
        network: A built backbone of KerasHub.
        image_size: Height and width in pixels.

    Raises:
        UserError: The size is no multiple of the patches', or a weight depends on it and is no
            table of positions.

    Example:
        >>> import keras_hub
        >>> network = keras_hub.models.ViTBackbone((32, 32, 3), 8, num_layers=1, num_heads=2,
        ...     hidden_dim=16, mlp_dim=32)
        >>> resized(network, 48).output_shape  # 36 patches, and the class token
        (None, 37, 16)

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021, sec. 3.2; bicubic as in
    DINOv2's code.
    """
    config = network.get_config()
    patch = _patch(config)
    if image_size % patch:
        near = max(1, round(image_size / patch)) * patch
        raise UserError(
            f"no multiple of the network's patches of {patch} px; try {near}", image_size=image_size
        )
    shape = [image_size, image_size, 3]
    for name in ("image_shape", "position_embedding_shape"):
        if config.get(name) is not None and config[name][0] is not None:
            config[name] = shape
    config["dtype"] = keras.dtype_policies.serialize(keras.config.dtype_policy())
    made = type(network).from_config(config)
    by_name = {variable.name: variable for variable in network.variables}
    for old, new in zip(network.variables, made.variables, strict=True):
        if new.name == "interpolated_position_embeddings":
            old = by_name[
                "position_embeddings"
            ]  # DINOv2 keeps the table that was trained next to the one in use
        if tuple(old.shape) == tuple(new.shape):
            new.assign(old)
        elif any(part in _POSITIONS for part in new.path.split("/")):
            patches = (image_size // patch) ** 2
            antialias = bool(config.get("antialias_in_interpolation", False))
            new.assign(interpolate_positions(old, new.shape, patches, antialias))
        elif new.name == "position_ids":
            new.assign(
                ops.reshape(ops.arange(new.shape[-1]), new.shape)
            )  # CLIP's are zero but in its presets
        else:
            raise UserError(
                f"{new.path} is {tuple(new.shape)}, as it is {tuple(old.shape)}",
                image_size=image_size,
            )
    return made


def _patch(config: dict[str, Any]) -> int:
    patch = config.get("patch_size") or 1
    return int(patch if isinstance(patch, int) else patch[0])


def interpolate_positions(table, shape, patches: int, antialias: bool = False):
    """Return a table of positions for another number of patches, by cubic convolution over their
    square.

    Args:
        table: (..., k + n, c), with k rows of tokens that are no patches before those of the
            patches, row by row.
        shape: (..., k + `patches`, c).
        patches: How many there are to be.
        antialias: Whether it is smoothed where it gets smaller.

    Returns:
        A tensor of that shape.
    """
    leading, width = shape[-2] - patches, shape[-1]
    rows = ops.reshape(ops.convert_to_tensor(table), (-1, width))
    old, new = math.isqrt(rows.shape[0] - leading), math.isqrt(patches)
    grid = ops.reshape(rows[leading:], (1, old, old, width))
    grid = ops.image.resize(
        grid, (new, new), interpolation="bicubic", antialias=antialias, data_format="channels_last"
    )
    return ops.reshape(
        ops.concatenate([rows[:leading], ops.reshape(grid, (-1, width))], axis=0), shape
    )
