"""An embedder whose vectors are reduced: by components, to the first dimensions, or by a head."""

import numpy as np
from keras import ops

from tfdml.arguments import integer
from tfdml.layers import L2Normalize, MomentEmbeddings, PrincipalComponents
from tfdml.models.embedder import EmbeddingModel, Head, build_once
from tfdml.objectives import HighOrderMomentLoss
from tfdml.saving import restore


class ReducedEmbedder(EmbeddingModel):
    """An embedder, a `reduction` of its vectors, and `normalize`.

    Subclasses create `reduction`, and may define `features(images)`, what `reduction` takes: by
    default the embedder's vectors.

    Attributes:
        image_size: The height and width in pixels of its images, as of the embedder.
        resize: The size in pixels before the center crop.
        resize_mode: How images are brought to that size: see `Embedder`.
        pad_color: What fills up the square in `resize_mode="pad"`.
    """

    def __init__(self, embedder, name, **kwargs):
        super().__init__(name=name, **{**kwargs, "autocast": False})
        self.embedder = restore(embedder)
        views = ("image_size", "resize", "resize_mode", "pad_color", "view_shape")
        if not all(hasattr(self.embedder, part) for part in ("embedding_dim", *views)):
            raise ValueError(f"embedder must be an Embedder, not {embedder!r}")
        for name in views:
            setattr(self, name, getattr(self.embedder, name))
        self.normalize = L2Normalize(name="normalize")

    def build(self, input_shape):
        """Create the weights that are not there yet."""
        build_once(self.embedder, input_shape)

    def features(self, images):
        """(B, H, W, 3) -> (B, D): what is reduced."""
        return self.embedder(images, training=False)

    def call(self, images, training=None):
        """(B, H, W, 3) -> (B, d), unit vectors."""
        return self.normalize(self.reduction(self.features(images)))

    def compute_output_shape(self, input_shape):
        """(B, d)."""
        return (input_shape[0], self.embedding_dim)


class MomentEmbedder(ReducedEmbedder):
    """Images to unit vectors made of the embedding and the embeddings of the moments that HORDE
    trained.

    f = [e_1, e_2, ..., e_K] -> principal components of the training images' f (d) -> L2

    with e_1 the embedder's own embedding and e_k those of `HighOrderMomentLoss`. Where `Embedder`
    leaves HORDE behind after training, this model keeps it, for a better search at the cost of the
    moments (the rows with a dagger in the paper's tables 1 and 2). The paper says that all orders
    are concatenated and reduced to the embedding's size by a PCA, no more; here each e_k has length
    1, as in training, and so has the result.

        model = MomentEmbedder.from_learner(learner)
        model.adapt(tfdml.embeddings.embed(model.features, training_batches))
        model.save("moments.keras")

    It has the embedder's `image_size`, `resize`, `resize_mode` and `pad_color`, and is evaluated,
    saved and exported as that is.

    Args:
        embedder: A `tfdml.models.Embedder`, or another model with its `represent`.
        moments: A `tfdml.layers.MomentEmbeddings`.
        representation: What the moments are taken of, a name in `embedder.represent`.
        embedding_dim: d; by default the embedder's.
        whiten: Scale the principal components to the same variance.

    Raises:
        ValueError: An argument does not fit, or the model is called before `adapt`.

    Example:
        >>> loss = tfdml.losses.ContrastiveLoss()
        >>> learner = tfdml.models.MetricLearner(embedder, [loss, HighOrderMomentLoss(loss)])
        >>> learner.compile("adam")
        >>> history = learner.fit(batches, steps_per_epoch=100, epochs=40)
        >>> model = MomentEmbedder.from_learner(learner)

    Source: Jacob et al., "Metric Learning With HORDE", ICCV 2019, sec. 4 and table 1.
    """

    def __init__(
        self,
        embedder,
        moments,
        representation="feature_map",
        embedding_dim=None,
        whiten=False,
        name="moment_embedder",
        **kwargs,
    ):
        super().__init__(embedder, name, **kwargs)
        self.moments = restore(moments)
        if not hasattr(self.embedder, "represent"):
            raise ValueError(f"embedder must be an Embedder, not {embedder!r}")
        if not isinstance(self.moments, MomentEmbeddings):
            raise ValueError(f"moments must be a tfdml.layers.MomentEmbeddings, not {moments!r}")
        if representation not in self.embedder.representations:
            names = ", ".join(self.embedder.representations)
            raise ValueError(f"representation must be one of {names}, not {representation!r}")
        self.representation, self.whiten = representation, bool(whiten)
        self.embedding_dim = embedding_dim or self.embedder.embedding_dim
        self.reduction = PrincipalComponents(self.embedding_dim, whiten, name="reduction")

    @classmethod
    def from_learner(cls, learner, objective=None, **options):
        """Return the model of a trained learner, whose layers it shares.

        Args:
            learner: A `MetricLearner` with a `HighOrderMomentLoss`, built.
            objective: The name of the `HighOrderMomentLoss`; needed where there are several.
            **options: `embedding_dim`, `whiten` and `name`.

        Raises:
            ValueError: The learner has no such objective, or several.
        """
        terms = {
            term.name: term for term in learner.objectives if isinstance(term, HighOrderMomentLoss)
        }
        if objective is None and len(terms) == 1:
            (objective,) = terms
        if objective not in terms:
            raise ValueError(
                f"objective must be one of the learner's moment losses {sorted(terms)}, not "
                f"{objective!r}"
            )
        term = terms[objective]
        if not term.built:
            raise ValueError(f"{term.name} has no weights yet: build and train the learner first")
        return cls(learner.embedder, term.moments, term.representation, **options)

    def build(self, input_shape):
        """Create the weights that are not there yet."""
        build_once(self.embedder, input_shape)
        shapes = self.embedder.representation_shapes(input_shape)
        build_once(self.moments, shapes[self.representation])
        size = shapes["embedding"][-1] + len(self.moments.orders) * self.moments.output_dim
        build_once(self.reduction, (None, size))

    def features(self, images):
        """(B, H, W, 3) -> (B, D): the embeddings of all orders side by side, from 1 to K."""
        representations = self.embedder.represent(images, training=False)
        moments = self.moments(representations[self.representation])
        return ops.concatenate([representations["embedding"], *moments.values()], axis=1)

    def by_order(self, features) -> dict:
        """Return the parts of `features` (N, D) by order: 1, the embedding (N, d), and those of the
        moments' orders."""
        parts, first = {}, 0
        for order in (1, *self.moments.orders):
            size = self.embedder.embedding_dim if order == 1 else self.moments.output_dim
            parts[order] = features[:, first : first + size]
            first += size
        return parts

    def adapt(self, features):
        """Fit the principal components to the `features` (N, D) of the training images, as NumPy.

        Raises:
            ValueError: There are not more images than `embedding_dim`, or a feature is not finite.
        """
        if not self.built:
            self.build((None, *self.view_shape))
        self.reduction.adapt(features)


