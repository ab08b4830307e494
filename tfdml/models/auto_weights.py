"""Weights of terms that the first steps of training measure: see `tfdml.objectives.AutoWeight`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from absl import logging
from keras import ops

from tfdml import replicas
from tfdml.errors import UserError
from tfdml.objectives import AutoWeight, CrossBatchMemory, WithStatistics

# The parts of the embedder in which gradients are compared.
PARTS = ("backbone", "projection")
# As many of the steps are measured, at equal distances.
_SAMPLES = 10


class AutoWeights(keras.callbacks.Callback):
    """Measures the weights of the terms that have an `AutoWeight`, in the first steps of `fit`.

        learner.fit(batches, epochs=12, callbacks=[tfdml.callbacks.AutoWeights()])

    `WeightMeasurement` has the rule. A measured step is a compiled function of its own, so that the others cost what
    they do with numbers. Its update is that of any other step. It takes a backward pass more for the base and for each
    term that is measured. Each step and epoch logs the weights as `<name>_weight`. What is measured is a part of the
    learner, saved and loaded with it.

    Raises:
        ValueError: The learner has no `AutoWeight`, or its steps cannot be measured one by one.
        UserError: After the last measured step: a term had no gradient.

    Example:
        >>> objectives = [ContrastiveLoss(), EnergyConfusion(weight=AutoWeight(steps=2))]
        >>> learner = MetricLearner(embedder, objectives)
        >>> learner.compile("adam")
        >>> history = learner.fit(batches, steps_per_epoch=2, callbacks=[AutoWeights()])
        >>> learner.term_weights() == {"contrastive_loss": 1.0, **learner.auto_weights.values()}
        True
    """

    def __init__(self):
        super().__init__()
        self._plain: Any = None
        self._measured: Any = None
        self._used: dict[str, float] = {}

    @classmethod
    def of(cls, learner: Any) -> list[AutoWeights]:
        """Return the callbacks that measure a learner's weights: one of these, or none where all are numbers."""
        return [] if learner.auto_weights is None else [cls()]

    def on_train_begin(self, logs=None):
        """Compile a second step, which measures."""
        learner: Any = self.model
        if learner.auto_weights is None:
            raise ValueError("no objective has an AutoWeight: leave the callback AutoWeights out")
        learner.auto_weights.check_backend()
        if learner.steps_per_execution != 1:
            raise ValueError("steps_per_execution must be 1 where auto weights are measured step by step")
        learner.auto_weights.read()
        plain = learner.train_function
        if isinstance(owner := getattr(plain, "__self__", None), AutoWeights):
            plain = owner._plain  # of a `fit` that was interrupted
        if self._plain is not plain:
            self._plain, self._measured = plain, learner.compiled_step()
        learner.train_function = self._step

    def _step(self, *args):
        learner: Any = self.model
        learner.measures, self._used = learner.auto_weights.due, learner.auto_weights.values()
        try:
            result = (self._measured if learner.measures else self._plain)(*args)
        finally:
            learner.measures = False
        learner.auto_weights.count()
        return result

    def on_train_batch_end(self, batch, logs=None):
        """Log the weights that the step has used."""
        _log(self._used, logs)

    def on_epoch_end(self, epoch, logs=None):
        """Log the present weights."""
        _log(self.model.auto_weights.values(), logs)

    def on_train_end(self, logs=None):
        """Leave the learner with its ordinary step."""
        self.model.train_function = self._plain


