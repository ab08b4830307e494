"""What a batch shows: gradients by part and term, how far embeddings spread, and dead proxies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from scipy.spatial.distance import pdist

from tfdml.models import MetricLearner
from tfdml.objectives import ProxyLoss, Stateful
from tfdml.pairs import Pairs


@dataclasses.dataclass(frozen=True)
class Sample:
    """What a step on a batch would meet.

    Args:
        terms: By name, what each objective adds to the loss: its value times its weight.
        norms: By part, the norm of the gradient of the loss, before any clipping.
        gram: (T, T) <g_s, g_t> of the terms' gradients g_t with respect to the embedder's weights.
        embeddings: (B, d).
    """

    terms: dict[str, float]
    norms: dict[str, float]
    gram: np.ndarray
    embeddings: np.ndarray


class GradientSampler:
    """Measures batches by a learner as it stands, on one device.

    The loss is a function of the values of the learner's variables: what a step would change, such as moving statistics
    and random states, is dropped. Losses that layers add by `add_loss` are not among the terms.

    Args:
        learner: A built learner.

    Example:
        >>> images, labels = next(iter(batches))
        >>> sample = GradientSampler(learner)(images, labels)
        >>> sorted(sample.norms)
        ['backbone', 'projection']
    """

    def __init__(self, learner: MetricLearner):
        self._learner = learner
        self._trained = list(learner.trainable_variables)
        self._others = list(learner.non_trainable_variables)
        place = {id(variable): index for index, variable in enumerate(self._trained)}
        fixed = {id(variable) for variable in learner.statistics_variables}
        #: The places of each part's variables, of those that a step of the embedder trains.
        self._parts = {
            part: [place[id(v)] for v in variables if id(v) in place and id(v) not in fixed]
            for part, variables in learner.parts().items()
        }
        backend = keras.backend.backend()
        measure = _on_jax if backend == "jax" else _on_tensorflow
        self._run = measure(self._terms, self._norms_and_gram, eagerly=learner.run_eagerly)

    def __call__(self, images: Any, labels: Any) -> Sample:
        """Measure a batch.

        Args:
            images: (B, H, W, 3).
            labels: (B,) integers.
        """
        trained, others = ([_value(variable) for variable in group] for group in (self._trained, self._others))
        terms, embeddings, squares, gram = self._run(trained, others, images, labels)
        names = [objective.name for objective in self._learner.objectives]
        return Sample(
            dict(zip(names, np.asarray(terms, np.float64).tolist(), strict=True)),
            {part: float(np.sqrt(np.float64(squares[part]))) for part, members in self._parts.items() if members},
            np.asarray(gram, np.float64),
            np.asarray(embeddings),
        )

    def _terms(self, trained, others, images, labels):
        """Return the weighted terms (T,), and the embeddings."""
        learner = self._learner
        mapping = [*zip(self._trained, trained, strict=True), *zip(self._others, others, strict=True)]
        with keras.StatelessScope(mapping, initialize_variables=False):
            found = learner.add_representations(learner(images, training=True), True)
            terms = [self._term(objective, found, labels) for objective in learner.objectives]
        return ops.stack(terms), ops.cast(found["embedding"], "float32")

    def _term(self, objective, representations, labels):
        selected, labels = objective.select(representations), objective.as_labels(labels)
        if isinstance(objective, Stateful):
            objective.update(selected, labels)
        return self._learner.weight_of(objective) * ops.cast(objective.value_of(selected, labels), "float32")

    def _norms_and_gram(self, gradients: Sequence[Sequence[Any]]):
        """Squared norms by part of the sum over terms, and the products of terms over the embedder."""

        def product(a, b, part):
            pairs = [(a[i], b[i]) for i in self._parts[part] if a[i] is not None and b[i] is not None]
            return sum((ops.sum(ops.cast(x, "float32") * ops.cast(y, "float32")) for x, y in pairs), ops.zeros(()))

        total = [_sum([term[i] for term in gradients]) for i in range(len(self._trained))]
        squares = {part: product(total, total, part) for part in self._parts}
        embedder = [part for part in self._parts if part != "objectives"]
        gram = [[sum(product(a, b, part) for part in embedder) for b in gradients] for a in gradients]
        return squares, ops.stack([ops.stack(row) for row in gram])


def _sum(gradients: Sequence[Any]):
    known = [gradient for gradient in gradients if gradient is not None]
    return sum(known[1:], known[0]) if known else None


def _on_tensorflow(terms_of: Callable, summarise: Callable, eagerly: bool) -> Callable:
    import tensorflow as tf

    def run(trained, others, images, labels):
        own = [tf.identity(value) for value in trained]
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(own)
            terms, embeddings = terms_of(own, others, images, labels)
            each = tf.unstack(terms)
        # A gradient of gathered rows lists the rows.
        gradients = [
            [None if found is None else tf.convert_to_tensor(found) for found in tape.gradient(term, own)]
            for term in each
        ]
        del tape
        return (terms, embeddings, *summarise(gradients))

    return run if eagerly else tf.function(run, autograph=False)


def _on_jax(terms_of: Callable, summarise: Callable, eagerly: bool) -> Callable:
    import jax

    def run(trained, others, images, labels):
        terms, back, embeddings = jax.vjp(
            lambda own: terms_of(own, others, images, labels), list(trained), has_aux=True
        )
        gradients = [back(one)[0] for one in jax.numpy.eye(len(terms), dtype=terms.dtype)]
        return (terms, embeddings, *summarise(gradients))

    compiled = run if eagerly else jax.jit(run)

    def on_one_device(trained, others, images, labels):
        # Whatever the training is shared out over, this is the work of one device.
        given = [np.asarray(x) for x in (images, labels)]
        labels = given[1].astype(np.int32)
        return compiled(trained, others, given[0], labels)

    return on_one_device


def _value(variable: Any):
    """Return what a variable holds, on this process's first device."""
    if keras.backend.backend() == "jax":
        return np.asarray(variable.value.addressable_data(0))
    import tensorflow as tf

    return tf.convert_to_tensor(variable.value)


