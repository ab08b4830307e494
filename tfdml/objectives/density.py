"""Density adaptivity: learned targets for how far each class spreads (DML-DA)."""

from __future__ import annotations

import keras
import numpy as np
from keras import ops

from tfdml import pairwise
from tfdml.arguments import boolean, integer, number, one_of
from tfdml.objectives.base import Calibrated, Observed
from tfdml.objectives.class_statistics import class_index, means_and_spreads, of_own_class

CONSTRAINTS = ("soft", "hard", None)


def class_densities(features, labels, num_classes):
    """The mean squared distance of each class's images to their mean, in float64 (eq. 5).

    Args:
        features: (N, D).
        labels: (N,) integers in 0 .. C - 1.
        num_classes: C.

    Returns:
        (C,) float32; 0 for classes of one image or none.

    Raises:
        ValueError: The shapes do not fit, a label is out of range, or a feature is not finite.

    Example:
        >>> class_densities(np.array([[0.0], [2.0], [5.0]]), np.array([0, 0, 1]), 3)
        array([1., 0., 0.], dtype=float32)
    """
    features, labels = np.asarray(features), np.asarray(labels)
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(f"expected features (N, D) and labels (N,), got {features.shape} and {labels.shape}")
    if labels.size and (labels.min() < 0 or labels.max() >= num_classes):
        raise ValueError(f"labels must lie in 0 .. {num_classes - 1}, but reach {labels.min()} .. {labels.max()}")
    if not np.isfinite(features).all():
        raise ValueError("features must be finite numbers")
    densities = np.zeros(num_classes, np.float32)
    order = np.argsort(labels, kind="stable")
    # One class at a time: 60,000 images of 1,024 features never exist in float64 at once.
    for rows in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1) if labels.size else ():
        members = features[rows].astype(np.float64)
        densities[labels[rows[0]]] = np.mean(np.sum((members - members.mean(axis=0)) ** 2, axis=1))
    return densities


