"""Plain losses as objectives: on a representation, on its prefixes, or on the similarities to class proxies."""

import keras
from keras import ops

from tfdml import pairwise, replicas
from tfdml.arguments import integer, number
from tfdml.layers import CosineProxies
from tfdml.losses.base import PairLoss, check_rank
from tfdml.losses.classification import ClassSimilarityLoss, refuse_unknown_classes
from tfdml.losses.proxy import ProxyAnchorLoss
from tfdml.objectives.base import Objective
from tfdml.saving import restore


def _loss_from(loss):
    loss = restore(loss)
    if not isinstance(loss, keras.losses.Loss):
        raise ValueError(f"expected a keras.losses.Loss, got {loss!r}")
    if loss.reduction in ("none", None):
        raise ValueError(f"{loss.name}: an objective needs a loss with a reduction, not {loss.reduction!r}")
    return loss


def reduction_of(loss) -> str:
    """Return the objective's word for the reduction of a Keras loss: `"mean"` or `"sum"`."""
    return "sum" if loss.reduction == "sum" else "mean"


def share_of(part, size):
    """Compute how many of `size` images a share of them is, rounded down."""
    # A little more, as 0.3 of 10 is a little below 3 in float32.
    return ops.cast(ops.floor(part * ops.cast(size, "float32") + 1e-4), "int32")


class MetricLoss(Objective):
    """Any loss on any representation: loss(labels, representations[representation]).

    A loss of tfdml over pairs sees the global batch. Any other Keras loss is taken to work image by image.

    Args:
        loss: A `keras.losses.Loss` such as `tfdml.losses.ContrastiveLoss()`.
        representation: The name of the representation that it reads.
        weight: The factor of this term.
        name: The term's name in logs; by default the loss's.

    Raises:
        ValueError: `loss` is not a loss, has no reduction, or is one on class similarities.

    Example:
        >>> objective = MetricLoss(tfdml.losses.ContrastiveLoss())
        >>> float(objective({"embedding": keras.ops.eye(3)}, keras.ops.array([0, 0, 1])))
        2.00000
    """

    def __init__(self, loss, representation="embedding", name=None, **kwargs):
        loss = _loss_from(loss)
        super().__init__(name=name or loss.name, **kwargs)
        self.representation, self.reduction = representation, reduction_of(loss)
        if isinstance(loss, ClassSimilarityLoss) and representation != "class":
            raise ValueError(f"{loss.name} takes similarities to classes: use ProxyLoss(loss, num_classes)")
        self.loss = loss
        self.per_image = not isinstance(loss, PairLoss)
        self.whole_batch = not self.per_image and loss.needs_whole_batch
        self.learns_from = () if self.per_image else ("positive", "negative")

    def compute(self, representations, labels):
        """Compute the values of a loss that works image by image, (B,)."""
        return self.loss.call(labels, ops.cast(representations[self.representation], "float32"))

    def compute_pairs(self, pairs):
        """Compute the value of a loss on pairs."""
        batch = pairs[self.representation]
        check_rank(self.name, batch.references, 2, f"{self.representation!r} to be vectors (B, d)")
        return self.loss.of_pairs(batch)


def _checked_prefixes(dims, dim_weights):
    """Return the lengths of prefixes, and their factors or None."""
    lengths = tuple(integer("dims", dim, at_least=1) for dim in dims)
    if not lengths or list(lengths) != sorted(set(lengths)):
        raise ValueError(f"dims must be ascending lengths, such as [32, 64, 128]; got {list(dims)}")
    if dim_weights is not None:
        dim_weights = tuple(number("dim_weights", factor, at_least=0) for factor in dim_weights)
        if len(dim_weights) != len(lengths):
            raise ValueError(f"give one of dim_weights for each of {len(lengths)} dims; got {len(dim_weights)}")
    return lengths, dim_weights


def _check_length(objective, shapes):
    length = shapes[objective.representation][-1]
    if objective.dims[-1] > length:
        raise ValueError(f"{objective.name}: dims={list(objective.dims)}, and there are {length} dimensions")