def spread(embeddings: np.ndarray) -> dict[str, float]:
    """How far embeddings spread, and over how many directions.

    With the eigenvalues l_1 .. l_d of their covariance and p_i = l_i / sum_j l_j:

        variance = sum_i l_i
        effective_rank = exp(-sum_i p_i ln p_i)
        participation_ratio = (sum_i l_i)^2 / sum_i l_i^2

    Both ranks lie between 1 and min(B - 1, d). Of unit vectors the variance is at most 1, and half the mean squared
    distance of two of them (drawn with replacement).

    Args:
        embeddings: (B, d).

    Returns:
        The three by name; of images that all have one embedding, variance 0 and ranks of 1.

    Example:
        >>> spread(np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]]))["effective_rank"]
        2.0

    Source: Roy and Vetterli, "The effective rank", EUSIPCO 2007.
    """
    x = np.asarray(embeddings, np.float64)
    # The singular values of the centred rows are those of the covariance, of the smaller of both sizes.
    values = np.linalg.svd(x - x.mean(axis=0), compute_uv=False) ** 2 / len(x)
    total = float(values.sum())
    # Rounding of float32 is no direction.
    if total <= 1e-12:
        return {"variance": total, "effective_rank": 1.0, "participation_ratio": 1.0}
    shares = values[values > 0] / total
    return {
        "variance": total,
        "effective_rank": float(np.exp(-(shares * np.log(shares)).sum())),
        "participation_ratio": float(1.0 / (shares**2).sum()),
    }


def pair_distances(
    embeddings: np.ndarray, labels: np.ndarray, relation: Callable | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the Euclidean distances of positive and of negative pairs, each pair once, in float64.

    Args:
        embeddings: (B, d).
        labels: (B,) class ids, or what `relation` takes.
        relation: Which images belong together, see `MetricLearner.positives`.
    """
    pairs, distances = Pairs.of_batch(embeddings, labels, relation), pdist(embeddings)
    upper = np.triu_indices(len(labels), 1)
    return distances[np.asarray(pairs.positives)[upper]], distances[np.asarray(pairs.negatives)[upper]]


def gradient_shares(gram: np.ndarray) -> np.ndarray:
    """Return the share of each term's gradient g_t in their sum g: <g_t, g> / |g|^2, which add up to 1.

    A share below 0 pulls against the sum of all.

    Args:
        gram: (T, T) <g_s, g_t>.

    Returns:
        (T,); 0 where the gradients cancel out.
    """
    total = float(gram.sum())
    return gram.sum(axis=1) / total if total > 0 else np.zeros(len(gram))


# A proxy that has turned by less than this share of the median of all in an epoch has got no gradient.
UNMOVED_SHARE = 1e-3


class ProxyWatch:
    """Follows the proxies of one objective, to find those that are dead.

    Dead is a proxy whose direction has turned in an epoch by less than a thousandth of the median of all: weight decay
    shortens a proxy without a gradient, and does not turn it.

    Args:
        objective: The objective that owns the proxies.
    """

    def __init__(self, objective: ProxyLoss):
        self.objective = objective
        self._directions: np.ndarray | None = None

    def begin_epoch(self) -> None:
        """Note where the proxies point."""
        self._directions = self._pointing()

    def unmoved(self) -> np.ndarray:
        """Return the proxies that have not turned since the epoch began: proxy k of class c is row c K + k."""
        if self._directions is None:
            return np.zeros(0, np.int64)
        turned = np.linalg.norm(self._pointing() - self._directions, axis=1)
        return np.flatnonzero(turned < UNMOVED_SHARE * float(np.median(turned)))

    def dead(self, most: int = 5) -> str:
        """Return what says that proxies are dead; empty: none is.

        Args:
            most: How many classes are named.
        """
        rows, per_class = self.unmoved(), self.objective.proxies_per_class
        if not len(rows):
            return ""
        shown = ", ".join(str(row // per_class) for row in rows[:most]) + (", ..." if len(rows) > most else "")
        count = self.objective.num_classes * per_class
        return (
            f"{len(rows)} proxies (classes {shown}) got no gradient in an epoch, of the {count} proxies of "
            f"{self.objective.name}"
        )

    def _pointing(self) -> np.ndarray:
        proxies: Any = self.objective.class_proxies.proxies
        rows = np.asarray(ops.convert_to_numpy(proxies), np.float32)
        rows = rows.reshape(-1, rows.shape[-1])
        return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