@keras.saving.register_keras_serializable("tfdml")
class DensityAdaptivity(Calibrated, Observed):
    """The density regulariser: each class spreads towards a learned target, and the targets grow.

    L = (1/C) sum over classes c of (D_c - a_c)^2 - (1/C) sum over c of a_c
      + (1/C^2) sum over ordered pairs of classes (c, k) of (R_k^eta a_c - R_c^eta a_k)^2,

    D_c = (1/n_c) sum over the images i of c of |x_i - mu_c|^2

    over the C classes of the batch, with mu_c the mean of the class in the batch, a_c its target (a weight, one for
    each training class), and R_c its reference density: D_c of the pooled features of the initial network over the
    whole training set, which says how far the class spreads by nature. The last sum keeps the targets in the ratio of
    R^eta. Only together with a metric loss does the spread stay bounded:

        objectives = [MetricLoss(ContrastiveLoss(reduction="sum")), DensityAdaptivity(num_classes=98, weight=10.0)]

    The reference densities are measured by one pass over the training images before the first step (by
    `MetricLearner.calibrate`, which the command line calls itself), or given. A class whose reference density is 0, for
    want of two different images, takes no part in the constraint; nor does any before they are measured, which makes
    the objective that of `constraint=None`.
    R is in squared units of the features, so that the weight of the constraint depends on the backbone:
    `normalize_reference` divides R by its mean.

    Logged by the learner beside the value itself, as means over the classes of the batches: `<name>_d_avg`, D_c, and
    `<name>_target`, a_c.

    A class with one image in the batch has D_c = 0, as in the formula: sample several images of each class. A label
    outside 0 .. num_classes - 1 makes the value NaN, so that the mistake cannot pass unseen.

    Args:
        num_classes: The number of training classes.
        eta: How far the ratios of the reference densities count; 0 makes all targets alike.
        initial_target: Where every a_c starts (the mean of them, if the constraint is hard).
        reference_density: R, (num_classes,), not negative; None leaves it to `calibrate`.
        constraint: `"soft"`: eq. 8, above; `"hard"`: eq. 7, whose constraint holds exactly, a_c = s R_c^eta with one
            learned s; None: eq. 6, the paper's DML-DA^- (its figure 3).
        learn_targets: False keeps the targets where they start.
        normalize_reference: Divide R by its mean over the classes; the paper does not.
        representation: The representation whose density it is.
        reduction: `"mean"`, the formula above and the paper's; `"sum"` leaves 1/C and 1/C^2 out.
        weight: lambda; the paper uses 10, beside base losses that are sums.
        name: The term's name in logs.

    Raises:
        ValueError: An argument is out of range, or `reference_density` does not fit.

    Example:
        >>> objective = DensityAdaptivity(num_classes=2, constraint=None)
        >>> embeddings = keras.ops.array([[1.0, 0.0], [-1.0, 0.0]])  # D = 1, a = 0.5
        >>> float(objective({"embedding": embeddings}, keras.ops.array([1, 1])))
        -0.25

    Source: Li et al., "Deep Metric Learning with Density Adaptivity", 2019, eq. 5 to 9 and sec. IV-A.
    """

    learns_from = ("positive",)
    observes = ("d_avg", "target")

    def __init__(
        self,
        num_classes,
        eta=0.5,
        initial_target=0.5,
        reference_density=None,
        constraint="soft",
        learn_targets=True,
        normalize_reference=False,
        representation="embedding",
        reduction="mean",
        weight=1.0,
        name="density_adaptivity",
        **kwargs,
    ):
        super().__init__(weight=weight, name=name, **kwargs)
        if constraint not in CONSTRAINTS:
            raise ValueError(f"{self.name}: constraint must be 'soft', 'hard' or None, not {constraint!r}")
        one_of(f"{self.name}: reduction", reduction, ("mean", "sum"))
        self.num_classes = integer("num_classes", num_classes, at_least=1)
        self.eta = number("eta", eta, at_least=0)
        self.initial_target = number("initial_target", initial_target, above=0)
        self.reference_density = self._check_reference(reference_density)
        self.constraint = constraint
        self.learn_targets = boolean("learn_targets", learn_targets)
        self.normalize_reference = boolean("normalize_reference", normalize_reference)
        self.representation = representation
        self.reduction = reduction
        if constraint and reference_density is None:
            self.calibrates_on = "pooled"

    without_calibration = "no reference density is known, so that classes have no constraint: eq. 6, not eq. 8"

    @property
    def calibrated(self):
        """Whether a reference density is known, if a constraint needs any."""
        if self.calibrates_on is None:
            return True
        return self.built and bool(ops.convert_to_numpy(self.measured_density).any())

    def _check_reference(self, given):
        if given is None:
            return None
        reference = np.asarray(given, np.float32)
        if reference.shape != (self.num_classes,):
            raise ValueError(
                f"{self.name}: reference_density must have shape ({self.num_classes},), not {reference.shape}"
            )
        if not np.all(np.isfinite(reference) & (reference >= 0)):
            raise ValueError(f"{self.name}: reference_density must be finite and not negative")
        return reference

    def build_from(self, shapes):
        """Create the targets, and the place of the reference densities."""
        del shapes
        self.target_density = self.add_weight(
            name="target_density",
            shape=() if self.constraint == "hard" else (self.num_classes,),
            initializer=keras.initializers.Constant(self.initial_target),
            trainable=self.learn_targets,
        )
        if self.constraint:
            known = 0.0 if self.reference_density is None else self.reference_density
            self.measured_density = self.add_weight(
                name="measured_density",
                shape=(self.num_classes,),
                initializer=keras.initializers.Constant(known),
                trainable=False,
            )

    def calibrate(self, features, labels):
        """Measure the reference densities; without effect if they are given or no constraint needs them.

        Args:
            features: (N, D) NumPy, the pooled features of the training images, by the untrained embedder.
            labels: (N,) NumPy integers.

        Raises:
            ValueError: The shapes do not fit, a label is out of range, or a feature is not finite.
        """
        if self.calibrates_on is None:
            return
        if not self.built:
            self.build({})
        self.measured_density.assign(class_densities(features, labels, self.num_classes))

    def ratios(self):
        """R^eta, (num_classes,); 0 where no reference density is known."""
        reference = ops.convert_to_tensor(self.measured_density)
        known = reference > 0
        if self.normalize_reference:
            mean = pairwise.masked_mean(reference, known)
            reference = reference / ops.where(mean > 0, mean, 1.0)
        return ops.where(known, ops.power(ops.where(known, reference, 1.0), self.eta), 0.0)

    def targets(self):
        """The target of every training class, (num_classes,)."""
        if self.constraint != "hard":
            return ops.convert_to_tensor(self.target_density)
        ratios = self.ratios()
        mean = pairwise.masked_mean(ratios, ratios > 0)
        return self.target_density * ops.where(ratios > 0, ratios / ops.where(mean > 0, mean, 1.0), 1.0)

    def compute_pairs(self, pairs):
        """Computes the value for the classes of the batch."""
        batch = pairs[self.representation]
        labels = batch.labels
        _, densities = means_and_spreads(batch.references, labels)
        targets = of_own_class(self.targets(), labels)
        _, first = class_index(labels)
        count = ops.maximum(pairwise.masked_count(first), 1.0) if self.reduction == "mean" else 1.0
        costs = ops.square(densities - targets) - targets
        value = pairwise.masked_sum(batch.of_anchors(costs), batch.of_anchors(first)) / count
        if self.constraint != "soft":
            return value
        ratios = of_own_class(self.ratios(), labels)
        counted = ops.logical_and(first, ratios != 0)
        own_ratios, own_targets, own_counted = (batch.of_anchors(x)[:, None] for x in (ratios, targets, counted))
        gaps = ratios[None, :] * own_targets - own_ratios * targets[None, :]
        both = ops.logical_and(own_counted, counted[None, :])
        return value + pairwise.masked_sum(ops.square(gaps), both) / (count * count)

    def observe(self, pairs):
        """Computes the mean D_c and the mean target of the classes of the batch."""
        batch = pairs[self.representation]
        labels = batch.labels
        _, densities = means_and_spreads(batch.references, labels)
        _, first = class_index(labels)
        values = {"d_avg": densities, "target": of_own_class(self.targets(), labels)}
        count = pairwise.masked_count(first)
        return {key: (pairwise.masked_mean(value, first), count) for key, value in values.items()}