class Matryoshka(MetricLoss):
    """Sums a loss over prefixes of the representation, so that its first dimensions work alone.

    L = sum_m w_m loss(labels, x[:, :m] / |x[:, :m]|). `tfdml.models.TruncatedEmbedder` cuts embeddings in the same way
    after training.

    Args:
        loss: A loss over pairs, such as `tfdml.losses.MultiSimilarityLoss()`.
        dims: The lengths of the prefixes, ascending, such as `[32, 64, 128]`. Name the whole length too.
        dim_weights: One factor per prefix; None for 1 each.
        representation: The name of the representation that it reads, (B, d).
        weight: The factor of this term.
        name: The term's name in logs; by default `matryoshka_` and the loss's.

    Raises:
        ValueError: `loss` is not a loss over pairs, `dims` are not ascending positive integers, or not as many as
            `dim_weights`. On the first call: a prefix is longer than the representation.

    Example:
        >>> objective = Matryoshka(tfdml.losses.ContrastiveLoss(), dims=[1, 2])
        >>> float(objective({"embedding": keras.ops.array([[1.0, 0.0], [0.6, 0.8]])}, keras.ops.array([0, 0])))
        0.8

    Source: Kusupati et al., "Matryoshka Representation Learning", NeurIPS 2022, equation 1.
    """

    def __init__(self, loss, dims, dim_weights=None, name=None, **kwargs):
        loss = _loss_from(loss)
        if not isinstance(loss, PairLoss):
            raise ValueError(f"Matryoshka takes a loss of tfdml over pairs, not {type(loss).__name__}")
        super().__init__(loss, name=name or f"matryoshka_{loss.name}", **kwargs)
        self.dims, self.dim_weights = _checked_prefixes(dims, dim_weights)

    def build_from(self, shapes):
        """Check that the prefixes are no longer than the representation."""
        _check_length(self, shapes)

    def compute_pairs(self, pairs):
        """Compute the weighted sum of the loss over the prefixes."""
        batch = pairs[self.representation]
        check_rank(self.name, batch.references, 2, f"{self.representation!r} to be vectors (B, d)")
        factors = self.dim_weights or (1.0,) * len(self.dims)
        prefixes = [batch.map(lambda x, dim=dim: pairwise.l2_normalize(x[:, :dim])) for dim in self.dims]
        parts = [self.loss.of_pairs(prefix) for prefix in prefixes]
        return sum(factor * part for factor, part in zip(factors, parts, strict=True))


