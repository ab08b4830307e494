"""High-order moments of deep features as a regularizer of any metric loss (HORDE)."""

from collections.abc import Sequence

from tfdml.arguments import number
from tfdml.layers import MomentEmbeddings
from tfdml.layers.moments import as_orders
from tfdml.losses.classification import ClassSimilarityLoss
from tfdml.objectives.base import MetricLoss, Objective, ProxyLoss
from tfdml.saving import restore


class HighOrderMomentLoss(Objective):
    """The HORDE regularizer: a metric loss on embeddings of the moments of each image's deep features.

    L_HORDE = sum over k = 2 .. K of L_k(e_k),    e_k = A_k m_k / |A_k m_k|,    m_k = mean over positions of phi_k

    with the moments phi_k of `tfdml.layers.HighOrderMoments` and a trained matrix A_k. Added to the same loss on the
    embedding it is the paper's objective (eq. 9):

        objectives = [MetricLoss(BinomialDevianceLoss()), HighOrderMomentLoss(BinomialDevianceLoss())]

    Images of one class are drawn to have the same distribution of deep features, not only the same mean. The moments
    are computed on each replica, and only the embeddings e_k are gathered. All weights are the objective's own: the
    embedder's architecture, speed and file are those without it. `tfdml.models.MomentEmbedder` uses them in search.

    Args:
        loss: Any loss: on pairs, such as `tfdml.losses.ContrastiveLoss()`; on class similarities, such as
            `tfdml.losses.AMSoftmaxLoss()`, for which each order gets class proxies of its own; or another Keras loss.
        orders: K for the orders 2 .. K, or the orders themselves, ascending. The paper has K = 5 on CUB and CARS, 4 on
            SOP and In-Shop.
        dim: The number of moments of each order.
        embedding_dim: The size of each e_k; by default the embedder's. In mode `"random"` None means no A_k: the
            moments themselves, of length 1 (sec. 5.1), as long as `dim`.
        mode: `"cascaded"`, `"independent"` or `"random"`: see `tfdml.layers.HighOrderMoments`.
        representation: The name of the feature map (B, h, w, c) or set of features (B, n, c) of each image.
        reduce_to: The channels to which a trained, bias-free 1 x 1 convolution takes the map first; None for none. The
            authors take the 8 x 1024 channels of an attention ensemble to 1024.
        order_weights: The weight of each order, one for all or one for each. The authors' code has 1, and 1/K with an
            attention ensemble.
        scaled: As in `tfdml.layers.HighOrderMoments`.
        num_classes: C, for a loss on class similarities; labels must lie in 0 .. C - 1.
        proxies_per_class: For a loss on class similarities; by default what the loss expects.
        seed: Of the initial projections; by default drawn from Keras's seed.
        weight: The factor of this term.
        name: The term's name in logs, and the beginning of those of its representations, `<name>_<order>`.

    Raises:
        ValueError: An argument does not fit.

    Example:
        >>> objective = HighOrderMomentLoss(tfdml.losses.ContrastiveLoss(), orders=3, dim=512, embedding_dim=64)
        >>> tuple(objective({"feature_map": keras.random.normal((4, 7, 7, 32))}, keras.ops.array([0, 0, 1, 1])).shape)
        ()

    Source: Jacob et al., "Metric Learning With HORDE: High-Order Regularizer for Deep Embeddings", ICCV 2019, eq. 7
    to 9, and algorithm 1.
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
        self.options = {"dim": dim, "mode": mode, "reduce_to": reduce_to, "scaled": scaled, "seed": seed}
        # Checks the arguments now; the layer itself needs the embedder's size.
        MomentEmbeddings(self.orders, embedding_dim=embedding_dim, **self.options)
        self.loss = restore(loss)
        self.terms = [self._term(order) for order in self.orders]
        self.per_image = self.terms[0].per_image
        self.learns_from = self.terms[0].learns_from
        self.reduction = self.terms[0].reduction
        self.whole_batch = self.terms[0].whole_batch
        self._has_proxies = isinstance(self.terms[0], ProxyLoss)
        # The embeddings of the moments, and the class similarities that they give: the loss of each order takes these.
        vectors = tuple(term.representation for term in self.terms)
        self.reads = tuple(f"{name}_class" for name in vectors) if self._has_proxies else vectors
        self.provides = vectors + self.reads if self._has_proxies else vectors

    def _weights_by_order(self, weights) -> tuple[float, ...]:
        weights = tuple(weights) if isinstance(weights, Sequence) else (weights,) * len(self.orders)
        if len(weights) != len(self.orders):
            raise ValueError(f"{self.name}: {len(weights)} order_weights for {len(self.orders)} orders")
        return tuple(number("each of order_weights", weight, at_least=0) for weight in weights)

    def _term(self, order) -> Objective:
        source = f"{self.name}_{order}"
        if not isinstance(self.loss, ClassSimilarityLoss):
            return MetricLoss(self.loss, representation=source, name=source)
        if self.num_classes is None:
            raise ValueError(f"{self.name}: {self.loss.name} works on class similarities and needs num_classes")
        proxies = self.proxies_per_class or self.loss.proxies_per_class
        return ProxyLoss(self.loss, self.num_classes, proxies, representation=source, name=source)

    def build_from(self, shapes):
        """Create the projections, the matrices A_k and the class proxies."""
        size = self.embedding_dim
        if size is None and self.options["mode"] != "random":
            if "embedding" not in shapes:
                raise ValueError(f"{self.name}: there is no embedding to take the size from: give embedding_dim")
            size = shapes["embedding"][-1]
        self.moments = MomentEmbeddings(self.orders, embedding_dim=size, name="moments", **self.options)
        self.moments.build(self._source(shapes))
        if self._has_proxies:
            for term in self.terms:
                term.build_from({term.representation: (None, self.moments.output_dim)})
                term.built = True

    def _source(self, representations):
        if self.representation not in representations:
            names = ", ".join(sorted(representations))
            raise ValueError(f"{self.name} needs the representation {self.representation!r}, and there is only {names}")
        source = representations[self.representation]
        shape = tuple(getattr(source, "shape", source))
        if len(shape) < 3:
            raise ValueError(f"{self.name}: {self.representation!r} must be a map (B, h, w, c), not {shape}")
        return source

    def represent(self, representations, training=None):
        """Return the embeddings of each image's moments, and their class similarities."""
        vectors = self.moments(self._source(representations))
        named = {term.representation: vectors[order] for order, term in zip(self.orders, self.terms, strict=True)}
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
            weight * term.compute_pairs(pairs) for term, weight in zip(self.terms, self.order_weights, strict=True)
        )

    def get_config(self):
        """Return the arguments."""
        return {**super().get_config(), **self.options}
