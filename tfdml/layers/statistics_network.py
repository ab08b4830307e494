"""The statistics network of RankMI: how much a distance speaks for a pair of one class."""

import itertools

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import integer, number
from tfdml.saving import SavedByArguments

# Pairs whose activations are alive at a time, so that memory does not grow as B^2 x hidden.
_CHUNK = 2**17
# Where `root` looks for changes of sign, and how long: every third step halves a bracket of (high -
# low) / CELLS.
_CELLS = 256
_MAX_STEPS = 48
_PRECISION = 1e-7


class StatisticsNetwork(SavedByArguments, keras.layers.Layer):
    """V(d) = MLP(d) - d, a learned scalar function of a distance.

    d -> Dense(H) -> LeakyReLU(0.1) -> (Dense(H) -> LeakyReLU(0.1)) x L -> Dense(1), minus d itself.
    Kernels start Glorot-uniform and biases at 0, the last at `initial_root`, so that V starts as a
    straight line with a slope near -1 and its root near there. Weights and arithmetic are float32
    under every dtype policy.

    Many distances are worked through in chunks whose activations are computed again for the
    gradient: memory is that of the distances, not H times as much.

    Args:
        hidden: H, the width of each hidden layer.
        depth: L, the number of H x H layers; 0 leaves one hidden layer.
        negative_slope: Of the LeakyReLU.
        initial_root: V(0) at the start.

    Raises:
        ValueError: `hidden` is not positive, or `depth` is negative.

    Example:
        >>> network = StatisticsNetwork(hidden=128, depth=2)
        >>> tuple(network(keras.ops.array([[0.3, 1.2]])).shape)
        (1, 2)

    Source: Kemertas et al., "RankMI: A Mutual Information Maximizing Ranking Loss", CVPR 2020, eq.
    10 and 14.
    """

    def __init__(self, hidden=128, depth=2, negative_slope=0.1, initial_root=0.0, **kwargs):
        super().__init__(**{**kwargs, "dtype": "float32"})
        self.hidden = integer("hidden", hidden, at_least=1)
        self.depth = integer("depth", depth, at_least=0)
        self.negative_slope = number("negative_slope", negative_slope, at_least=0)
        self.initial_root = number("initial_root", initial_root)

    def build(self, input_shape=None):
        """Create the weights, which depend on no shape."""
        sizes = [1, *[self.hidden] * (self.depth + 1), 1]
        self.kernels, self.biases = [], []
        for i, shape in enumerate(itertools.pairwise(sizes)):
            self.kernels.append(
                self.add_weight(name=f"kernel_{i}", shape=shape, initializer="glorot_uniform")
            )
            start = keras.initializers.Constant(self.initial_root if i == self.depth + 1 else 0.0)
            self.biases.append(
                self.add_weight(name=f"bias_{i}", shape=shape[1:], initializer=start)
            )

    def call(self, distances, frozen=False):
        """V of each distance, in the same shape; `frozen` stops the gradient to the weights, not to
        the distances."""
        flat = ops.reshape(ops.cast(distances, "float32"), (-1,))
        values = self._in_chunks(flat, self._weights(frozen))
        return ops.reshape(values, ops.shape(distances))

    def value_and_slope(self, distances, frozen=False):
        """V and dV/dd of a vector of distances (N,); both are differentiable with respect to the
        weights."""
        return self._value_and_slope(ops.cast(distances, "float32"), self._weights(frozen))

    def root(self, initial, low=0.0, high=2.0):
        """Return the distance beta with V(beta) = 0 that is nearest to `initial`; no gradient flows
        through.

        Roots are bracketed where V changes its sign between neighbors of a grid of 257 points. In
        the bracket nearest to `initial` Newton's iteration starts from the secant's zero; a step
        that would leave the bracket, and every third step, halves it instead. So it ends after at
        most 48 steps, whatever V looks like, and is within 1e-6 of a root.

        Args:
            initial: A scalar, usually the root before the last update of the weights.
            low: Where the interval begins; distances of unit vectors lie in 0 .. 2.
            high: Where it ends.

        Returns:
            The root, a scalar; `initial` where V does not change its sign in the interval (see
            `find_root`).

        Example:
            >>> network = StatisticsNetwork()
            >>> network.build()
            >>> float(network.root(1.0))  # untrained, V is a line through 0
            0.0
        """
        return self.find_root(initial, low, high)[0]

    def find_root(self, initial, low=0.0, high=2.0):
        """Return what `root` returns, and whether it is one: false where V does not change its sign
        in the interval."""
        weights = self._weights(frozen=True)
        initial = ops.stop_gradient(ops.cast(initial, "float32"))
        grid = ops.linspace(low, high, _CELLS + 1, dtype="float32")
        values = self._value_and_slope(grid, weights)[0]
        changes, zeros = _secant_zeros(grid, values)
        cell = ops.argmin(ops.where(changes, ops.abs(zeros - initial), float("inf")))
        exists = ops.any(changes)

        def step(*state):
            return self._newton_step(weights, *state)

        low, high = ops.take(grid[:-1], cell), ops.take(grid[1:], cell)
        left, zero = ops.take(values[:-1], cell), ops.take(zeros, cell)
        begin = (ops.zeros((), "int32"), low, high, left, zero, ops.ones(()))
        x = ops.while_loop(_is_unfinished, step, begin)[4]
        return ops.stop_gradient(ops.where(exists, x, initial)), exists

    def _newton_step(self, weights, count, low, high, left, x, change):
        """Return the state of `find_root` after one more step.

        Args:
            weights: Of `_weights`.
            count: How many steps were made.
            low: Where the bracket begins.
            high: Where it ends.
            left: V at its first beginning, whose sign V has on the left of the root.
            x: The estimate of the root.
            change: How far the last step went.
        """
        values, slopes = self._value_and_slope(ops.reshape(x, (1,)), weights)
        value, slope = values[0], slopes[0]
        on_left = ops.sign(value) == ops.sign(left)
        low, high = ops.where(on_left, x, low), ops.where(on_left, high, x)
        newton = x - value / ops.where(slope == 0, 1.0, slope)
        usable = ops.logical_and(slope != 0, ops.logical_and(newton >= low, newton <= high))
        usable = ops.logical_and(usable, count % 3 != 2)
        following = ops.where(usable, newton, 0.5 * (low + high))
        following = ops.where(value == 0, x, following)
        return count + 1, low, high, left, following, ops.abs(following - x)

    def _weights(self, frozen: bool) -> list:
        # As tensors: TensorFlow's rematerialization would count the gradient of a variable among
        # its arguments twice.
        read = ops.stop_gradient if frozen else ops.copy
        pairs = zip(self.kernels, self.biases, strict=True)
        return [read(weight) for weight in itertools.chain(*pairs)]

    def _values(self, flat, *weights):
        """Return V of numbers, which is the network's output less its input."""
        x = flat[:, None]
        for i in range(0, len(weights), 2):
            x = pairwise.matmul(x, weights[i]) + weights[i + 1]
            if i + 2 < len(weights):
                x = ops.leaky_relu(x, self.negative_slope)
        return x[:, 0] - flat

    def _value_and_slope(self, flat, weights):
        x, slope = flat[:, None], ops.ones_like(flat)[:, None]
        for i in range(0, len(weights), 2):
            x = pairwise.matmul(x, weights[i]) + weights[i + 1]
            slope = pairwise.matmul(slope, weights[i])
            if i + 2 < len(weights):
                slope = ops.where(x > 0, slope, self.negative_slope * slope)
                x = ops.leaky_relu(x, self.negative_slope)
        return x[:, 0] - flat, slope[:, 0] - 1.0

    def _in_chunks(self, flat, weights):
        size = ops.shape(flat)[0]
        if isinstance(size, int) and size <= _CHUNK:
            return self._values(flat, *weights)
        # A size that the graph does not know may still be small, or 0.
        chunks = (size + _CHUNK - 1) // _CHUNK if isinstance(size, int) else size // _CHUNK + 1
        length = (size + chunks - 1) // chunks
        padded = ops.pad(flat, [[0, chunks * length - size]])
        again = keras.remat(self._values)
        values = ops.map(
            lambda chunk: again(chunk, *weights), ops.reshape(padded, (chunks, length))
        )
        return ops.reshape(values, (-1,))[:size]

    def compute_output_shape(self, input_shape):
        """Return that of the distances."""
        return input_shape


def _secant_zeros(grid, values):
    """Return in which cells of a grid a function changes its sign, and where its secant is 0 there;
    elsewhere where the cell begins."""
    left, right = values[:-1], values[1:]
    changes = ops.logical_or(
        ops.logical_and(left >= 0, right <= 0),
        ops.logical_and(left <= 0, right >= 0),
    )
    fall = left - right
    share = ops.where(fall == 0, 0.0, left / ops.where(fall == 0, 1.0, fall))
    share = ops.clip(ops.where(changes, share, 0.0), 0.0, 1.0)
    return changes, grid[:-1] + share * (grid[1:] - grid[:-1])


def _is_unfinished(count, low, high, left, x, change):
    return ops.logical_and(count < _MAX_STEPS, change > _PRECISION)
