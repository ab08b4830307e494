"""Regularizers of one representation: density adaptivity, energy confusion, entropy, orthogonality,
intra-class.

Statistics of the classes of a batch stand at each of their images, so that shapes are static.
"""

import keras
import numpy as np
from keras import ops

from tfdml import pairwise
from tfdml.arguments import boolean, integer, number, one_of
from tfdml.labels import integer_labels
from tfdml.objectives.base import Objective, ReducedObjective
from tfdml.registry import register
from tfdml.workarounds import add_undecayed_weight

CONSTRAINTS = ("soft", "hard", None)


def class_densities(features, labels, num_classes):
    """Return the mean squared distance of each class's images to their mean, in float64 (eq. 5).

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
    features, labels = np.asarray(features), integer_labels(labels)
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(
            f"expected features (N, D) and labels (N,), got {features.shape} and {labels.shape}"
        )
    if labels.size and (labels.min() < 0 or labels.max() >= num_classes):
        raise ValueError(
            f"labels must lie in 0 .. {num_classes - 1}, but reach {labels.min()} .. {labels.max()}"
        )
    if not np.isfinite(features).all():
        raise ValueError("features must be finite numbers")
    densities = np.zeros(num_classes, np.float32)
    # One class at a time: 60,000 images of 1,024 features never exist in float64 at once.
    for label in np.unique(labels):
        members = features[labels == label].astype(np.float64)
        densities[label] = np.mean(np.sum((members - members.mean(axis=0)) ** 2, axis=1))
    return densities


@register("objective", alias="density")
class DensityAdaptivity(ReducedObjective):
    """The density regularizer: each class spreads toward a learned target, and the targets grow.

    L = (1/C) sum over classes c of (D_c - a_c)^2 - (1/C) sum over c of a_c
      + (1/C^2) sum over ordered pairs of classes (c, k) of (R_k^eta a_c - R_c^eta a_k)^2,

    D_c = (1/n_c) sum over the images i of c of |x_i - mu_c|^2

    over the C classes of the batch, with mu_c the mean of the class in the batch, a_c its target (a
    weight, one for each training class), and R_c its reference density: D_c of the pooled features
    of the initial network over the whole training set, which says how far the class spreads by
    nature. The last sum keeps the targets in the ratio of R^eta. Only together with a metric loss
    does the spread stay bounded:

        objectives = [MetricLoss(ContrastiveLoss(reduction="sum")),
                      DensityAdaptivity(num_classes=98, weight=10.0)]

    The reference densities are measured by one pass over the training images before the first step
    (by `MetricLearner.adapt`, which the command line calls itself), or given. A class whose
    reference density is 0, for want of two different images, takes no part in the constraint; nor
    does any before they are measured, which makes the objective that of `constraint=None`.
    R is in squared units of the features, so that the weight of the constraint depends on the
    backbone: `normalize_reference` divides R by its mean.

    Logged by the learner next to the value itself, as means over the classes of the batches:
    `<name>_d_avg`, D_c, and `<name>_target`, a_c.

    A class with one image in the batch has D_c = 0, as in the formula: sample several images of
    each class. A label outside 0 .. num_classes - 1 makes the value NaN, so that the mistake cannot
    pass unseen.

    Args:
        num_classes: The number of training classes.
        eta: How far the ratios of the reference densities count; 0 makes all targets alike.
        initial_target: Where every a_c starts (the mean of them, if the constraint is hard).
        reference_density: R, (num_classes,), not negative; None leaves it to `adapt`.
        constraint: `"soft"`: eq. 8, above; `"hard"`: eq. 7, whose constraint holds exactly, a_c = s
            R_c^eta with one learned s; None: eq. 6, the paper's DML-DA^- (its figure 3).
        normalize_reference: Divide R by its mean over the classes; the paper does not.
        representation: The representation whose density it is.
        reduction: `"mean"`, the formula above and the paper's; `"sum"` leaves 1/C and 1/C^2 out.
        weight: lambda; the paper uses 10, with base losses that are sums.

    Raises:
        ValueError: An argument is out of range, or `reference_density` does not fit.

    Example:
        >>> objective = DensityAdaptivity(num_classes=2, constraint=None)
        >>> embeddings = keras.ops.array([[1.0, 0.0], [-1.0, 0.0]])  # D = 1, a = 0.5
        >>> float(objective({"embedding": embeddings}, keras.ops.array([1, 1])))
        -0.25

    Source: Li et al., "Deep Metric Learning with Density Adaptivity", 2019, eq. 5 to 9 and sec.
    IV-A.
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
        normalize_reference=False,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if constraint not in CONSTRAINTS:
            raise ValueError(
                f"{self.name}: constraint must be 'soft', 'hard' or None, not {constraint!r}"
            )
        self.num_classes = integer("num_classes", num_classes, at_least=1)
        self.eta = number("eta", eta, at_least=0)
        self.initial_target = number("initial_target", initial_target, above=0)
        self.reference_density = self._check_reference(reference_density)
        self.constraint = constraint
        self.normalize_reference = boolean("normalize_reference", normalize_reference)
        if constraint and reference_density is None:
            self.adapts_to = "pooled"

    without_adapting = (
        "no reference density is known, so that classes have no constraint: eq. 6, not eq. 8"
    )

    @property
    def is_adapted(self):
        """Whether a reference density is known, if a constraint needs any."""
        if self.adapts_to is None:
            return True
        return self.built and bool(ops.convert_to_numpy(self.measured_density).any())

    def _check_reference(self, densities):
        if densities is None:
            return None
        reference = np.asarray(densities, np.float32)
        if reference.shape != (self.num_classes,) or not np.all(
            np.isfinite(reference) & (reference >= 0)
        ):
            raise ValueError(
                f"{self.name}: reference_density must be ({self.num_classes},) finite numbers from "
                f"0 on, not {reference!r}"
            )
        return reference

    def build_from(self, shapes):
        """Create the targets, and the place of the reference densities."""
        self.target_density = add_undecayed_weight(
            self,
            name="target_density",
            shape=() if self.constraint == "hard" else (self.num_classes,),
            initializer=keras.initializers.Constant(self.initial_target),
        )
        if self.constraint:
            start = 0.0 if self.reference_density is None else self.reference_density
            self.measured_density = self.add_weight(
                name="measured_density",
                shape=(self.num_classes,),
                initializer=keras.initializers.Constant(start),
                trainable=False,
            )

    def adapt(self, features, labels):
        """Measure the reference densities; without effect if they are given or no constraint needs
        them.

        Args:
            features: (N, D) NumPy, the pooled features of the training images, by the untrained
                embedder.
            labels: (N,) NumPy integers.

        Raises:
            ValueError: The shapes do not fit, a label is out of range, or a feature is not finite.
        """
        if self.adapts_to is None:
            return
        if not self.built:
            self.build({})
        self.measured_density.assign(class_densities(features, labels, self.num_classes))

    def ratios(self):
        """R^eta, (num_classes,); 0 where no reference density is known."""
        reference = ops.convert_to_tensor(self.measured_density)
        is_measured = reference > 0
        if self.normalize_reference:
            mean = pairwise.masked_mean(reference, is_measured)
            reference = reference / ops.where(mean > 0, mean, 1.0)
        powers = ops.power(ops.where(is_measured, reference, 1.0), self.eta)
        return ops.where(is_measured, powers, 0.0)

    def targets(self):
        """Return the target of every training class, (num_classes,)."""
        if self.constraint != "hard":
            return ops.convert_to_tensor(self.target_density)
        ratios = self.ratios()
        mean = pairwise.masked_mean(ratios, ratios > 0)
        return self.target_density * ops.where(
            ratios > 0, ratios / ops.where(mean > 0, mean, 1.0), 1.0
        )

    def compute_pairs(self, pairs):
        """Compute the value for the classes of the batch."""
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
        own_ratios, own_targets, own_counted = (
            batch.of_anchors(x)[:, None] for x in (ratios, targets, counted)
        )
        gaps = ratios[None, :] * own_targets - own_ratios * targets[None, :]
        mask = ops.logical_and(own_counted, counted[None, :])
        return value + pairwise.masked_sum(ops.square(gaps), mask) / (count * count)

    def observe(self, pairs):
        """Compute the sums of D_c and of the targets of the classes whose first image is an
        anchor."""
        batch = pairs[self.representation]
        labels = batch.labels
        _, densities = means_and_spreads(batch.references, labels)
        first = batch.of_anchors(class_index(labels)[1])
        values = {"d_avg": densities, "target": of_own_class(self.targets(), labels)}
        count = pairwise.masked_count(first)
        return {
            key: (pairwise.masked_sum(batch.of_anchors(value), first), count)
            for key, value in values.items()
        }


