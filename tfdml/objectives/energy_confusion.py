"""Energy confusion: pulls classes together at the projection layer alone, against the metric loss (ECAML)."""

from __future__ import annotations

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import one_of
from tfdml.objectives.base import Observed
from tfdml.objectives.class_statistics import class_pairs, means_and_spreads

FORMS = ("log", "plain", "log_of_mean")
REPRESENTATIONS = ("embedding", "projection")
_SMALLEST = 1e-12


@keras.saving.register_keras_serializable("tfdml")
class EnergyConfusion(Observed):
    """The energy confusion term: the expected squared distance between images of different classes, to be minimised.

    L = sum over ordered pairs of classes I != J of ln(1 + E_IJ),
    E_IJ = (1 / (n_I n_J)) sum over i in I, j in J of |x_i - x_j|^2 = |mu_I - mu_J|^2 + v_I + v_J

    with mu the mean of a class and v its mean squared distance to it, so that the cost is O(B^2) and no pair of images
    is visited. Classes are *pulled together*: the term contradicts the metric loss that it is added to, so that the
    network cannot rest on the few traits that tell the training classes apart most easily. It has to stay the weaker
    of the two:

        objectives = [MetricLoss(BinomialDevianceLoss(reduction="sum")), EnergyConfusion(reduction="sum", weight=0.13)]

    Its gradient reaches the projection layer only (sec. 4.2): the objective reads `detached_embedding` or
    `detached_projection`, which a `MetricLearner` asks its embedder for (`represent(images, detached=True)`).
    Representations without a detached form are used as they are, and then the gradient reaches all that made them.

    The paper leaves open how many class pairs it draws and in which order it counts them; here they are all those of
    the batch, each twice. The authors' public code differs: it takes the logarithm of half the mean over pairs of
    images (`form="log_of_mean"`) of the embedding before normalisation (`representation="projection"`), estimated from
    10 random partners of each image, where this objective takes the expectation over the draw and no draw.

    Logged by the learner beside the value itself: `<name>_energy`, the mean of E_IJ over the pairs of classes of the
    batches, whatever the form.

    Args:
        form: `"log"`: ln(1 + E_IJ) (eq. 11); `"plain"`: E_IJ (eq. 7); `"log_of_mean"`: ln of half the mean of
            |x_i - x_j|^2 over all pairs of images of different classes, one value for the batch.
        representation: `"embedding"` or `"projection"`, the embedding before normalisation.
        reduction: `"mean"` over the pairs of classes, or `"sum"`, the paper's. `"log_of_mean"` knows no difference.
        weight: lambda. The paper's, beside losses that are sums: 0.02 with triplet, 0.3 with N-pair, 0.13 with
            binomial deviance on CUB and CARS, a tenth of that on SOP and In-Shop; 64 classes of 2 images.
        name: The term's name in logs.

    Raises:
        ValueError: An argument is none of the values above.

    Example:
        >>> embeddings = keras.ops.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> float(EnergyConfusion()({"embedding": embeddings}, keras.ops.array([0, 0, 1])))  # ln(1 + 2)
        1.0986123

    Source: Chen and Deng, "Energy Confused Adversarial Metric Learning for Zero-Shot Image Retrieval and Clustering",
    AAAI 2019, eq. 3, 7 and 11.
    """

    learns_from = ("negative",)
    observes = ("energy",)

    def __init__(
        self,
        form="log",
        representation="embedding",
        reduction="mean",
        weight=1.0,
        name="energy_confusion",
        **kwargs,
    ):
        super().__init__(weight=weight, name=name, **kwargs)
        one_of(f"{self.name}: form", form, FORMS)
        one_of(f"{self.name}: representation", representation, REPRESENTATIONS)
        one_of(f"{self.name}: reduction", reduction, ("mean", "sum"))
        self.form = form
        self.representation = representation
        self.reduction = reduction

    @property
    def reads(self):
        """The representation in its detached form."""
        return (f"detached_{self.representation}",)

    def represent(self, representations, training=None):
        """The plain representation in place of the detached one, where there is none."""
        del training
        (detached,) = self.reads
        if detached in representations or self.representation not in representations:
            return {}
        return {detached: representations[self.representation]}

    def select(self, representations):
        """The one that this objective reads.

        Raises:
            ValueError: It is missing.
        """
        return super().select({**representations, **self.represent(representations)})

    @property
    def whole_batch(self):
        """Whether the logarithm is of a mean over the batch."""
        return self.form == "log_of_mean"

    def compute_pairs(self, pairs):
        """Computes the mean (or sum) over ordered pairs of different classes."""
        batch = pairs[self.reads[0]]
        energies = _energies(batch)
        if self.form == "log_of_mean":
            # Entries belong to classes: over all pairs of images they weigh as much as the pairs themselves.
            half = 0.5 * pairwise.masked_mean(energies, batch.negatives)
            return ops.where(ops.any(batch.negatives), ops.log(ops.maximum(half, _SMALLEST)), 0.0)
        values = ops.log1p(energies) if self.form == "log" else energies
        reduce = pairwise.masked_sum if self.reduction == "sum" else batch.mean
        return reduce(values, class_pairs(batch))

    def observe(self, pairs):
        """Computes the mean energy of the pairs of classes of the batch."""
        batch = pairs[self.reads[0]]
        counted = class_pairs(batch)
        return {"energy": (batch.total(batch.mean(_energies(batch), counted)), batch.count(counted))}


def _energies(batch):
    """(b, B), E_IJ of the classes of each two images."""
    means, spreads = means_and_spreads(batch.references, batch.labels)
    return batch.on(means).distances("sqeuclidean") + batch.of_anchors(spreads)[:, None] + spreads[None, :]