class WhitenedEmbedder(ReducedEmbedder):
    """Images to whitened unit vectors: f = z / |z|, z_i = <e - mean, u_i> / v_i^(power / 2), e the
    embedder's vector.

    u_i are the principal components of training images' embeddings, v_i the variances along them;
    see `PrincipalComponents`, whose arguments these are. It is saved, loaded, evaluated and
    exported as an embedder is, except to int8. `with_whitening` makes it.

    Args:
        embedder: An `Embedder`, or what embeds as that does.
        dim: How many components.
        power: 1 whitens, 0 only projects.
        shrinkage: How far the variances are drawn to their mean.

    Raises:
        ValueError: An argument does not fit, or the model is called before its `reduction` is
            adapted.

    Example:
        >>> view = tfdml.data.EvaluationTransform.of(embedder)
        >>> vectors = tfdml.embeddings.embed(embedder, tfdml.data.evaluation_batches(train, view,
        ...     100))
        >>> model = with_whitening(embedder, vectors, dim=3)
        >>> model.save("whitened.keras")
    """

    def __init__(self, embedder, dim, power=1.0, shrinkage=0.0, name="whitened_embedder", **kwargs):
        super().__init__(embedder, name, **kwargs)
        self.reduction = PrincipalComponents(dim, True, power, shrinkage, name="whitening")
        self.dim = self.reduction.dim
        self.power = self.reduction.power
        self.shrinkage = self.reduction.shrinkage
        self.embedding_dim = self.dim

    def build(self, input_shape):
        """Create the weights that are not there yet."""
        super().build(input_shape)
        build_once(self.reduction, (None, self.embedder.embedding_dim))


def with_whitening(
    embedder, embeddings, dim: int = 0, power: float = 1.0, shrinkage: float = 0.0
) -> WhitenedEmbedder:
    """Return an embedder with a whitening behind it, fitted to its embeddings of training images.

    Args:
        embedder: A built `Embedder` or `MomentEmbedder`, whose weights it shares.
        embeddings: (M, D) NumPy, what it gives for the training images; never those of the gallery
            or the test.
        dim: How many components; 0: all D.
        power: See `WhitenedEmbedder`.
        shrinkage: Likewise.

    Raises:
        ValueError: There are not more embeddings than components, one is not finite, or a number is
            out of range.

    Example:
        >>> embedder = tfdml.models.Embedder("conv4", embedding_dim=8, image_size=16)
        >>> images = np.random.default_rng(0).integers(0, 256, (20, 16, 16, 3))
        >>> tuple(with_whitening(embedder, np.array(embedder(images)), dim=3)(images).shape)
        (20, 3)
    """
    model = WhitenedEmbedder(embedder, dim or embedder.embedding_dim, power, shrinkage)
    model.build((None, *embedder.view_shape))
    model.reduction.adapt(np.asarray(embeddings))
    return model