ENERGY_FORMS = ("log", "plain", "log_of_mean")
REPRESENTATIONS = ("embedding", "projection")
_SMALLEST_ENERGY = 1e-12


@register("objective", alias="ecaml")
class EnergyConfusion(ReducedObjective):
    """The energy confusion term: the expected squared distance between images of different classes,
    to be minimized.

    L = sum over ordered pairs of classes I != J of ln(1 + E_IJ),
    E_IJ = (1 / (n_I n_J)) sum over i in I, j in J of |x_i - x_j|^2 = |mu_I - mu_J|^2 + v_I + v_J

    with mu the mean of a class and v its mean squared distance to it, so that the cost is O(B^2)
    and no pair of images is visited. Classes are *pulled together*: the term contradicts the metric
    loss that it is added to, so that the network cannot rest on the few traits that separate the
    training classes most easily. It has to stay the weaker of the two:

        objectives = [MetricLoss(BinomialDevianceLoss(reduction="sum")),
                      EnergyConfusion(reduction="sum", weight=0.13)]

    Its gradient reaches the projection layer only (sec. 4.2): the objective reads
    `detached_embedding` or `detached_projection`, which a `MetricLearner` asks its embedder for
    (`represent(images, detached=True)`). Representations without a detached form are used as they
    are, and then the gradient reaches all that made them.

    The paper leaves open how many class pairs it draws and in which order it counts them; here they
    are all those of the batch, each twice. The authors' public code differs: it takes the logarithm
    of half the mean over pairs of images (`form="log_of_mean"`) of the embedding before
    normalization (`representation="projection"`), estimated from 10 random partners of each image,
    where this objective takes the expectation over the draw and no draw.

    Logged by the learner next to the value itself: `<name>_energy`, the mean of E_IJ over the pairs
    of classes of the batches, whatever the form.

    Args:
        form: `"log"`: ln(1 + E_IJ) (eq. 11); `"plain"`: E_IJ (eq. 7); `"log_of_mean"`: ln of half
            the mean of |x_i - x_j|^2 over all pairs of images of different classes, one value for
            the batch.
        offset: Added to the energy within the logarithm of `"log_of_mean"`. With 0, as in the
            authors' code, the gradient grows as 1 / energy while the energy falls, so that a large
            weight shrinks the projection without end. With an offset o it stays below 1 / o of the
            energy's own, as with 1 in eq. 11. The unit is that of the energy at the start, which
            `<name>_energy` shows.
        representation: `"embedding"` or `"projection"`, the embedding before normalization.
        reduction: `"mean"` over the pairs of classes, or `"sum"`, the paper's. `"log_of_mean"`
            knows no difference.
        weight: lambda. The paper's, with losses that are sums: 0.02 with triplet, 0.3 with N-pair,
            0.13 with binomial deviance on CUB and CARS, a tenth of that on SOP and In-Shop; 64
            classes of 2 images.

    Raises:
        ValueError: An argument is none of the values above.

    Example:
        >>> embeddings = keras.ops.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> float(EnergyConfusion()({"embedding": embeddings}, keras.ops.array([0, 0,
        ...     1])))  # ln(1 + 2)
        1.0986123

    Source: Chen and Deng, "Energy Confused Adversarial Metric Learning for Zero-Shot Image
    Retrieval and Clustering", AAAI 2019, eq. 3, 7 and 11.
    """

    learns_from = ("negative",)
    observes = ("energy",)
    reads: tuple[str, ...] = ()

    def __init__(self, form="log", representation="embedding", offset=0.0, **kwargs):
        super().__init__(representation, **kwargs)
        one_of(f"{self.name}: representation", representation, REPRESENTATIONS)
        self.offset = number("offset", offset, at_least=0)
        self.form = one_of(f"{self.name}: form", form, ENERGY_FORMS)
        # The logarithm is of a mean over the batch.
        self.whole_batch = self.form == "log_of_mean"
        self.reads = (f"detached_{representation}",)

    def represent(self, representations, training=None):
        """Return the plain representation in place of the detached one, where there is none."""
        (detached,) = self.reads
        if detached in representations or self.representation not in representations:
            return {}
        return {detached: representations[self.representation]}

    def compute_pairs(self, pairs):
        """Compute the mean (or sum) over ordered pairs of different classes."""
        (detached,) = self.reads
        batch = pairs[detached]
        # (b, B): entry (i, j) is the energy of the classes of images i and j.
        energies = _energies(batch)
        if self.form == "log_of_mean":
            # Its mean over pairs of images is the mean of their |x_i - x_j|^2.
            mean_energy = pairwise.masked_mean(energies, batch.negatives)
            within_log = ops.maximum(0.5 * mean_energy + self.offset, _SMALLEST_ENERGY)
            return ops.where(ops.any(batch.negatives), ops.log(within_log), 0.0)
        values = ops.log1p(energies) if self.form == "log" else energies
        each_once = class_pairs(batch)
        if self.reduction == "sum":
            return pairwise.masked_sum(values, each_once)
        return batch.mean(values, each_once)

    def observe(self, pairs):
        """Compute the sum of the energies of the pairs of classes whose first image is an
        anchor."""
        batch = pairs[self.reads[0]]
        counted = class_pairs(batch)
        return {
            "energy": (
                pairwise.masked_sum(_energies(batch), counted),
                pairwise.masked_count(counted),
            )
        }