class WeightMeasurement(keras.layers.Layer):
    """The weights of the terms that have an `AutoWeight`, and what has been measured for them.

    The base is the weighted sum of the terms whose weights are numbers. In step 0, K/10, 2K/10 ... 9K/10 of the first K
    (every step where K < 10), the gradients of the base and of each such term, unweighted, are taken with respect to
    the trainable variables of the embedder's two parts, the backbone and the projection, summed over replicas. In part
    p the ratio of the term is |grad_p term| / |grad_p base|, Euclidean lengths over all variables of the part. Then

        weight = share / max over p of  median over the samples of  the ratio in p

    where a sample counts in p if both gradients are finite and not zero there, and p if any does. So the weighted term
    reaches `share` in the part where its ratio is largest, and less in the other. This weight holds after the K steps,
    for good. Until then it is that of the newest sample alone, as the base's gradient may fall fast at first; in step
    0, and after a sample in which the term or the base had no gradient, it is 0.

    Variables of the objectives themselves, such as proxies or projections of moments, count in neither gradient, nor do
    the penalties of regularized layers.

    Args:
        objectives: Those of the learner.
        gradient_cache: The learner's.

    Raises:
        ValueError: No term has a number above 0, two ask for different numbers of steps, one cannot be measured, or
            gradients are cached.
    """

    def __init__(self, objectives, gradient_cache=0, name="auto_weights"):
        super().__init__(name=name, dtype="float32")
        chosen = [objective for objective in objectives if isinstance(objective.weight, AutoWeight)]
        self.names = [objective.name for objective in chosen]
        _check(objectives, self.names, gradient_cache)
        steps = {objective.weight.steps for objective in chosen}
        if len(steps) > 1:
            raise ValueError(f"auto weights are measured together: give all the same steps, not {sorted(steps)}")
        self.shares = [objective.weight.share for objective in chosen]
        (self.steps,) = steps
        samples = min(_SAMPLES, self.steps)
        self._measured = {i * self.steps // samples for i in range(samples)}

        def state(name, shape, dtype="float32"):
            return self.add_weight(name=name, shape=shape, dtype=dtype, initializer="zeros", trainable=False)

        # 0: not measured. The newest sample stands last.
        self.ratios = state("ratios", (samples, len(chosen), len(PARTS)))
        self.factors = state("factors", (len(chosen),))
        self.taken = state("taken", (), "int32")
        self.built = True
        self._taken, self._known = 0, [0.0] * len(self.names)

    def read(self) -> None:
        """Read the number of steps and the weights from the variables, which may have been restored."""
        self._taken = int(ops.convert_to_numpy(self.taken))
        self._known = [float(factor) for factor in ops.convert_to_numpy(self.factors)]

    def check_backend(self) -> None:
        """Refuse to train where weights cannot be measured.

        Raises:
            ValueError: The backend is not TensorFlow.
        """
        backend = keras.backend.backend()
        if backend != "tensorflow":
            raise ValueError(f"auto weights need Keras's TensorFlow backend, and this is {backend}: write numbers")

    @property
    def done(self) -> bool:
        """Whether the weights stay as they are."""
        self.read()
        return self._taken >= self.steps

    @property
    def due(self) -> bool:
        """Whether the next step is measured."""
        return self._taken in self._measured

    def add(self, tape, base, terms: Sequence[Any], parts: dict[str, list]) -> None:
        """Measure a sample, within the step, on every replica.

        Args:
            tape: A persistent `tf.GradientTape` that has recorded this replica's part of the terms.
            base: The weighted sum of the terms with numbers.
            terms: Those that are measured, in the order of `names`.
            parts: The trainable variables by part, as of `Embedder.parts`.
        """
        variables = [parts[name] for name in PARTS]
        base, *others = [_lengths(tape, value, variables) for value in (base, *terms)]
        ratios = ops.stack([_beside(lengths, base) for lengths in others])
        self.ratios.assign(ops.concatenate([self.ratios[1:], ratios[None]], axis=0))

    def weight_of(self, name: str):
        """Return the present weight of a term, a scalar tensor; None where it is a number."""
        return self.factors[self.names.index(name)] if name in self.names else None

    def count(self) -> None:
        """Close a step; to be called after it, outside of graph and replicas.

        Raises:
            UserError: This was the last one to be measured, and nothing is known of a term.
        """
        if self._taken >= self.steps:
            return
        if self.due:
            self._set(ops.convert_to_numpy(self.ratios)[-1:])
        self._taken += 1
        self.taken.assign(self._taken)
        if self._taken == self.steps:
            self._freeze()

    def _set(self, ratios) -> None:
        self.factors.assign(weights(ratios, self.shares))
        self._known = [float(factor) for factor in ops.convert_to_numpy(self.factors)]

    def _freeze(self) -> None:
        self._set(ops.convert_to_numpy(self.ratios))
        found = self.values()
        silent = [name for name, weight in found.items() if not weight]
        if silent:
            raise UserError(f"the weight of {', '.join(silent)} cannot be measured, as gradients were 0: write one")
        said = ", ".join(f"{weight:.6g} * {name}" for name, weight in found.items())
        logging.info("weights measured in the first %d steps, which stay from now on: %s", self.steps, said)

    def values(self) -> dict[str, float]:
        """Return the present weight of each term by its name."""
        return dict(zip(self.names, self._known, strict=True))

    def describe(self) -> dict[str, dict[str, float]]:
        """By term its `weight`, the `share` that was asked for, and `steps`, in how many steps it was measured."""
        self.read()
        return {
            name: {"weight": weight, "share": share, "steps": self._taken}
            for (name, weight), share in zip(self.values().items(), self.shares, strict=True)
        }


def _log(values: dict[str, float], logs: dict | None) -> None:
    if logs is not None:
        logs.update({f"{name}_weight": value for name, value in values.items()})


def weights(ratios, shares) -> np.ndarray:
    """Return the weights by what has been measured: see `WeightMeasurement`.

    Args:
        ratios: (samples, terms, parts), the length of a term's gradient relative to the base's; 0 does not count.
        shares: (terms,), how long the weighted terms' gradients are to be.

    Returns:
        (terms,), 0 where nothing was measured.

    Example:
        >>> weights([[[0.1, 0.0]], [[0.3, 0.0]], [[0.2, 0.0]]], [0.3])  # the second part does not learn from it
        array([1.5])
    """
    found = np.zeros(len(shares))
    for term, share in enumerate(shares):
        columns = np.asarray(ratios, np.float64)[:, term].T
        medians = [np.median(column[column > 0]) for column in columns if np.any(column > 0)]
        if medians:
            found[term] = share / max(medians)
    return found


def _check(objectives, autos: list[str], gradient_cache: int) -> None:
    if gradient_cache:
        raise ValueError(f"auto weights do not go with `gradient_cache={gradient_cache}`: write numbers")
    if not any(objective.weight for objective in objectives if objective.name not in autos):
        raise ValueError("auto weights are measured relative to terms whose weights are numbers: give one a number")
    for objective in objectives:
        if isinstance(objective, WithStatistics):
            raise ValueError(f"auto weights do not go with the statistics of {objective.name}: write numbers")
        if isinstance(objective, CrossBatchMemory):
            raise ValueError(f"auto weights do not go with the memory of {objective.name}: write numbers")


def _lengths(tape, value, parts: list):
    """Return the length of a value's gradient in each part, of the global batch."""
    import tensorflow as tf

    variables = [variable for members in parts for variable in members]
    found = tape.gradient(value, variables)
    pairs = zip(found, variables, strict=True)
    found = replicas.total([tf.zeros(v.shape) if g is None else tf.convert_to_tensor(g) for g, v in pairs])
    squares = iter([tf.reduce_sum(tf.square(gradient)) for gradient in found])
    return tf.stack([tf.sqrt(sum([next(squares) for _ in members], tf.zeros(()))) for members in parts])


def _beside(lengths, base):
    """Return the ratio of the two by parts; 0 where either is zero or not finite."""
    import tensorflow as tf

    ratio = tf.math.divide_no_nan(lengths, base)
    return tf.where(tf.math.is_finite(lengths) & tf.math.is_finite(base) & tf.math.is_finite(ratio), ratio, 0.0)
