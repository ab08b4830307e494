"""Mutual information: RankMI, which separates the distances of positive pairs from those of
negative ones."""

import math

import keras
from keras import ops

from tfdml import pairwise, workarounds
from tfdml.arguments import integer, number, one_of
from tfdml.layers import StatisticsNetwork
from tfdml.mining import negative_probabilities, sample_negatives
from tfdml.objectives.base import Objective
from tfdml.pairs import pairs_by_name
from tfdml.registry import register

NEGATIVES = ("distance_weighted", "all")
# Points between the smallest and the largest distance of a batch at which the slope of V is
# penalized.
_SLOPES = 64
# Those of `keras.optimizers.Adam`.
_BETA_1 = 0.9
_BETA_2 = 0.999
_EPSILON = 1e-7


def divergence_loss(values, positives, negatives):
    """Return the RankMI loss of pairs whose statistic V is known (eq. 6 and 3): minus twice a bound
    on a divergence.

    L = mean over positives of (softplus(-V) - ln 2) + mean over negatives of (softplus(V) - ln 2)

    -L / 2 is a lower bound on the Jensen-Shannon divergence, in nats (at most ln 2), between the
    distances of positive and of negative pairs; it is reached where V is the logarithm of the ratio
    of their densities.

    Args:
        values: V of each pair, of any shape.
        positives: How often each pair counts as a positive, in the same shape; all 0 leaves the
            mean out.
        negatives: How often it counts as a negative.

    Example:
        >>> float(divergence_loss(keras.ops.zeros(4), keras.ops.array([1, 1, 0, 0]),
        ...     keras.ops.array([0, 0, 1, 1])))
        0.0
    """
    pulls = ops.softplus(-values) - math.log(2.0)
    pushes = ops.softplus(values) - math.log(2.0)
    return _weighted_mean(pulls, positives) + _weighted_mean(pushes, negatives)


def _weighted_mean(values, weights):
    weights = ops.cast(weights, "float32")
    return ops.sum(weights * values) / ops.maximum(ops.sum(weights), 1.0)


