"""High-order moments of deep features as a regularizer (HORDE), and the objectives on the heads of
an ensemble."""

import itertools
from collections.abc import Sequence

from keras import ops

from tfdml import pairwise
from tfdml.arguments import number, one_of
from tfdml.layers import MomentEmbeddings
from tfdml.layers.moments import as_orders
from tfdml.losses.base import PairLoss
from tfdml.losses.classification import ClassSimilarityLoss
from tfdml.objectives.base import MetricLoss, Objective, ProxyLoss
from tfdml.registry import register
from tfdml.saving import restore


@register("objective", alias="horde")
class HighOrderMomentLoss(Objective):
    """The HORDE regularizer: a metric loss on embeddings of the moments of each image's deep
    features.

    L_HORDE = sum over k = 2 .. K of L_k(e_k),    e_k = A_k m_k / |A_k m_k|,    m_k = mean over
    positions of phi_k

    with the moments phi_k of `tfdml.layers.HighOrderMoments` and a trained matrix A_k. Added to the
    same loss on the embedding it is the paper's objective (eq. 9):

        objectives = [MetricLoss(BinomialDevianceLoss()),
                      HighOrderMomentLoss(BinomialDevianceLoss())]

    Images of one class are drawn to have the same distribution of deep features, not only the same
    mean. The moments are computed on each replica, and only the embeddings e_k are gathered. All
    weights are the objective's own: the embedder's architecture, speed and file are those without
    it. `tfdml.models.MomentEmbedder` uses them in search.

    Args:
        loss: Any loss: on pairs, such as `tfdml.losses.ContrastiveLoss()`; on class similarities,
            such as `tfdml.losses.AMSoftmaxLoss()`, for which each order gets class proxies of its
            own; or another Keras loss.
        orders: K for the orders 2 .. K, or the orders themselves, ascending. The paper has K = 5 on
            CUB and CARS, 4 on SOP and In-Shop.
        dim: The number of moments of each order.
        embedding_dim: The size of each e_k; by default the embedder's. In mode `"random"` None
            means no A_k: the moments themselves, of length 1 (sec. 5.1), as long as `dim`.
        mode: `"cascaded"`, `"independent"` or `"random"`: see `tfdml.layers.HighOrderMoments`.
        representation: The name of the feature map (B, h, w, c) or set of features (B, n, c) of
            each image.
        reduce_to: The channels to which a trained, bias-free 1 x 1 convolution takes the map first;
            None for none. The authors take the 8 x 1024 channels of an attention ensemble to 1024.
        order_weights: The weight of each order, one for all or one for each. The authors' code has
            1, and 1/K with an attention ensemble.
        scaled: As in `tfdml.layers.HighOrderMoments`.
        num_classes: C, for a loss on class similarities; labels must lie in 0 .. C - 1.
        proxies_per_class: For a loss on class similarities; by default what the loss expects.
        seed: Of the initial projections; by default drawn from Keras's seed.
        name: The term's name in logs, and the beginning of those of its representations,
            `<name>_<order>`.

    Raises:
        ValueError: An argument does not fit.

    Example:
        >>> objective = HighOrderMomentLoss(tfdml.losses.ContrastiveLoss(), orders=3, dim=512,
        ...     embedding_dim=64)
        >>> tuple(objective({"feature_map": keras.random.normal((4, 7, 7, 32))}, keras.ops.array([0,
        ...     0, 1, 1])).shape)
        ()

    Source: Jacob et al., "Metric Learning With HORDE: High-Order Regularizer for Deep Embeddings",
    ICCV 2019, eq. 7 to 9, and algorithm 1.
    """

    reads: tuple[str, ...] = ()

    def __init__(
        self,
        loss,
        orders=5,
        dim=8192,
        embedding_dim=None,
        mode="cascaded",
        representation="feature_map",
        reduce_to=None,
        order_weights=1.0,
        scaled=True,
        num_classes=None,
        proxies_per_class=None,
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.orders = as_orders(orders)
        self.order_weights = self._weights_by_order(order_weights)
        self.embedding_dim = embedding_dim
        self.representation = representation
        self.num_classes = num_classes
        self.proxies_per_class = proxies_per_class
        self.options = {
            "dim": dim,
            "mode": mode,
            "reduce_to": reduce_to,
            "scaled": scaled,
            "seed": seed,
        }
        # Checks the arguments now; the layer itself needs the embedder's size.
        MomentEmbeddings(self.orders, embedding_dim=embedding_dim, **self.options)
        self.loss = restore(loss)
        self.terms = [self._term(order) for order in self.orders]
        self.per_image = self.terms[0].per_image
        self.learns_from = self.terms[0].learns_from
        self.reduction = self.terms[0].reduction
        self.whole_batch = self.terms[0].whole_batch
        self._has_proxies = isinstance(self.terms[0], ProxyLoss)
        # The embeddings of the moments, and the class similarities that they give: the loss of each
        # order takes these.
        vectors = tuple(term.representation for term in self.terms)
        self.reads = self.provides = vectors
        if self._has_proxies:
            self.reads = tuple(f"{name}_class" for name in vectors)
            self.provides = vectors + self.reads

    def _weights_by_order(self, weights) -> tuple[float, ...]:
        weights = tuple(weights) if isinstance(weights, Sequence) else (weights,) * len(self.orders)
        if len(weights) != len(self.orders):
            raise ValueError(
                f"{self.name}: {len(weights)} order_weights for {len(self.orders)} orders"
            )
        return tuple(number("each of order_weights", weight, at_least=0) for weight in weights)

    def _term(self, order) -> Objective:
        source = f"{self.name}_{order}"
        if not isinstance(self.loss, ClassSimilarityLoss):
            return MetricLoss(self.loss, representation=source, name=source)
        if self.num_classes is None:
            raise ValueError(
                f"{self.name}: {self.loss.name} works on class similarities and needs num_classes"
            )
        proxies = self.proxies_per_class or self.loss.proxies_per_class
        return ProxyLoss(self.loss, self.num_classes, proxies, representation=source, name=source)

    def build_from(self, shapes):
        """Create the projections, the matrices A_k and the class proxies."""
        size = self.embedding_dim
        if size is None and self.options["mode"] != "random":
            if "embedding" not in shapes:
                raise ValueError(
                    f"{self.name}: there is no embedding to take the size from: give embedding_dim"
                )
            size = shapes["embedding"][-1]
        self.moments = MomentEmbeddings(
            self.orders, embedding_dim=size, name="moments", **self.options
        )
        self.moments.build(self._source(shapes))
        if self._has_proxies:
            for term in self.terms:
                term.build_from({term.representation: (None, self.moments.output_dim)})
                term.built = True

    def _source(self, representations):
        if self.representation not in representations:
            names = ", ".join(sorted(representations))
            raise ValueError(
                f"{self.name} needs the representation {self.representation!r}, and there is only "
                f"{names}"
            )
        source = representations[self.representation]
        shape = tuple(getattr(source, "shape", source))
        if len(shape) < 3:
            raise ValueError(
                f"{self.name}: {self.representation!r} must be a map (B, h, w, c), not {shape}"
            )
        return source

    def represent(self, representations, training=None):
        """Return the embeddings of each image's moments, and their class similarities."""
        vectors = self.moments(self._source(representations))
        named = {
            term.representation: vectors[order]
            for order, term in zip(self.orders, self.terms, strict=True)
        }
        if not self._has_proxies:
            return named
        similarities = [term.represent(named)["class"] for term in self.terms]
        return {**named, **dict(zip(self.reads, similarities, strict=True))}

    def compute(self, representations, labels):
        """Compute the weighted sum over orders, (B,), of a loss that works image by image."""
        total = 0.0
        for term, source, weight in zip(self.terms, self.reads, self.order_weights, strict=True):
            name = "class" if self._has_proxies else source
            total = total + weight * term.compute({name: representations[source]}, labels)
        return total

    def compute_pairs(self, pairs):
        """Compute the weighted sum over orders of a loss on pairs."""
        return sum(
            weight * term.compute_pairs(pairs)
            for term, weight in zip(self.terms, self.order_weights, strict=True)
        )

    def get_config(self):
        """Return the arguments."""
        return {**super().get_config(), **self.options}


class HeadsObjective(Objective):
    """Base of the objectives on the heads of an ensemble, `representations["heads"]` (B, M, d/M).

    Raises:
        ValueError: The embedder has no heads.
    """

    reads = ("heads",)

    def build_from(self, shapes):
        """Note how many heads there are."""
        self.heads_shape = tuple(self.select(shapes)["heads"][1:])

    def heads(self, pairs) -> list:
        """Return the pairs of each head's vectors, M times (b, d/M) and (B, d/M)."""

        def head(m):
            # Gathering the heads of all replicas loses the static shape.
            return pairs["heads"].map(lambda x: ops.reshape(x, (-1, *self.heads_shape))[:, m])

        return [head(m) for m in range(self.heads_shape[0])]


@register("objective")
class HeadwiseLoss(HeadsObjective):
    """A metric loss on each head of an ensemble: (1/M) sum_m loss(labels, head m).

    Each head is to be good by itself, as in the paper; a loss on the whole embedding (`MetricLoss`)
    asks the heads to be good together. The paper's sum is M times this mean.

    Args:
        loss: A loss of tfdml over pairs, such as `tfdml.losses.ContrastiveLoss()`.
        name: The term's name in logs; by default `headwise_` and the loss's.

    Raises:
        ValueError: `loss` is no loss over pairs, or the embedder has no heads.

    Example:
        >>> objective = HeadwiseLoss(tfdml.losses.ContrastiveLoss(margin=0.5, distance="cosine"))
        >>> representations = {"heads": tfdml.pairwise.l2_normalize(keras.random.normal((6, 4, 8)))}
        >>> tuple(objective(representations, keras.ops.array([0, 0, 1, 1, 2, 2])).shape)
        ()

    Source: Kim et al., "Attention-based Ensemble for Deep Metric Learning", ECCV 2018, sec. 3.3.
    """

    learns_from = ("positive", "negative")

    def __init__(self, loss, name=None, **kwargs):
        loss = restore(loss)
        if not isinstance(loss, PairLoss):
            raise ValueError(f"HeadwiseLoss takes a loss of tfdml over pairs, not {loss!r}")
        super().__init__(name=name or f"headwise_{loss.name}", **kwargs)
        self.loss, self.whole_batch = loss, loss.needs_whole_batch

    def compute_pairs(self, pairs):
        """Compute the mean of the heads' losses."""
        heads = self.heads(pairs)
        return sum(self.loss.of_pairs(head) for head in heads) / len(heads)


@register("objective")
class HeadDivergence(HeadsObjective):
    """The divergence loss: heads must not give the same vector.

    mean of [cos(h_p(x_i), h_q(x_j)) - margin]_+ over heads p != q and image pairs (i, j)

    With `pairs="all"`, i and j are any two images of the batch, the same one or not, as in the code
    of HORDE's authors; with `"image"`, i = j: an image's own heads. On unit vectors |h - h'|^2 = 2
    - 2 cos, so this is half the hinge on squared distances [2 (1 - margin) - |h_p - h_q|^2]_+,
      whose margin is 1 by default.

    O(N^2 M^2 / 2) time and memory for N images with `"all"`, O(N M^2) with `"image"`. One head
    gives 0.

    Args:
        margin: The cosine up to which nothing is asked, in [-1, 1].
        pairs: `"all"` or `"image"`.
        average: `"active"`: the mean over the pairs above the margin; `"all"`: over every pair.

    Raises:
        ValueError: An argument is none of these, or the embedder has no heads.

    Example:
        >>> float(HeadDivergence(margin=0.5)({"heads": keras.ops.ones((2, 4, 8))},
        ...     keras.ops.array([0, 1])))
        0.50000

    Source: Kim et al., "Attention-based Ensemble for Deep Metric Learning", ECCV 2018, sec. 3.3;
    the default margin, pairs, average and weight are those of HORDE's public code (Jacob et al.,
    ICCV 2019).
    """

    def __init__(self, margin=0.5, pairs="all", average="active", weight=0.5, **kwargs):
        super().__init__(weight=weight, **kwargs)
        self.margin = number("margin", margin, at_least=-1, at_most=1)
        self.pairs = one_of(f"{self.name}: pairs", pairs, ("all", "image"))
        self.average = one_of(f"{self.name}: average", average, ("active", "all"))

    def compute_pairs(self, pairs):
        """Compute the mean hinge over pairs of heads."""
        heads = [head.map(pairwise.l2_normalize) for head in self.heads(pairs)]
        # (p, q) and (q, p) have the same pairs.
        couples = list(itertools.combinations(heads, 2))
        if not couples:
            return ops.zeros((), "float32")
        if self.pairs == "all":
            cosines = [pairwise.dot_products(a.anchors, b.references) for a, b in couples]
        else:
            cosines = [ops.sum(a.anchors * b.anchors, axis=-1) for a, b in couples]
        hinges = [ops.relu(cosine - self.margin) for cosine in cosines]
        batch = heads[0]
        if self.average == "all":
            return sum(batch.mean(hinge) for hinge in hinges) / len(hinges)
        active = batch.total(sum(pairwise.masked_count(hinge > 0) for hinge in hinges))
        return sum(ops.sum(hinge) for hinge in hinges) / ops.maximum(active, 1.0)