def _energies(batch):
    """(b, B), E_IJ of the classes of each two images."""
    means, spreads = means_and_spreads(batch.references, batch.labels)
    same = ops.logical_not(batch.negatives)
    between = pairwise.squared_distances(batch.of_anchors(means), means, itself=same)
    return between + batch.of_anchors(spreads)[:, None] + spreads[None, :]


ENTROPY_FORMS = ("pairs", "nearest")
_SMALLEST_SQUARE = 1e-8


@register("objective", alias="entropy")
class EntropySpread(ReducedObjective):
    """The entropy regularizer: minus an entropy of the embeddings, to be minimized.

    `form="pairs"`, the one that DML-DA is compared with:

        L = -(1 / N_pairs) sum over i != j of H(p_ij),
        p_ij = 1 / (1 + exp(|x_i - x_j|^2 - threshold))

    with H(p) = -p ln p - (1 - p) ln(1 - p), between -ln 2 and 0. p_ij is the probability that two
    images are alike; its entropy is largest where their squared distance is the threshold, so that
    classes spread and move nearer to each other. Neither DML-DA's paper nor its figure gives a
    formula or a threshold: this is the entropy of Niu et al., whom it cites, at 1, its authors'
    margin.

    `form="nearest"`, the differential entropy by the Kozachenko-Leonenko estimator (KoLeo), which
    pushes every image from its nearest neighbor:

        L = -(1 / B) sum over i of ln(min over j != i of |x_i - x_j|)

    with distances below 1e-4 counted as 1e-4, and without a gradient there. Neither looks at the
    labels.

    Args:
        form: `"pairs"` or `"nearest"`.
        threshold: The squared distance at which two images are as likely to be alike as not.
        representation: The representation that it reads.
        reduction: `"mean"` over the pairs (or the images), or `"sum"`.

    Raises:
        ValueError: An argument is none of the values above.

    Example:
        >>> embeddings = keras.ops.array([[1.0, 0.0], [0.6, 0.8]])
        >>> float(EntropySpread("nearest")({"embedding": embeddings}, keras.ops.array([0,
        ...     1])))  # -ln sqrt(0.8)
        0.1115718

    Source: Niu et al., "Information-theoretic Semi-supervised Metric Learning via Entropy
    Regularization", ICML 2012 (pairs); Sablayrolles et al., "Spreading Vectors for Similarity
    Search", ICLR 2019 (nearest); Li et al., "Deep Metric Learning with Density Adaptivity", sec.
    IV-E.
    """

    def __init__(self, form="pairs", threshold=1.0, **kwargs):
        super().__init__(**kwargs)
        self.form = one_of(f"{self.name}: form", form, ENTROPY_FORMS)
        self.threshold = number("threshold", threshold, at_least=0)

    def compute_pairs(self, pairs):
        """Compute the mean (or sum) over ordered pairs, or over images."""
        batch = pairs[self.representation]
        squared, others = batch.distances("sqeuclidean"), batch.others
        reduce = pairwise.masked_sum if self.reduction == "sum" else batch.mean
        if self.form == "pairs":
            # H is even in the logit; of its absolute value nothing large is taken from anything
            # large.
            logits = ops.abs(squared - self.threshold)
            return -reduce(ops.softplus(-logits) + logits * ops.sigmoid(-logits), others)
        nearest = pairwise.index_of_largest(ops.where(others, -ops.stop_gradient(squared), -1e30))
        # The difference itself: the matrix has lost the digits of small distances.
        gaps = ops.sum(
            ops.square(batch.anchors - ops.take(batch.references, nearest, axis=0)), axis=1
        )
        return reduce(-0.5 * ops.log(ops.maximum(gaps, _SMALLEST_SQUARE)), ops.any(others, axis=1))