@register("objective", alias="rankmi")
class RankMI(Objective):
    """The RankMI loss: a statistics network V learns to tell positives from negatives by their
    distance, and costs it.

    L = mean over P of softplus(-V(d+)) + mean over N of softplus(V(d-)) - 2 ln 2,    V(d) = MLP(d)
    - d

    over the Euclidean distances d of L2-normalized embeddings. A step of training does three things
    with a batch:

    1. V takes `statistics_steps` steps of its own Adam on all pairs (`update`). No gradient reaches
       the embedder.
    2. beta becomes the root of V nearest to the one before: there a positive and a negative pair
       cost the same. Where V has no root in 0 .. 2, beta stays: V moves little in a step, whereas
       either end of the interval would drop nearly all positives or all negatives.
    3. The value is L with V fixed, over the positives with d > beta - margin and, of the negatives
       with d < beta + margin, as many draws for each image as it has positives.

    The paper's algorithm 1 alternates: of every k + 1 batches, k train V and one trains the
    embedder. Here each batch serves both. At as many updates of the embedder, Recall@1 differed by
    +0.2 points on Omniglot (95 % interval over 4 paired seeds -1.5 to +1.9) and by -0.3 on Cars-196
    at small size (3 seeds, -3.5 to +3.0).

    V, its optimizer's state and beta are weights of the objective that the learner's optimizer does
    not train. They are saved with it, and the same on every replica.

    Logged by the learner next to the value itself: `<name>_jsd`, the lower bound on the
    Jensen-Shannon divergence between the distances of positives and negatives in nats (ln 2 when
    they are apart); `<name>_beta`; and `<name>_no_root`, the share of V's states that had no root.

    Args:
        margin: alpha, how far beyond beta a pair still counts.
        initial_beta: About where V's root starts: best between the distances of positive and of
            negative pairs. From 0 the embedder first pulls all pairs together, as hardly a negative
            is within the margin.
        statistics_steps: k, the steps of V for each step of the embedder.
        learning_rate: V's. It stays the same throughout training.
        weight_decay: V's, added to the gradient. The paper has 0.0001 for all weights.
        hidden: Width of V's layers.
        depth: V's number of square layers.
        negatives: `"distance_weighted"`, drawn without replacement as in
            `tfdml.mining.negative_probabilities`, or `"all"` within the margin.
        monotonicity: Weight of a soft constraint dV/dd < 0 (eq. 9), 0 for none: the mean of
            [dV/dd]_+ over 64 even steps between the batch's smallest and largest distance. The
            paper names such a constraint and trains without it; its form here is tfdml's own.
        seed: An integer for the draws; by default one from Keras's global seed.
        weight: The factor of this term in the loss of the embedder; V's own training is not scaled
            by it.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> embedder = tfdml.models.Embedder("conv4", image_size=28)
        >>> learner = tfdml.models.MetricLearner(embedder, RankMI(margin=0.2))
        >>> learner.compile("adam")
        >>> history = learner.fit(batches, steps_per_epoch=4)

    Source: Kemertas et al., "RankMI: A Mutual Information Maximizing Ranking Loss", CVPR 2020, eq.
    6-10, algorithm 1.
    """

    learns_from = ("positive", "negative")
    whole_batch = True
    observes = ("jsd", "beta", "no_root")

    def __init__(
        self,
        margin=0.2,
        initial_beta=1.0,
        statistics_steps=1,
        learning_rate=0.001,
        weight_decay=0.0,
        hidden=128,
        depth=2,
        negatives="distance_weighted",
        monotonicity=0.0,
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.margin = number("margin", margin, at_least=0)
        self.initial_beta = number("initial_beta", initial_beta, at_least=0, at_most=2)
        self.statistics_steps = integer("statistics_steps", statistics_steps, at_least=1)
        self.learning_rate = number("learning_rate", learning_rate, above=0)
        self.weight_decay = number("weight_decay", weight_decay, at_least=0)
        self.negatives = one_of(f"{self.name}: negatives", negatives, NEGATIVES)
        self.monotonicity = number("monotonicity", monotonicity, at_least=0)
        self.seed = seed
        # Not among what the learner's optimizer trains.
        self.network = StatisticsNetwork(
            hidden,
            depth,
            initial_root=self.initial_beta,
            name="statistics_network",
            trainable=False,
        )
        self.hidden, self.depth = self.network.hidden, self.network.depth
        self.seed_generator = keras.random.SeedGenerator(seed)

    def build_from(self, shapes):
        """Create V, the state of its optimizer, and beta."""
        if not self.network.built:
            self.network.build()

        def state(name, shape=(), start=0.0):
            initializer = keras.initializers.Constant(start)
            return self.add_weight(name=name, shape=shape, initializer=initializer, trainable=False)

        self.beta = state("beta", start=self.initial_beta)
        self.steps = state("steps")
        self.momentums = [
            state(f"momentum_{i}", weight.shape) for i, weight in enumerate(self.network.weights)
        ]
        self.velocities = [
            state(f"velocity_{i}", weight.shape) for i, weight in enumerate(self.network.weights)
        ]

    def update(self, representations, labels):
        """Let V take its steps on all pairs of the batch, and find its root."""
        pairs = _fixed(pairs_by_name(representations, labels))
        for _ in range(self.statistics_steps):
            self._descend(_gradients(lambda: self._statistics_loss(pairs), self.network.weights))
        self.beta.assign(self.network.root(self.beta))

    def _descend(self, gradients):
        """Make a step of `keras.optimizers.Adam`, which itself changes no variables within a
        stateless scope."""
        self.steps.assign(self.steps + 1.0)
        rate = (
            self.learning_rate * ops.sqrt(1.0 - _BETA_2**self.steps) / (1.0 - _BETA_1**self.steps)
        )
        slots = zip(self.network.weights, gradients, self.momentums, self.velocities, strict=True)
        for weight, gradient, momentum, velocity in slots:
            gradient = gradient + self.weight_decay * weight
            momentum.assign(momentum + (1.0 - _BETA_1) * (gradient - momentum))
            velocity.assign(velocity + (1.0 - _BETA_2) * (ops.square(gradient) - velocity))
            weight.assign(weight - rate * momentum / (ops.sqrt(velocity) + _EPSILON))

    def statistics_loss(self, pairs):
        """Compute the loss of V over all pairs, with the embeddings fixed, and the soft constraint
        if there is one."""
        return self._statistics_loss(_fixed(pairs))

    def _statistics_loss(self, pairs):
        return self._loss_of_all(pairs) + self._penalty(pairs)

    def compute_pairs(self, pairs):
        """Compute the loss of the embedder: over the pairs that violate the margins around beta,
        with V fixed."""
        pairs = pairs["embedding"].map(pairwise.l2_normalize)
        positives, negatives = self.pairs_around(self.network.root(self.beta), pairs)
        return self._loss(pairs, positives, negatives, frozen=True)

    def observe(self, pairs):
        """Compute the bound on the divergence over all pairs, beta, and whether it is a root of
        V."""
        pairs = _fixed(pairs)
        beta, exists = self.network.find_root(self.beta)
        informative = ops.cast(
            ops.logical_and(ops.any(pairs.positives), ops.any(pairs.negatives)), "float32"
        )
        bound = -0.5 * self._loss_of_all(pairs)
        return {
            "jsd": (informative * bound, informative),
            "beta": (beta, 1.0),
            "no_root": (1.0 - ops.cast(exists, "float32"), 1.0),
        }

    def pairs_around(self, beta, pairs):
        """Chooses the pairs that teach the embedder: (B, B) floats, 1 for the positives, and 1 for
        the negatives drawn.

        Args:
            beta: The root of V.
            pairs: `tfdml.pairs.Pairs` of unit vectors.
        """
        distances = pairs.distances("euclidean")
        counts = ops.sum(ops.cast(pairs.positives, "int32"), axis=1, keepdims=True)
        positives = ops.logical_and(pairs.positives, distances > beta - self.margin)
        negatives = ops.logical_and(pairs.negatives, distances < beta + self.margin)
        if self.negatives == "distance_weighted":
            near = negative_probabilities(pairs)
            negatives = _draw(ops.where(negatives, near, 0.0), counts, self.seed_generator)
        return ops.cast(positives, "float32"), ops.cast(negatives, "float32")

    def _loss_of_all(self, pairs):
        return self._loss(
            pairs, *(ops.cast(mask, "float32") for mask in (pairs.positives, pairs.negatives))
        )

    def _loss(self, pairs, positives, negatives, frozen=False):
        # V once for (i, j) and (j, i): half the work.
        distances, positives, negatives = _unordered(
            pairs.distances("euclidean"), positives, negatives
        )
        return divergence_loss(self.network(distances, frozen=frozen), positives, negatives)

    def _penalty(self, pairs):
        if not self.monotonicity:
            return 0.0
        distances = pairs.distances("euclidean")
        low = ops.minimum(ops.min(ops.where(pairs.others, distances, 2.0)), ops.max(distances))
        points = low + (ops.max(distances) - low) * ops.linspace(0.0, 1.0, _SLOPES, dtype="float32")
        return self.monotonicity * ops.mean(ops.relu(self.network.value_and_slope(points)[1]))


def _gradients(loss, variables):
    """Compute the gradient of `loss()` with respect to each of the variables that it reads."""

    def at(values):
        with keras.StatelessScope(
            list(zip(variables, values, strict=True)), initialize_variables=False
        ):
            return loss()

    values = [ops.stop_gradient(ops.convert_to_tensor(variable)) for variable in variables]
    return workarounds.gradient(at, values)


def _fixed(pairs):
    """Return the pairs of unit embeddings, through which no gradient flows."""
    return pairs["embedding"].without_gradient().map(pairwise.l2_normalize)


def _draw(probabilities, counts, seed):
    """Booleans (B, B), true for `counts` (B, 1) different images of each row, or all that are
    possible."""
    size = ops.shape(probabilities)[1]
    order, possible = sample_negatives(probabilities, size, seed)
    drawn = ops.logical_and(possible, ops.arange(size)[None, :] < counts)
    return ops.take_along_axis(drawn, ops.argsort(order, axis=1), axis=1)


def _unordered(distances, *weights):
    """Each pair of different images once: (B, B) -> (B, B // 2), the weights those of (i, j) and
    (j, i) together.

    Row i holds its pairs with the B // 2 images after it, round a circle. An even B has its
    diameters twice; there the weight is halved.
    """
    size = ops.shape(distances)[0]
    index = ops.arange(size)
    steps = 1 + ops.arange(size // 2)
    partners = (index[:, None] + steps[None, :]) % ops.maximum(size, 1)
    twice = 2 * steps == size
    share = ops.where(twice, 0.5, 1.0)[None, :]
    once = [share * ops.take_along_axis(w + ops.transpose(w), partners, axis=1) for w in weights]
    return (ops.take_along_axis(distances, partners, axis=1), *once)
