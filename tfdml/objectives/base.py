"""An objective: one term of the training loss, as a layer from (representations, labels) to a scalar."""

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import integer, number, one_of
from tfdml.losses.base import PairLoss
from tfdml.pairs import pairs_by_name
from tfdml.saving import Composed, SavedByArguments, restore, snake_case


class AutoWeight(Composed):
    """In the place of an objective's `weight`: makes its gradient this share of that of the terms with numbers.

    weight = share / max over the embedder's parts p of  median over the samples of  |grad_p term| / |grad_p base|

    The callback `tfdml.callbacks.AutoWeights` measures it in the first steps; see
    `tfdml.models.auto_weights.WeightMeasurement` for the rule.

    Args:
        share: The length of the weighted term's gradient, as a share of the base's. By default 0.03: where 0.3 cost
            energy confusion and density points on unseen classes, 0.03 gained some or left them (docs/small_runs.md).
        steps: The weight is measured during this many steps, and stays as it is from then on.

    Raises:
        ValueError: `share` is not a positive number, or `steps` not a positive integer.

    Example:
        >>> objectives = [ContrastiveLoss(), EnergyConfusion(weight=AutoWeight(share=0.25))]
        >>> MetricLearner(embedder, objectives).term_weights()  # before the first step
        {'contrastive_loss': 1.0, 'energy_confusion': 0.0}
    """

    def __init__(self, share=0.03, steps=100):
        self.share = number("share", share, above=0)
        self.steps = integer("steps", steps, at_least=1)


