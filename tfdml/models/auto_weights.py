"""Weights of terms that the first steps of training measure: see `tfdml.objectives.AutoWeight`."""

from __future__ import annotations

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
    the penalties of regularised layers.

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
        self._taken = 0

    def read(self) -> None:
        """Reads the number of steps from the variables, which may have been restored."""
        self._taken = int(ops.convert_to_numpy(self.taken))

    @property
    def due(self) -> bool:
        """Whether the next step is measured."""
        return self._taken in self._measured

    def add(self, ratios) -> None:
        """Keep a sample, (terms, parts); to be called in the step, on every replica with the same."""
        self.ratios.assign(ops.concatenate([self.ratios[1:], ratios[None]], axis=0))

    def count(self) -> None:
        """Close a step; to be called after it, outside of graph and replicas.

        Raises:
            UserError: This was the last one to be measured, and nothing is known of a term.
        """
        if self._taken >= self.steps:
            return
        if self.due:
            self.factors.assign(weights(ops.convert_to_numpy(self.ratios)[-1:], self.shares))
        self._taken += 1
        self.taken.assign(self._taken)
        if self._taken == self.steps:
            self._freeze()

    def _freeze(self) -> None:
        self.factors.assign(weights(ops.convert_to_numpy(self.ratios), self.shares))
        found = self.values()
        silent = [name for name, weight in found.items() if not weight]
        if silent:
            raise UserError(
                f"the weight of {', '.join(silent)} cannot be measured: in the first {self.steps} steps its gradient "
                "in the embedder, or that of the terms with numbers, was zero or not finite; give it a number in the "
                "place of auto, or more steps, such as auto(steps=1000)"
            )
        said = ", ".join(f"{weight:.6g} * {name}" for name, weight in found.items())
        logging.info("weights measured in the first %d steps, which stay from now on: %s", self.steps, said)

    def values(self) -> dict[str, float]:
        """The present weight of each term by its name."""
        factors = ops.convert_to_numpy(self.factors)
        return {name: float(factor) for name, factor in zip(self.names, factors, strict=True)}

    def describe(self) -> dict[str, dict[str, float]]:
        """By term its `weight`, the `share` that was asked for, and `steps`, in how many steps it was measured."""
        self.read()
        return {
            name: {"weight": weight, "share": share, "steps": self._taken}
            for (name, weight), share in zip(self.values().items(), self.shares, strict=True)
        }