class ProxyLoss(Objective):
    """A loss on the cosines to learned class proxies, which it owns.

    Adds the representation `"class"`, the class similarities (B, C), for objectives that come after it to read, such as
    `JointRepresentationSimilarity`. With several proxies per class they are the loss's own, such as SoftTriple's
    relaxed ones; a Keras loss that has none of its own gets the cosines (B, C, K) as they are.

    Works image by image: nothing is gathered across replicas, save by `ProxyAnchorLoss`, whose terms run over the
    batch.

    Args:
        loss: A loss on class similarities, such as `tfdml.losses.AMSoftmaxLoss()`.
        num_classes: C; labels must lie in 0 .. C - 1, in training and in validation. Classes that are not trained have
            no proxies, whatever their numbers: measure them with `tfdml.callbacks.RetrievalEvaluation`, and not with
            `validation_data`.
        proxies_per_class: K; None for the loss's own number: 10 of `SoftTripleLoss`, 3 of `SubCenterArcFaceLoss`, and
            1 of others.
        representation: What the proxies are compared with.
        weight: The factor of this term.
        name: The term's name in logs; by default the loss's.
        drop_highest: The share of the global batch's images, those of the highest values, that does not count: for
            wrong labels, whose images keep high values while the others are learnt. At least 0 and below 1. The mean
            is that of the images that count.

    Raises:
        ValueError: `loss` is not a loss on class similarities, a count is not positive, or `drop_highest` is out of
            range or given for a loss that has no value of each image.

    Example:
        >>> objective = ProxyLoss(tfdml.losses.AMSoftmaxLoss(), num_classes=98)
        >>> tuple(objective({"embedding": keras.random.normal((4, 128))}, keras.ops.arange(4)).shape)
        ()

    Source: `drop_highest` is the small-loss selection of Han et al., "Co-teaching", NeurIPS 2018, by one network.
    """

    per_image = True
    reads: tuple[str, ...] = ("class",)
    provides = ("class",)

    def __init__(
        self,
        loss,
        num_classes,
        proxies_per_class=None,
        representation="embedding",
        name=None,
        drop_highest=0.0,
        **kwargs,
    ):
        loss = _loss_from(loss)
        if isinstance(loss, PairLoss):
            raise ValueError(f"{loss.name} works on pairs of embeddings: use MetricLoss, not ProxyLoss")
        super().__init__(name=name or loss.name, **kwargs)
        self.representation, self.reduction = representation, reduction_of(loss)
        self.loss = loss
        if proxies_per_class is None:
            proxies_per_class = getattr(loss, "proxies_per_class", 1)
        self.class_proxies = CosineProxies(num_classes, proxies_per_class, name="class_proxies")
        self.num_classes = self.class_proxies.num_classes
        self.proxies_per_class = self.class_proxies.proxies_per_class
        self.drop_highest = number("drop_highest", drop_highest, at_least=0, below=1)
        if self.drop_highest and isinstance(loss, ProxyAnchorLoss):
            raise ValueError(f"drop_highest: {loss.name} has no value of each image; leave it out")

    def build_from(self, shapes):
        """Create the proxies."""
        if not self.class_proxies.built:
            self.class_proxies.build(shapes[self.representation])

    def represent(self, representations, training=None):
        """Return the class similarities of each image."""
        return {"class": self._similarities(representations[self.representation])}

    def _similarities(self, embeddings, dim=None):
        similarities = self.class_proxies(embeddings, dim=dim)
        if isinstance(self.loss, ClassSimilarityLoss):
            similarities = self.loss.class_similarities(similarities)
        return similarities

    def compute(self, representations, labels):
        """One value per image; 0 for those that are dropped, which makes the others' larger if a mean is asked for."""
        refuse_unknown_classes(labels, self.num_classes, self.name)
        values = self.image_values(representations, labels)
        return self._without_highest(values) if self.drop_highest else values

    def image_values(self, representations, labels):
        """One value per image, before any is dropped."""
        return self.loss.call(labels, representations["class"])

    def _without_highest(self, values):
        every = ops.sort(replicas.gather(ops.stop_gradient(values)))
        size = ops.shape(every)[0]
        # With one value before the smallest, as a batch without images has none.
        highest = ops.pad(every, ((1, 0),))[size - share_of(self.drop_highest, size)]
        # An image whose value is NaN is not above it: a mistake stays in sight.
        left = ops.where(values > highest, 0.0, values)
        if self.reduction == "sum":
            return left
        return left * (ops.cast(size, "float32") / pairwise.masked_count(every <= highest))


class MatryoshkaProxyLoss(ProxyLoss):
    """Sums a loss on the cosines to class proxies over prefixes of the representation and of the proxies.

    L = sum_m w_m loss(labels, cos(x[:, :m], proxies[:, :m])): one set of proxies, the paper's efficient variant. The
    representation `"class"` is that of the whole length.

    Args:
        loss: A loss on class similarities, such as `tfdml.losses.AMSoftmaxLoss()`.
        num_classes: As `ProxyLoss`.
        dims: As `Matryoshka`.
        dim_weights: As `Matryoshka`.
        name: The term's name in logs; by default `matryoshka_` and the loss's.
        **kwargs: Further arguments of `ProxyLoss`.

    Raises:
        ValueError: As `ProxyLoss` and `Matryoshka`.

    Example:
        >>> objective = MatryoshkaProxyLoss(tfdml.losses.AMSoftmaxLoss(), num_classes=98, dims=[32, 128])
        >>> tuple(objective({"embedding": keras.random.normal((4, 128))}, keras.ops.arange(4)).shape)
        ()

    Source: Kusupati et al., "Matryoshka Representation Learning", NeurIPS 2022, equation 1 with weight tying.
    """

    def __init__(self, loss, num_classes, dims, dim_weights=None, name=None, **kwargs):
        loss = _loss_from(loss)
        super().__init__(loss, num_classes, name=name or f"matryoshka_{loss.name}", **kwargs)
        self.dims, self.dim_weights = _checked_prefixes(dims, dim_weights)
        # The class similarities, and what their prefixes are computed of.
        self.reads = ("class", self.representation)

    def build_from(self, shapes):
        """Create the proxies."""
        _check_length(self, shapes)
        super().build_from(shapes)

    def image_values(self, representations, labels):
        """One weighted sum over the prefixes per image."""
        x, factors = representations[self.representation], self.dim_weights or (1.0,) * len(self.dims)
        parts = [self.loss.call(labels, self._similarities(x, dim)) for dim in self.dims]
        return sum(factor * part for factor, part in zip(factors, parts, strict=True))
