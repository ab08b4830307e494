"""The gradient of a batch, term by term and part by part, beside the training: nothing of the learner changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfdml.models import MetricLearner
from tfdml.objectives import Stateful


@dataclasses.dataclass(frozen=True)
class Sample:
    """What a step on a batch would meet.

    Args:
        terms: By name, what each objective adds to the loss: its value times its weight.
        norms: By part, the norm of the gradient of the loss, before any clipping.
        gram: (T, T) <g_s, g_t> of the terms' gradients g_t with respect to the embedder's weights.
        vectors: By name, the representations (B, d) that were asked for, `embedding` among them.
    """

    terms: dict[str, float]
    norms: dict[str, float]
    gram: np.ndarray
    vectors: dict[str, np.ndarray]


class GradientSampler:
    """Measures batches by a learner as it stands, on one device.

    The loss is a function of the values of the learner's variables: what a step would change, such as moving statistics
    and random states, is dropped. Losses that layers add by `add_loss` are not among the terms.

    Args:
        learner: A built learner.
        vectors: Names of representations that are wanted besides `embedding`.

    Example:
        >>> images, labels = next(iter(batches))
        >>> sample = GradientSampler(learner)(images, labels)
        >>> sorted(sample.norms)
        ['backbone', 'projection']
    """

    def __init__(self, learner: MetricLearner, vectors: Sequence[str] = ()):
        self._learner = learner
        self._names = sorted({"embedding", *vectors})
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

    def __call__(self, images: Any, labels: Any, values: Sequence[np.ndarray] | None = None) -> Sample:
        """Measure a batch.

        Args:
            images: (B, H, W, 3).
            labels: (B,) integers.
            values: Of the trainable and then the other variables, in place of the present ones.
        """
        if values is None:
            values = [_value(variable) for variable in (*self._trained, *self._others)]
        count = len(self._trained)
        terms, vectors, squares, gram = self._run(values[:count], values[count:], images, labels)
        names = [objective.name for objective in self._learner.objectives]
        return Sample(
            dict(zip(names, np.asarray(terms, np.float64).tolist(), strict=True)),
            {part: float(np.sqrt(np.float64(squares[part]))) for part, members in self._parts.items() if members},
            np.asarray(gram, np.float64),
            {name: np.asarray(vector) for name, vector in vectors.items()},
        )

    @property
    def variables(self) -> list:
        """Whose values a call takes: the trainable variables, then the others."""
        return [*self._trained, *self._others]

    def _terms(self, trained, others, images, labels):
        """The weighted terms (T,), and the representations that were asked for."""
        learner = self._learner
        mapping = [*zip(self._trained, trained, strict=True), *zip(self._others, others, strict=True)]
        with keras.StatelessScope(mapping, initialize_variables=False):
            found = learner._with_those_of_objectives(learner(images, training=True), True)
            terms = [self._term(objective, found, labels) for objective in learner.objectives]
        return ops.stack(terms), {name: ops.cast(found[name], "float32") for name in self._names}

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
            terms, vectors = terms_of(own, others, images, labels)
            each = tf.unstack(terms)
        # A gradient of gathered rows lists the rows.
        gradients = [
            [None if found is None else tf.convert_to_tensor(found) for found in tape.gradient(term, own)]
            for term in each
        ]
        del tape
        return (terms, vectors, *summarise(gradients))

    return run if eagerly else tf.function(run, autograph=False)


def _on_jax(terms_of: Callable, summarise: Callable, eagerly: bool) -> Callable:
    import jax

    def run(trained, others, images, labels):
        terms, back, vectors = jax.vjp(lambda own: terms_of(own, others, images, labels), list(trained), has_aux=True)
        gradients = [back(one)[0] for one in jax.numpy.eye(len(terms), dtype=terms.dtype)]
        return (terms, vectors, *summarise(gradients))

    compiled = run if eagerly else jax.jit(run)

    def on_one_device(trained, others, images, labels):
        # Whatever the training is shared out over, this is the work of one device.
        given = [np.asarray(x) for x in (images, labels)]
        labels = given[1].astype(np.int32)
        return compiled(trained, others, given[0], labels)

    return on_one_device


def _value(variable: Any):
    """What a variable holds, on this process's first device."""
    if keras.backend.backend() == "jax":
        return np.asarray(variable.value.addressable_data(0))
    import tensorflow as tf

    return tf.convert_to_tensor(variable.value)