@register("objective", alias="gor")
class GlobalOrthogonal(Objective):
    """The global orthogonal regularizer (GOR): images of different classes as orthogonal as random
    vectors are.

    L = M_1^2 + [M_2 - 1/d]_+,   M_k = the mean over pairs of different classes of (cosine of x_i
    and x_j)^k

    in d dimensions: uniform points of the sphere have M_1 = 0 and M_2 = 1/d. A batch of one class
    gives 0.

    Args:
        representation: The representation that it reads, of any length.
        weight: The paper uses 1.

    Example:
        >>> embeddings = keras.ops.array([[1.0, 0.0], [0.6, 0.8]])
        >>> float(GlobalOrthogonal()({"embedding": embeddings}, keras.ops.array([0,
        ...     1])))  # 0.36 + [0.36 - 0.5]_+
        0.36

    Source: Zhang et al., "Learning Spread-out Local Feature Descriptors", ICCV 2017.
    """

    learns_from = ("negative",)
    whole_batch = True

    def __init__(self, representation="embedding", **kwargs):
        super().__init__(**kwargs)
        self.representation = representation

    def compute_pairs(self, pairs):
        """Compute the value for the batch."""
        batch = pairs[self.representation]
        first = pairwise.masked_mean(batch.cosines(), batch.negatives)
        second = pairwise.masked_mean(ops.square(batch.cosines()), batch.negatives)
        # Not the static shape, which is unknown after a gather from replicas of unequal size.
        dim = ops.cast(ops.shape(batch.references)[-1], "float32")
        return ops.square(first) + ops.relu(second - 1.0 / dim)


