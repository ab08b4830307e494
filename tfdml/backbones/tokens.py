"""Vision transformers of KerasHub as backbones: their patch tokens as a feature map."""

import importlib
import json
import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops
from typing_extensions import override

from tfdml.arguments import integer
from tfdml.errors import REASON, UserError, user_errors
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
    with user_errors(ImportError, f"a `hub:` backbone needs KerasHub ({REASON}): pip install 'tfdml[hub]'"):
        return importlib.import_module("keras_hub")


def families() -> tuple[str, ...]:
    """Return the classes of KerasHub that `TokenBackbone` takes."""
    return tuple(sorted(_LEADING))


class PatchMap(SavedByArguments, keras.layers.Layer):
    """Tokens to the map of the patches, which lie in a square, row by row: (B, k + h h, c) -> (B, h, h, c).

    Args:
        side: h. Given, since the number of tokens is not always known beforehand (DINOv3), nor always stated right
            (SigLIP).
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

    The tokens of the patches, after the network's last normalisation, row by row as they lie in the image; class,
    distillation and register tokens are kept apart. What the network itself makes of a whole image is its class token,
    or in SigLIP the output of its attention head: `own_pooling` says which (`"cls"`, `"attention"` or `""` for none),
    and `with_vector` gives it next to the map.

    It is a functional model of the network's own layers, so that `tfdml.backbones.cut` works on it; everything passes
    through the layer `patch_map`.

    Args:
        network: A backbone of KerasHub, one of `families()`, or its serialised form.

    Raises:
        UserError: KerasHub is missing, or the network is of another family.

    Example:
        >>> import keras_hub
        >>> network = keras_hub.models.ViTBackbone((32, 32, 3), 8, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=32)
        >>> backbone = TokenBackbone(network)
        >>> backbone.output_shape, backbone.own_pooling
        ((None, 4, 4, 16), 'cls')
    """

    def __init__(self, network, name="tokens", **kwargs):
        require_keras_hub()
        network = restore(network)
        family = type(network).__name__
        if family not in _LEADING:
            raise UserError(f"a `hub:` backbone must be one of {', '.join(families())}, not {family}")
        leading = _LEADING[family](network)
        head = getattr(network, "head", None) if family == "SigLIPVisionEncoder" else None
        tokens = network.output if head is None else network.post_layer_norm.output
        # KerasHub states a token too many for SigLIP, which has no class token; the root does not see it.
        side = math.isqrt(tokens.shape[1] - leading)
        # Its own policy, not that of the process that loads it.
        policy = network.dtype_policy
        patches = PatchMap(side, leading, dtype=policy, name=PATCH_MAP)(tokens)
        feature_map = keras.layers.Identity(dtype=policy, name="feature_map")(patches)
        super().__init__(network.inputs[0], feature_map, name=name, **kwargs)
        self.own_pooling = "cls" if leading else "attention" if head is not None else ""
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
        """Keep positions that were trained: KerasHub restores DINOv2's from a table that it may not have updated."""
        tables = {variable.name: variable for variable in self.variables if "position_embeddings" in variable.name}
        if "interpolated_position_embeddings" in tables:
            tables["position_embeddings"].assign(tables["interpolated_position_embeddings"])
        super().save_own_variables(store)

    @override
    def get_config(self):
        return {"name": self.name, "trainable": self.trainable, "network": json.loads(self._network)}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Return the backbone, from the configuration of its network."""
        return cls(**config)
