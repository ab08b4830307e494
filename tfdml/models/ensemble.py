"""Attention-based ensemble: several learners on one backbone, each looking at its own part of the
image."""

import math

import keras
from keras import ops

from tfdml import backbones, workarounds
from tfdml.arguments import integer
from tfdml.layers import AttentionHeads
from tfdml.models.embedder import Embedder, build_once, freeze_layers, mode_of
from tfdml.models.normalization import keep_statistics


class AttentionEnsemble(Embedder):
    """An embedder of M heads that see the image through different attention masks (ABE-M).

    images -> scaling -> trunk -> x -> attention network -> masks, one per head
      x * mask_m -> rest of the backbone -> feature map m -> pooling -> dense
                 -> projection m (d/M) -> L2 -> head m
      all heads, concatenated, divided by sqrt(M) -> embedding (B, d) float32 of length 1

    The backbone is cut at two layers: up to the first lies the trunk; the attention network starts
    as a copy of what is between the two, weights included, and ends in one 1 x 1 convolution with a
    sigmoid per head; the rest of the backbone, from the first cut on, and the dense layer are
    shared by the heads.

    The paper's embedding is sqrt(M) times as long. Here it has length 1, as every embedder's, and
    so a squared distance or a cosine between embeddings is the mean of those between the heads:
    margins mean what they mean for one head.

    Cost: trunk and attention network run once per image, the rest M times (as one batch of M B
    maps), and as many maps are kept for the gradient. For GoogLeNet with 8 heads at 224 px that is
    4.7 times the multiplications of GoogLeNet alone, and twice its parameters. BatchNorm layers of
    the rest, if they train, take their statistics over the maps of all heads.

    Args:
        backbone: As for `Embedder`, with a functional model.
        cut: The layers between which the attention network lies, e.g.
            `("pool3_3x3_s2", "inception_4e")`; maps must be of one size at both. One name alone: no
            network, the masks come from the trunk's map itself. By default what the backbone's
            entry in `tfdml.backbones` says.
        heads: M.
        embedding_dim: d, a multiple of M.
        **options: Those of `Embedder`.

    Raises:
        ValueError: An argument does not fit, the backbone cannot be cut there, or the map's size
            changes in between.

    Example:
        >>> backbone = tfdml.backbones.resolve("googlenet", image_size=224)
        >>> ensemble = AttentionEnsemble(backbone, cut=("pool3_3x3_s2", "inception_4e"), heads=8,
        ...     embedding_dim=512)
        >>> loss = tfdml.objectives.HeadwiseLoss(tfdml.losses.ContrastiveLoss())
        >>> divergence = tfdml.objectives.HeadDivergence()
        >>> learner = tfdml.models.MetricLearner(ensemble, [loss, divergence])

    Source: Kim et al., "Attention-based Ensemble for Deep Metric Learning", ECCV 2018, sec. 3.
    """

    def __init__(
        self, backbone, cut=None, heads=8, embedding_dim=512, name="attention_ensemble", **options
    ):
        if integer("embedding_dim", embedding_dim, at_least=1) % integer(
            "heads", heads, at_least=1
        ):
            raise ValueError(f"embedding_dim must be a multiple of heads: {embedding_dim}, {heads}")
        if isinstance(backbone, str):
            backbone = backbones.resolve(backbone, options.get("image_size", 224))
        if cut is None and isinstance(backbone, backbones.Backbone):
            cut = backbone.ensemble_cut
        if options.get("head") is not None:
            raise ValueError(
                "head: the heads of an ensemble share one dense layer; give an Embedder a head"
            )
        if not cut:
            raise ValueError(
                "cut: name the layer that ends the trunk, and the one that ends the attention "
                "network"
            )
        # One dense layer for every head; the heads' vectors make up the embedding.
        super().__init__(backbone, embedding_dim=embedding_dim // heads, name=name, **options)
        if self.pool is None:
            raise ValueError(
                f"pooling={self.pooling!r}: the heads of an ensemble pool maps; use 'avg', 'max' "
                "or 'gem'"
            )
        self.embedding_dim = int(embedding_dim)
        self.heads = int(heads)
        self.cut = (cut,) if isinstance(cut, str) else tuple(cut)
        if len(self.cut) > 2:
            raise ValueError(f"cut: one or two layers, not {', '.join(self.cut)}")
        self.trunk, self.rest = backbones.cut(self.backbone, self.cut[0])
        self.attention = self._attention_network()
        self.attention_heads = AttentionHeads(
            heads, name="attention_heads", dtype=self.dtype_policy
        )
        features = self.trunk.compute_output_shape((None, *self.view_shape))
        context = (
            features if self.attention is None else self.attention.compute_output_shape(features)
        )
        if tuple(context[1:3]) != tuple(features[1:3]):
            raise ValueError(
                f"cut: the map is smaller at {self.cut[1]} than at {self.cut[0]}: end the network "
                "before"
            )
        self.keep_batch_norm()
        freeze_layers(self)

    def keep_batch_norm(self) -> None:
        """Bring the BatchNorm layers, the attention network's too, into the mode `batch_norm`."""
        # The attention network begins where the trunk ends, which may be within a block.
        keep_statistics(self.backbone, self.batch_norm, getattr(self, "cut", ()))
        if getattr(self, "attention", None) is not None:
            keep_statistics(self.attention, self.batch_norm)

    def _attention_network(self) -> keras.Model | None:
        if len(self.cut) == 1 or self.cut[1] == self.cut[0]:
            return None
        between, _ = backbones.cut(self.rest, self.cut[1])

        def copied(layer):
            config = layer.get_config()
            return type(layer).from_config({**config, "name": f"attention_{config['name']}"})

        copy = keras.models.clone_model(between, clone_function=copied)
        copy.set_weights(between.get_weights())
        return copy

    def build(self, input_shape):
        """Create the weights that the backbone does not have yet."""
        features = self.trunk.compute_output_shape((None, *input_shape[1:]))
        context = (
            features if self.attention is None else self.attention.compute_output_shape(features)
        )
        build_once(self.attention_heads, (features, context))
        maps = self.rest.compute_output_shape(features)
        build_once(self.pool, maps)
        build_once(self.dense, (None, maps[-1]))
        workarounds.freeze_new_weights(self)

    def represent(self, images, training=None, detached=False) -> dict:
        """Every representation of the images, by name.

        Args:
            images: (B, H, W, 3) pixels 0-255, of any dtype.
            training: As in Keras.
            detached: As in `Embedder`.

        Returns:
            `feature_map` (B, h, w, M c), the heads' maps side by side; `pooled` (B, M c) and
            `projection` (B, d), the heads' vectors one after another; `heads` (B, M, d/M) float32
            of length 1 each; `embedding` (B, d) float32 of length 1; if wanted,
            `detached_projection` and `detached_embedding`, as in `Embedder`.
        """
        features, context = self._features_and_context(images, training)
        views = self.attention_heads([features, context])
        # The heads of an image lie one after another in a batch of M B maps.
        maps = self.rest(
            ops.reshape(views, (-1, *ops.shape(views)[2:])),
            training=mode_of(self.backbone, training),
        )
        pooled = ops.reshape(self.pool(maps), (-1, self.heads * maps.shape[-1]))
        projected = self._projected(pooled, training, detached)
        return {"feature_map": self._side_by_side(maps), "pooled": pooled, **projected}

    def project(self, pooled) -> dict:
        """`projection`, `heads` and `embedding` of pooled features (B, M c), as `represent` names
        them."""
        by_head = self.dense(ops.reshape(pooled, (-1, pooled.shape[-1] // self.heads)))
        projection = ops.reshape(by_head, (-1, self.embedding_dim))
        unit = self.normalize(by_head)
        heads = ops.reshape(unit, (-1, self.heads, self.embedding_dim // self.heads))
        # Divided by sqrt(M), for length 1.
        embedding = ops.reshape(unit, (-1, self.embedding_dim)) / math.sqrt(self.heads)
        return {"projection": projection, "heads": heads, "embedding": embedding}

    def _features_and_context(self, images, training):
        scaled = self.input_scaling(images)
        features = self.trunk(scaled, training=mode_of(self.backbone, training))
        if self.attention is None:
            return features, features
        return features, self.attention(features, training=mode_of(self.attention, training))

    def _side_by_side(self, maps):
        """(B M, h, w, c) -> (B, h, w, M c): the M maps of an image are adjacent rows of `maps`."""
        height, width = ops.shape(maps)[1:3]
        channels = maps.shape[-1]
        by_head = ops.reshape(maps, (-1, self.heads, height, width, channels))
        by_position = ops.transpose(by_head, (0, 2, 3, 1, 4))
        return ops.reshape(by_position, (-1, height, width, self.heads * channels))

    def masks(self, images):
        """Return the attention masks of the images, (B, M, h, w, c) between 0 and 1, to look at."""
        return self.attention_heads.masks(self._features_and_context(images, training=False)[1])

    def representation_shapes(self, input_shape) -> dict:
        """Return the shape of each representation of images of this shape."""
        shapes = super().representation_shapes(input_shape)
        batch, height, width, channels = shapes["feature_map"]
        all_channels = self.heads * channels
        return {
            **shapes,
            "feature_map": (batch, height, width, all_channels),
            "pooled": (batch, all_channels),
            "heads": (batch, self.heads, self.embedding_dim // self.heads),
        }

    def parts(self) -> dict[str, list]:
        """Return the trainable variables of the `backbone`, with the attention network's, and of
        the `projection`."""
        copied = [] if self.attention is None else self.attention.trainable_variables
        return {
            "backbone": [*self.backbone.trainable_variables, *copied],
            # What starts from random numbers: the masks, a trained pooling and the dense layer.
            "projection": [
                *self.attention_heads.trainable_variables,
                *self.pool.trainable_variables,
                *self.dense.trainable_variables,
            ],
        }

    def freeze_backbone(self) -> None:
        """Keep the backbone and the attention network as they are; the masks and the dense layer
        train."""
        super().freeze_backbone()
        if self.attention is not None:
            self.attention.trainable = False