@register("objective")
class IntraClassPenalty(ReducedObjective):
    """Minus how alike the images of each class are: it draws every class together.

    L = -sum over classes I of (1/N_I) sum over pairs i != j of I of exp(-|x_i - x_j|^2 / 2)

    with N_I the number of such pairs. A class with one image in the batch has none, and counts for
    nothing. The JRD paper adds it to AMSoftmax, with weight alpha, to show that lambda, the error
    of the best classifier of seen and unseen classes together, grows with alpha:

        objectives = [ProxyLoss(AMSoftmaxLoss(20.0, 0.1), num_classes),
                      IntraClassPenalty(reduction="sum", weight=1.0)]

    Args:
        representation: The name of the vectors x (B, D).
        reduction: `"sum"` over the classes of the batch, as printed, or their `"mean"`.
        weight: alpha.

    Raises:
        ValueError: An argument is none of these.

    Example:
        >>> representations = {"embedding": keras.ops.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])}
        >>> float(IntraClassPenalty()(representations, keras.ops.array([0, 0, 1])))
        -1.0

    Source: Chu et al., "Distance Metric Learning with Joint Representation Diversification", ICML
    2020, eq. 4 and figure 2.
    """

    def compute_pairs(self, pairs):
        """Compute the sum (or mean) over the classes with several images in the batch; 0 where
        there is none."""
        batch = pairs[self.representation]
        positives = batch.positives
        partners = pairwise.masked_count(positives, axis=1)
        kernel = ops.exp(-0.5 * batch.distances("sqeuclidean"))
        # Each image's mean over its partners; their sum over a class of n is n times the class's
        # own mean.
        rows = pairwise.masked_sum(kernel, positives, axis=1) / ops.maximum(partners, 1.0)
        total = ops.sum(rows / (partners + 1.0))
        if self.reduction == "sum":
            return -total
        # Each of a class's n images counts 1/n.
        classes = ops.sum(ops.where(partners > 0, 1.0 / (partners + 1.0), 0.0))
        return -total / ops.maximum(batch.total(classes), 1.0)