def weights(ratios, shares) -> np.ndarray:
    """The weights by what has been measured: see `WeightMeasurement`.

    Args:
        ratios: (samples, terms, parts), the length of a term's gradient beside the base's; 0 does not count.
        shares: (terms,), how long the weighted terms' gradients shall be.

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
        raise ValueError(
            f"auto weights do not go with `gradient_cache={gradient_cache}`, whose chunks keep no gradient of single "
            "terms: measure the weights on smaller batches without it, and write them as numbers"
        )
    if not any(objective.weight for objective in objectives if objective.name not in autos):
        raise ValueError(
            "auto weights are measured beside the terms whose weights are numbers, and none is above 0: give one a "
            "number"
        )
    for objective in objectives:
        if isinstance(objective, WithStatistics):
            raise ValueError(
                f"auto weights do not go with {objective.name}, whose steps alternate with those of its statistics: "
                "write numbers"
            )
        if isinstance(objective, CrossBatchMemory):
            raise ValueError(
                f"auto weights do not go with {objective.name}, whose loss goes on changing as its memory fills: write "
                "numbers, or leave the memory out"
            )


class AutoWeights:
    """A mixin of `keras.Model` whose train function measures weights in the first steps: `WeightMeasurement`.

    A measured step is a compiled function of its own, so that the others cost what they do with numbers. Its update is
    that of any other step; it takes a backward pass more for the base and for each term that is measured.
    """

    #: None where all weights are numbers.
    auto_weights: WeightMeasurement | None = None
    train_function: Any
    _measures = False

    def check_backend(self) -> None:
        """Refuse to train where weights cannot be measured.

        Raises:
            ValueError: There are some, and the backend is not TensorFlow.
        """
        backend = keras.backend.backend()
        if self.auto_weights is not None and backend != "tensorflow":
            raise ValueError(
                f"auto weights are measured on Keras's TensorFlow backend, and this is {backend}: write numbers"
            )

    def train_step(self, *args):
        """Keras's step, or one that is measured."""
        if not self._measures:
            return super().train_step(*args)  # type: ignore[misc]
        images, y, sample_weight = keras.utils.unpack_x_y_sample_weight(args[0])
        return _measured_step(self, images, y, sample_weight)

    def make_train_function(self, force=False):
        """Keras's hook: what runs one step.

        Raises:
            ValueError: Weights are to be measured where they cannot be.
        """
        measurement = self.auto_weights
        if measurement is None:
            return super().make_train_function(force)  # type: ignore[misc]
        self.check_backend()
        if self.steps_per_execution != 1:  # type: ignore[attr-defined]
            raise ValueError("steps_per_execution must be 1 where auto weights are measured step by step")
        if self.train_function is None or force:
            functions = []
            for _ in range(2):
                super().make_train_function(force=True)  # type: ignore[misc]
                functions.append(self.train_function)
            self.train_function = self._measured_first(measurement, *functions)
        measurement.read()
        return self.train_function

    def _measured_first(self, measurement: WeightMeasurement, plain, measured):
        def step(*args):
            self._measures = measurement.due
            try:
                result = (measured if self._measures else plain)(*args)
            finally:
                self._measures = False
            measurement.count()
            return result

        return step

    def get_metrics_result(self):
        """Keras's hook: the metrics, and the measured weights as `<name>_weight`."""
        results = super().get_metrics_result()  # type: ignore[misc]
        if self.auto_weights is None:
            return results
        factors = ops.convert_to_tensor(self.auto_weights.factors)
        return {**results, **{f"{name}_weight": factors[i] for i, name in enumerate(self.auto_weights.names)}}

    def weight_of(self, objective):
        """The factor of an objective: a number, or a scalar where it is measured."""
        if self.auto_weights is None or objective.name not in self.auto_weights.names:
            return objective.weight
        return self.auto_weights.factors[self.auto_weights.names.index(objective.name)]

    def term_weights(self) -> dict[str, float]:
        """The present factor of each term by its name; 0 for one that has not been measured yet."""
        return {o.name: float(ops.convert_to_numpy(self.weight_of(o))) for o in self.objectives}  # type: ignore[attr-defined]


def _measured_step(learner: Any, images, y, sample_weight):
    import tensorflow as tf

    optimizer, measurement = learner.optimizer, learner.auto_weights
    labels = learner._labels(y, sample_weight)
    with tf.GradientTape(persistent=True) as tape:
        representations = learner._with_those_of_objectives(learner(images, training=True), True)
        terms = learner.terms_of(representations, labels, training=True)
        loss = learner.sum_of(terms)
        learner._loss_tracker.update_state(loss * replicas.count(), sample_weight=tf.shape(images)[0])
        shares = {o.name: share for o, (share, _) in zip(learner.objectives, terms, strict=True)}
        numbers = [o.weight * shares[o.name] for o in learner.objectives if o.name not in measurement.names]
        # Scaled alike, so that no gradient vanishes in half precision.
        compared = [tf.add_n(numbers), *(shares[name] for name in measurement.names)]
        loss, *compared = [optimizer.scale_loss(value) for value in (loss, *compared)]
    parts = learner.embedder.parts()
    base, *others = [_lengths(tape, value, [parts[name] for name in PARTS]) for value in compared]
    measurement.add(tf.stack([_beside(lengths, base) for lengths in others]))
    trained = learner.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained, strict=True))
    return learner.compute_metrics(images, y, representations)


def _lengths(tape, value, parts: list):
    """The length of a value's gradient in each part, of the global batch."""
    import tensorflow as tf

    variables = [variable for members in parts for variable in members]
    found = tape.gradient(value, variables)
    pairs = zip(found, variables, strict=True)
    found = replicas.total([tf.zeros(v.shape) if g is None else tf.convert_to_tensor(g) for g, v in pairs])
    squares = iter([tf.reduce_sum(tf.square(gradient)) for gradient in found])
    return tf.stack([tf.sqrt(sum([next(squares) for _ in members], tf.zeros(()))) for members in parts])


def _beside(lengths, base):
    """The one beside the other by parts; 0 where either is zero or not finite."""
    import tensorflow as tf

    ratio = tf.math.divide_no_nan(lengths, base)
    return tf.where(tf.math.is_finite(lengths) & tf.math.is_finite(base) & tf.math.is_finite(ratio), ratio, 0.0)