class Objective(SavedByArguments, keras.layers.Layer):
    """One weighted term of a `MetricLearner`'s loss.

    Called as `objective(representations, labels)` with the dict that `Embedder.represent` returns; the result is the
    term's value, unweighted (the learner multiplies it by `weight`). An objective is a layer, so that weights of its
    own (proxies, projections ...) are trained, checkpointed and saved with the learner.

    A subclass names the representations that it `reads`, and defines one of

    - `compute_pairs(pairs)`: a scalar from the pairs of the batch;
    - `compute(representations, labels)`: one value per image, (B,), with `per_image = True`. Nothing is gathered
      across replicas then.

    It may also define `represent(representations)`, its work on each image alone. What else an objective may do is in
    `Calibrated`, `Stateful`, `Observed` and `WithStatistics`.

    Args:
        weight: The factor of this term in the learner's loss: a number, or an `AutoWeight` for one that is measured.
        name: The term's name in logs; by default that of the class, as `energy_confusion`.

    Attributes:
        per_image: Whether `compute` gives one value per image.
        reduction: `"mean"` or `"sum"`, of the values per image.
        representation: The name of the representation that it reads, where it reads one.
        whole_batch: Whether `compute_pairs` needs all anchors of the batch. By default it returns the part of the value
            that the given anchors make up, and the parts of all replicas add up.
        learns_from: The pairs of images that it learns from, of one class (`"positive"`) or of two (`"negative"`); a
            batch without any would teach it nothing.
        provides: The names of the representations that `represent` adds.

    Raises:
        ValueError: `weight` is negative or not finite, or a representation that the objective reads is missing.
    """

    per_image = False
    whole_batch = False
    reduction = "mean"
    representation = "embedding"
    learns_from: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()

    def __init__(self, weight=1.0, name=None, **kwargs):
        # Losses are float32 under every dtype policy.
        name = name or snake_case(type(self).__name__).removesuffix("_loss")
        super().__init__(name=name, **{**kwargs, "dtype": "float32"})
        weight = restore(weight)
        self.weight = weight if isinstance(weight, AutoWeight) else number("weight", weight, at_least=0)

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the representations that the value needs; by default `representation` alone."""
        return (self.representation,)

    def build_from(self, shapes: dict) -> None:
        """Create weights for representations of these shapes; by default none."""

    def build(self, representations_shape, labels_shape=None):
        """Create weights on first use."""
        self.build_from(representations_shape)

    def represent(self, representations, training=None) -> dict:
        """Compute further representations of each image from its own; by default none."""
        return {}

    def compute(self, representations, labels):
        """Compute one value per image, (B,), if `per_image`."""
        raise TypeError(f"{type(self).__name__} must define compute(representations, labels)")

    def compute_pairs(self, pairs):
        """Compute the unweighted value, or the part of it that the anchors make up.

        Args:
            pairs: `tfdml.pairs.Pairs` of each representation that the objective reads, by name.
        """
        raise TypeError(f"{type(self).__name__} must define compute_pairs(pairs)")

    def __call__(self, representations, labels, **kwargs):
        """Compute the unweighted value, a scalar, of labels in any form that `as_labels` takes."""
        # Made integers before Keras converts them: it would cast float ids to float32, and on JAX cut off 64-bit ones.
        if not isinstance(labels, keras.KerasTensor):
            labels = self.as_labels(labels)
        return super().__call__(representations, labels, **kwargs)

    def call(self, representations, labels, training=None):
        """Compute the unweighted value, a scalar."""
        available = {**representations, **self.represent(representations, training=training)}
        selected, labels = self.select(available), self.as_labels(labels)
        stateful = training and isinstance(self, Stateful)
        if stateful:
            self.update(selected, labels)
        value = self.value_of(selected, labels)
        if stateful:
            self.remember(selected, labels)
        return value

    def value_of(self, representations, labels):
        """Compute the unweighted value, a scalar, of a whole batch on one device.

        Args:
            representations: Those that the objective reads.
            labels: Integers, as `as_labels` returns them.
        """
        if self.per_image:
            return self.reduce(self.compute(representations, labels))
        return self.compute_pairs(pairs_by_name(representations, labels, self.positives))

    @property
    def positives(self):
        """Which images belong together, as its `loss` has them (`PairLoss.with_positives`); None for equal labels."""
        return getattr(getattr(self, "loss", None), "positives", None)

    @property
    def takes_label_sets(self) -> bool:
        """Whether labels may be rows (B, L): whether its `loss` is one over pairs, which may have `positives`."""
        return isinstance(getattr(self, "loss", None), PairLoss)

    def as_labels(self, labels):
        """Labels as integers (B,), or rows (B, L) where there are `positives`.

        Raises:
            ValueError: They are rows, and this objective takes one label for each image.
        """
        if self.positives is None and len(getattr(labels, "shape", ())) == 2 and labels.shape[1] not in (None, 1):
            raise ValueError(f"{self.name} takes one label for each image, not {labels.shape}: see with_positives")
        return pairwise.as_labels(labels, rows=self.positives is not None)

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

    def reduce(self, values):
        """Reduces the values of the images, (B,), to a scalar."""
        return ops.sum(values) if self.reduction == "sum" else pairwise.mean(values)

    def compute_output_spec(self, representations, labels, training=None):
        """Return a float32 scalar."""
        return keras.KerasTensor((), dtype="float32")


class ReducedObjective(Objective):
    """An objective whose values, on one representation, are reduced as the user says.

    Args:
        representation: The name of the representation that it reads.
        reduction: `"mean"` or `"sum"`.
        **kwargs: Those of `Objective`.

    Raises:
        ValueError: `reduction` is not `"mean"` or `"sum"`.
    """

    def __init__(self, representation="embedding", reduction="mean", **kwargs):
        super().__init__(**kwargs)
        self.representation = representation
        self.reduction = one_of(f"{self.name}: reduction", reduction, ("mean", "sum"))


class Calibrated(Objective):
    """An objective that measures the training set before the first step."""

    #: The representation that `calibrate` needs of all training images; None for nothing.
    calibrates_on: str | None = None
    #: What it does until then, for the warning of `MetricLearner.fit`.
    without_calibration = ""

    @property
    def calibrated(self) -> bool:
        """Whether `calibrate` has run, or need not."""
        return True

    def calibrate(self, features, labels) -> None:
        """Measures what stays fixed in training.

        Args:
            features: (N, D) NumPy, the representation `calibrates_on` of the training images, before training.
            labels: (N,) NumPy integers.
        """
        raise TypeError(f"{type(self).__name__} must define calibrate(features, labels)")


class Stateful(Objective):
    """An objective that keeps something of the batches of training, the same on every replica."""

    def update(self, representations, labels) -> None:
        """Update its state before the value of a training step is computed; by default not at all.

        Args:
            representations: Those of the replica's own images if `per_image`, of the global batch otherwise.
            labels: (B,) integers.
        """

    def remember(self, representations, labels) -> None:
        """Keep a batch for those after it, once the value is computed; by default not at all.

        Args:
            representations: Those of the global batch. Not called if `per_image`.
            labels: (B,) integers.
        """

    def forget(self) -> None:
        """Drop what was remembered, as at the start of a run; by default nothing."""


class Observed(Objective):
    """An objective that logs more than its value, as `<name>_<key>`."""

    #: The keys.
    observes: tuple[str, ...] = ()

    def observe(self, pairs) -> dict:
        """Compute what the anchors make up of means over the batch, by the keys of `observes`.

        Args:
            pairs: As of `compute_pairs`.

        Returns:
            For each key the sum over the anchors, and how many values were summed.
        """
        raise TypeError(f"{type(self).__name__} must define observe(pairs)")


class WithStatistics(Objective):
    """An objective whose own statistics train in steps between those of the embedder."""

    #: How many calls of `statistics_step` go before each step of the embedder.
    statistics_steps = 1

    @property
    def statistics_variables(self) -> list:
        """The trainable weights that only `statistics_step` trains."""
        raise TypeError(f"{type(self).__name__} must define statistics_variables")

    def statistics_step(self, pairs):
        """Compute the loss of the `statistics_variables`, a scalar, in a step in which the embedder is fixed.

        The place to update state and metrics too. Called once per step of that phase, with all anchors.
        """
        raise TypeError(f"{type(self).__name__} must define statistics_step(pairs)")