def class_index(labels):
    """Numbers the classes of a batch from 0, and marks the first image of each.

    Returns:
        (B,) integers below B, and (B,) booleans.

    Example:
        >>> index, first = class_index(keras.ops.array([4, 4, 1]))
        >>> np.array(index).tolist(), np.array(first).tolist()
        ([1, 1, 0], [True, False, True])
    """
    # Stable: the first of a class in the order of the batch is its first in this order.
    order = ops.argsort(labels)
    ordered = ops.take(labels, order)
    starts = ops.concatenate([ops.ones((1,), "bool"), ordered[1:] != ordered[:-1]], axis=0)
    starts = starts[: ops.shape(labels)[0]]
    back = ops.argsort(order)
    return ops.take(ops.cumsum(ops.cast(starts, "int32")) - 1, back), ops.take(starts, back)


def class_pairs(pairs):
    """(b, B) booleans, true once for every ordered pair of different classes of the batch."""
    first = class_index(pairs.labels)[1]
    return ops.logical_and(
        ops.logical_and(pairs.of_anchors(first)[:, None], first[None, :]), pairs.negatives
    )


def means_and_spreads(x, labels):
    """Compute the mean of each image's class, and the class's mean squared distance to it, in O(B
    D) memory.

    Args:
        x: (B, D).
        labels: Class labels (B,).

    Returns:
        (B, D) float32, the means, and (B,) float32, the spreads.

    Example:
        >>> means, spreads = means_and_spreads(keras.ops.array([[0.0], [2.0], [5.0]]),
        ...     keras.ops.array([0, 0, 1]))
        >>> np.array(spreads).tolist()
        [1.0, 1.0, 0.0]
    """
    x = ops.cast(x, "float32")
    index, _ = class_index(labels)

    def mean_of_class(values):
        size = ops.shape(values)[0]
        sums, counts = (
            ops.segment_sum(part, index, size) for part in (values, ops.ones_like(values[:, :1]))
        )
        return ops.take(sums / ops.maximum(counts, 1.0), index, axis=0)

    means = mean_of_class(x)
    # Twice, as the sums of features that share a large offset are rounded.
    deviations = x - means
    correction = mean_of_class(deviations)
    squares = ops.sum(ops.square(deviations - correction), axis=1, keepdims=True)
    return means + correction, mean_of_class(squares)[:, 0]


def of_own_class(values, labels):
    """Return the value of each image's class: (C,), (B,) -> (B,); NaN for a label outside 0 .. C -
    1.

    Example:
        >>> np.array(of_own_class(keras.ops.array([0.5, 2.0]), keras.ops.array([1, 1, 0]))).tolist()
        [2.0, 2.0, 0.5]
    """
    size = values.shape[0]
    inside = ops.logical_and(labels >= 0, labels < size)
    index = ops.cast(ops.where(inside, labels, ops.zeros_like(labels)), "int32")
    # Through a product the gradient is dense: weight decay and clipping take no sparse one.
    return ops.where(inside, ops.take(values * 1.0, index, axis=0), float("nan"))
