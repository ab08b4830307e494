"""An objective: one term of the training loss, as a layer from (representations, labels) to a scalar."""

from __future__ import annotations

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import number
from tfdml.objectives.auto_weight import AutoWeight
from tfdml.saving import SavedByArguments, in_words, restore


class Objective(SavedByArguments, keras.layers.Layer):
    """One weighted term of a `MetricLearner`'s loss.

    Called as `objective(representations, labels)` with the dict that `Embedder.represent` returns; the result is
    the term's value, unweighted (the learner multiplies it by `weight`). An objective is a layer, so that weights
    of its own (proxies, projections ...) are trained, checkpointed and saved with the learner.

    A subclass says which representations it `reads`, and defines

    - `represent(representations)`: its work on each image alone, as further named representations (optional). It runs
      on each replica before anything is gathered.
    - `compute(representations, labels)`: the value. With `per_image = True` it returns one value per image, (B,), from
      the replica's own images, and nothing is gathered; otherwise a scalar, from the images of the global batch.

    Args:
        weight: The factor of this term in the learner's loss: a number, or an `AutoWeight` for one that is measured.
        name: The term's name in logs.

    Raises:
        ValueError: `weight` is negative or not finite, or a representation that the objective reads is missing.
    """

    per_image = False
    reduction = "mean"
    #: The representation that `calibrate` wants of all training images before the first step; None for nothing.
    calibrates_on: str | None = None
    #: What it does until then, for the warning of `MetricLearner.fit`.
    without_calibration = ""
    #: How many calls of `statistics_step` go before each step of the embedder; 0 for an objective without that phase.
    statistics_steps = 0
    #: The pairs of images that it learns from, of one class ("positive") or of two ("negative"); a batch without any
    #: would teach it nothing.
    learns_from: tuple[str, ...] = ()
    #: What `observe` tells, by name.
    observes: tuple[str, ...] = ()

    def __init__(self, weight=1.0, name=None, **kwargs):
        # Losses are float32 under every dtype policy.
        super().__init__(name=name, **{**kwargs, "dtype": "float32"})
        weight = restore(weight)
        self.weight = weight if isinstance(weight, AutoWeight) else number("weight", weight, at_least=0)

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the representations that `compute` needs."""
        return ("embedding",)

    @property
    def provides(self) -> tuple[str, ...]:
        """The names of the representations that `represent` adds."""
        return ()

    def build_from(self, shapes: dict) -> None:
        """Create weights for representations of these shapes; by default there are none."""
        del shapes

    def build(self, representations_shape, labels_shape=None):
        """Keras's hook: create weights on first use."""
        del labels_shape
        self.build_from(representations_shape)

    def represent(self, representations, training=None) -> dict:
        """Further representations of each image, from its own ones; by default none."""
        del representations, training
        return {}

    @property
    def divides(self) -> bool:
        """Whether `compute` within `pairwise.only_rows` gives the part of the value that these rows make up.

        The parts of all replicas then add up to the value, and none computes more than its own.
        """
        return False

    @property
    def calibrated(self) -> bool:
        """Whether all is known that `calibrate` measures; an objective that cannot tell says yes."""
        return True

    def calibrate(self, features, labels) -> None:
        """Measure on the training set, before the first step, what stays fixed in training; by default nothing.

        Args:
            features: (N, D) NumPy, the representation `calibrates_on` of the training images, before training.
            labels: (N,) NumPy integers.
        """
        del features, labels

    @property
    def statistics_variables(self) -> list:
        """The trainable weights that only `statistics_step` trains; by default none."""
        return []

    def statistics_step(self, representations, labels):
        """The loss of the `statistics_variables`, a scalar, in a step in which the embedder is fixed.

        Called by the learner once per step of that phase, with the representations and labels of the global batch; the
        place to update state and metrics too.
        """
        raise TypeError(f"{type(self).__name__} must define statistics_step()")

    def follow(self, representations, labels) -> None:
        """Update what the objective keeps of the batches that it sees; by default nothing.

        Called before `compute`, in training steps alone, with the same arguments: those of the replica's own images
        when `per_image`, of the global batch otherwise. What is kept has to come out the same on every replica.
        """
        del representations, labels

    def compute(self, representations, labels):
        """The unweighted value: a scalar, or (B,) when `per_image`."""
        raise TypeError(f"{type(self).__name__} must define compute()")

    def remember(self, representations, labels) -> None:
        """Take note of a batch for those after it; by default nothing.

        Called by the learner in training, once per step of the embedder and after `compute`, with the representations
        and labels of the global batch, on every replica the same.
        """
        del representations, labels

    def forget(self) -> None:
        """Drop what was remembered, as at the start of a run; by default nothing."""

    def observe(self, representations, labels) -> dict:
        """What is worth logging beside the value, which the learner reports as `<name>_<key>`; by default nothing.

        Args:
            representations: As of `compute`, of the global batch.
            labels: (B,) integers.

        Returns:
            For each of `observes` a mean over the batch, a scalar, and how many values it is the mean of.
        """
        del representations, labels
        return {}

    def __call__(self, representations, labels, **kwargs):
        """The unweighted value, a scalar, of labels in any form that `as_labels` takes."""
        # Made integers before Keras converts them: it would cast float ids to float32, and on JAX cut off 64-bit ones.
        if not isinstance(labels, keras.KerasTensor):
            labels = self.as_labels(labels)
        return super().__call__(representations, labels, **kwargs)

    def call(self, representations, labels, training=None):
        """The unweighted value, a scalar."""
        available = {**representations, **self.represent(representations, training=training)}
        selected, labels = self.select(available), self.as_labels(labels)
        if training:
            self.follow(selected, labels)
        value = self.reduce(self.compute(selected, labels))
        if training:
            self.remember(selected, labels)
        return value

    @property
    def positives(self):
        """What says which images belong together (`EmbeddingLoss.with_positives`); None for the equality of labels."""
        return None

    @property
    def takes_label_sets(self) -> bool:
        """Whether labels may be rows (B, L), where the objective's loss has `positives`."""
        return False

    def as_labels(self, labels):
        """Labels as `compute` takes them: integers (B,), or rows (B, L) where there are `positives`.

        Raises:
            ValueError: They are rows, and this objective takes one label for each image.
        """
        with pairwise.positives_by(self.positives):
            if self.positives is None and len(getattr(labels, "shape", ())) == 2 and labels.shape[1] not in (None, 1):
                raise ValueError(
                    f"{self.name} takes one label for each image, not labels {tuple(labels.shape)}: "
                    + (
                        f"give it {type(self.loss).__name__}(...).with_positives(...)"
                        if self.takes_label_sets
                        else "only MetricLoss and CrossBatchMemory of a loss over pairs take label sets"
                    )
                )
            return pairwise.as_labels(labels)

    def select(self, representations) -> dict:
        """Those that this objective reads.

        Raises:
            ValueError: One is missing.
        """
        missing = [name for name in self.reads if name not in representations]
        if missing:
            hint = " ('class' comes from a ProxyLoss: add one, before this objective)" if "class" in missing else ""
            raise ValueError(
                f"{self.name} needs the representation {missing[0]!r}, but there are only "
                f"{', '.join(sorted(representations))}{hint}"
            )
        return {name: representations[name] for name in self.reads}

    def reduce(self, value):
        """The scalar of what `compute` returns."""
        if len(value.shape) == 0:
            return value
        return ops.sum(value) if self.reduction == "sum" else pairwise.mean(value)

    def compute_output_spec(self, representations, labels, training=None):
        """A float32 scalar."""
        return keras.KerasTensor((), dtype="float32")

    def __repr__(self):
        return in_words(self)