class TruncatedEmbedder(ReducedEmbedder):
    """Images to the first dimensions of another embedder's vectors, scaled to length 1: f = e[:dim]
    / |e[:dim]|.

    For embeddings that were trained with `Matryoshka`. It is saved, loaded, evaluated and exported
    as an embedder is.

    Args:
        embedder: An `Embedder`, or what embeds as that does.
        dim: How many dimensions are kept.

    Raises:
        ValueError: The embedder has fewer dimensions.

    Example:
        >>> embedder = tfdml.models.Embedder("conv4", embedding_dim=64, image_size=32)
        >>> model = TruncatedEmbedder(embedder, dim=16)
        >>> tuple(model(keras.ops.zeros((2, 32, 32, 3))).shape)
        (2, 16)
    """

    def __init__(self, embedder, dim, name="truncated_embedder", **kwargs):
        super().__init__(embedder, name, **kwargs)
        self.dim = self.embedding_dim = integer(
            "dim", dim, at_least=1, at_most=self.embedder.embedding_dim
        )

    def call(self, images, training=None):
        """(B, H, W, 3) -> (B, dim), unit vectors."""
        return self.normalize(self.embedder(images, training=training)[:, : self.dim])


class StackedEmbedder(ReducedEmbedder):
    """Images to the embeddings that a head makes of an embedder's vectors; `stack` makes it.

    Args:
        embedder: An `Embedder`, or what embeds as that does.
        head: A `Head` for its vectors.
        representation: Which of the embedder's vectors.

    Raises:
        ValueError: The head takes vectors of another size.

    Example:
        >>> embedder = tfdml.models.Embedder("conv4", embedding_dim=8, image_size=16)
        >>> tuple(StackedEmbedder(embedder, Head(8, embedding_dim=3))(np.ones((2, 16, 16,
        ...     3))).shape)
        (2, 3)
    """

    def __init__(
        self, embedder, head, representation="embedding", name="stacked_embedder", **kwargs
    ):
        super().__init__(embedder, name, **kwargs)
        self.head, self.representation = restore(head), representation
        if not isinstance(self.head, Head):
            raise ValueError(f"head must be a tfdml.models.Head, not {head!r}")
        size = self.embedder.embedding_dim
        if representation not in getattr(self.embedder, "representations", ("embedding",)):
            raise ValueError(f"the embedder has no representation {representation!r}")
        if representation != "embedding":
            size = self.embedder.representation_shapes((None, *self.view_shape))[representation][-1]
        if (size,) != self.head.view_shape:
            raise ValueError(
                f"the head takes vectors of size {self.head.view_shape[0]}, the embedder gives "
                f"{size}"
            )
        self.embedding_dim = self.head.embedding_dim

    def build(self, input_shape):
        """Create the weights that are not there yet."""
        build_once(self.embedder, input_shape)
        build_once(self.head, (None, *self.head.view_shape))

    def call(self, images, training=None):
        """(B, H, W, 3) -> (B, d), unit vectors."""
        return self.head(self.features(images), training=False)

    def features(self, images):
        """(B, H, W, 3) -> (B, D): what the head takes."""
        if self.representation == "embedding":
            return super().features(images)
        return self.embedder.represent(images, training=False)[self.representation]


def stack(embedder, head, representation: str = "embedding") -> StackedEmbedder:
    """Return an embedder of images: the head's vectors of an embedder's vectors, bit for bit; both
    keep their weights.

    Args:
        embedder: A built embedder: the one that the head's training vectors come from.
        head: A built `Head`.
        representation: Which of the embedder's vectors they were, a name of `Embedder.represent`,
            such as `"pooled"`.

    Raises:
        ValueError: The head takes vectors of another size.

    Example:
        >>> embedder = tfdml.models.Embedder("conv4", embedding_dim=8, image_size=16)
        >>> model = stack(embedder, Head(8, embedding_dim=3))
        >>> model.save("stacked.keras")
    """
    model = StackedEmbedder(embedder, head, representation)
    model.build((None, *embedder.view_shape))
    return model
