"""The network."""

from __future__ import annotations

import dataclasses

from tfdml.backbones.hub import PREFIX
from tfdml.errors import UserError
from tfdml.models.embedder import BATCH_NORM_MODES, POOLINGS
from tfdml.training.expressions import Call, parse_call
from tfdml.training.settings.fields import Settings, choice, fraction, not_negative

_POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


@dataclasses.dataclass(frozen=True)
class ModelSettings(Settings):
    """The embedder: its backbone and weights, and what stands behind them.

    Raises:
        UserError: A value is out of range, or two do not go together.

    Example:
        >>> ModelSettings(backbone="conv4(width=32)", batch_norm="train", embedding_dim=64).backbone_call()
        Call(name='conv4', arguments={'width': 32})
    """

    backbone: str = choice(
        "mobilenetv2",
        "Backbone, with its options: e.g. 'mobilenetv2(alpha=0.35)'; or a preset of KerasHub with its weights, by name "
        "or folder: hub:dinov2_small.",
    )
    weights: str = choice("none", "Backbone weights: none, imagenet, or the path of a .weights.h5 file.")
    embedding_dim: int = choice(
        128,
        "Size of the embedding; 0: that of the pooled features, which the untrained embedding then is.",
        check=not_negative,
    )
    projection_bias: bool = choice(True, "Give the projection to the embedding a bias.")
    pooling: str = choice(
        "avg",
        "Pooling over the positions of the feature map: avg; max; gem, a trained power mean; attention, to a trained "
        "query; or cls, a transformer's class token.",
        choices=tuple(POOLINGS),
    )
    dropout: float = choice(
        0.0, "Share of the pooled features that is left out before the projection, in training.", check=fraction
    )
    batch_norm: str = choice(
        "frozen",
        "BatchNorm of the backbone: frozen; statistics (frozen statistics, trained gamma and beta); train.",
        choices=BATCH_NORM_MODES,
    )
    ensemble_heads: int = choice(
        0, "Heads of an attention ensemble (ABE), which share --embedding_dim; 0: no ensemble.", check=not_negative
    )
    ensemble_cut: str = choice(
        "", "Layers of the backbone that begin and end the attention network, as 'a,b'; empty: the backbone's usual."
    )
    lora_rank: int = choice(
        0,
        "Freeze the backbone but for changes of this rank to its attention layers (LoRA); 0: all of it trains.",
        check=not_negative,
    )
    mixed_precision: str = choice("float32", "Dtype policy of the network.", choices=_POLICIES)
    jit_compile: str = choice(
        "auto",
        "Compile the training step by XLA: true, false, or auto, where it is quicker: on one GPU.",
        choices=("auto", "true", "false"),
    )
    start_from: str = choice(
        "",
        "Start from the weights of an old run, matched by part: a run folder (its newest checkpoint), a checkpoint, or "
        "a .keras file.",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.ensemble_heads and (not self.embedding_dim or self.embedding_dim % self.ensemble_heads):
            raise UserError(
                f"--embedding_dim={self.embedding_dim} is no multiple of --ensemble_heads={self.ensemble_heads}"
            )
        if self.ensemble_cut and not self.ensemble_heads:
            raise UserError("--ensemble_cut needs --ensemble_heads, e.g. --ensemble_heads=8")
        self.backbone_call()

    def backbone_call(self) -> Call:
        """The backbone's name and options."""
        if self.backbone.startswith(PREFIX):
            return Call(self.backbone, {})  # a folder may have any name
        return parse_call(self.backbone, "--backbone")
