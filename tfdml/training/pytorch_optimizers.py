"""Adam, AdamW, SGD and RMSprop as PyTorch computes them, where Keras computes something else.

With g the gradient, r the rate, t the step from 1, e epsilon and u the momentum:

| optimiser | Keras, TensorFlow and Caffe | PyTorch |
|---|---|---|
| Adam, AdamW | r sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + e) | r / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + e) |
| SGD with momentum | s = u s + r g, x -= s | s = u s + g, x -= r s |
| RMSprop | r g / sqrt(v + e) | r g / (sqrt(v) + e) |
| RMSprop with momentum | s = u s + r g / sqrt(v + e), x -= s | s = u s + g / (sqrt(v) + e), x -= r s |

PyTorch's epsilon is that of Kingma and Ba's algorithm 1; elsewhere it is the "epsilon hat" of their section 2, which
counts 1 / sqrt(1 - b2^t) times as much: 32 times in the first step. It does not show at 1e-8 and does at 0.01. The two
momenta differ once the rate changes: Keras's old steps keep the rate of their time, PyTorch's take the new one at once.
"""

from __future__ import annotations

import keras
from keras import ops

from tfdml.workarounds import index_in


class _Slots:
    """What an optimiser remembers of a variable, which Keras keeps by the variable's index."""

    def _of(self, slots, variable):
        return slots[index_in(self, variable)]

    def _remember(self, slot, share, value):
        """Move a running mean: slot = share slot + (1 - share) value."""
        self.assign_add(slot, (1.0 - share) * (value - slot))  # type: ignore[attr-defined]


def _like(variable, value):
    # Dense: the gradient of a row of a table may come as its rows alone.
    return ops.cast(ops.convert_to_tensor(value), variable.dtype)


@keras.saving.register_keras_serializable("tfdml")
class PyTorchAdam(_Slots, keras.optimizers.Adam):
    """Adam whose epsilon is added after the bias correction: algorithm 1 of Kingma and Ba, and `torch.optim.Adam`.

    m = b1 m + (1 - b1) g,    v = b2 v + (1 - b2) g^2
    x = x - rate m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + epsilon)

    where `keras.optimizers.Adam` adds epsilon to sqrt(v) and corrects the quotient. With `amsgrad` v is its maximum so
    far.

    Args: those of `keras.optimizers.Adam`, with PyTorch's defaults: rate 0.001 and epsilon 1e-8 (Keras: 1e-7).

    Example:
        >>> x = keras.Variable([1.0])
        >>> PyTorchAdam(learning_rate=1.0, epsilon=0.01).apply([keras.ops.array([0.001])], [x])
        >>> float(x[0])  # 1 - 0.001 / (0.001 + 0.01); Keras's Adam gives 0.9969
        0.9090909
    """

    def __init__(self, learning_rate=0.001, *, epsilon=1e-8, **arguments):
        super().__init__(learning_rate=learning_rate, epsilon=epsilon, **arguments)

    def update_step(self, gradient, variable, learning_rate):
        """One variable's update."""
        gradient, rate = _like(variable, gradient), _like(variable, learning_rate)
        step = _like(variable, self.iterations + 1)
        momentum, velocity = self._of(self._momentums, variable), self._of(self._velocities, variable)
        self._remember(momentum, self.beta_1, gradient)
        self._remember(velocity, self.beta_2, ops.square(gradient))
        if self.amsgrad:
            largest = self._of(self._velocity_hats, variable)
            self.assign(largest, ops.maximum(largest, velocity))
            velocity = largest
        first = 1.0 - ops.power(_like(variable, self.beta_1), step)
        second = 1.0 - ops.power(_like(variable, self.beta_2), step)
        self.assign_sub(variable, rate * momentum / (first * (ops.sqrt(velocity / second) + self.epsilon)))


@keras.saving.register_keras_serializable("tfdml")
class PyTorchAdamW(PyTorchAdam, keras.optimizers.AdamW):
    """AdamW with the epsilon of `PyTorchAdam`; its decay, x = x - rate decay x before the step, is alike in both.

    The arguments are those of `keras.optimizers.AdamW`, with PyTorch's defaults: rate 0.001, decay 0.01 (Keras: 0.004)
    and epsilon 1e-8.
    """

    def __init__(self, learning_rate=0.001, *, weight_decay=0.01, **arguments):
        super().__init__(learning_rate, weight_decay=weight_decay, **arguments)


@keras.saving.register_keras_serializable("tfdml")
class PyTorchSGD(_Slots, keras.optimizers.SGD):
    """SGD whose momentum sums gradients, as `torch.optim.SGD`'s, and not steps: a new rate holds for all of it at once.

    s = momentum s + g,    x = x - rate s;    with `nesterov` x = x - rate (g + momentum s)

    The arguments are those of `keras.optimizers.SGD`, with PyTorch's default rate of 0.001 (Keras: 0.01). PyTorch's
    dampening is 0 here, its default.
    """

    def __init__(self, learning_rate=0.001, **arguments):
        super().__init__(learning_rate, **arguments)

    def update_step(self, gradient, variable, learning_rate):
        """One variable's update."""
        gradient, rate = _like(variable, gradient), _like(variable, learning_rate)
        if self.momentum:
            total = self._of(self.momentums, variable)
            self.assign(total, self.momentum * total + gradient)
            gradient = gradient + self.momentum * total if self.nesterov else total
        self.assign_sub(variable, rate * gradient)


@keras.saving.register_keras_serializable("tfdml")
class PyTorchRMSprop(_Slots, keras.optimizers.RMSprop):
    """RMSprop whose epsilon is added to the root, and whose momentum sums steps without their rate.

    v = rho v + (1 - rho) g^2,    s = momentum s + g / (sqrt(v) + epsilon),    x = x - rate s

    as `torch.optim.RMSprop` has it, where `keras.optimizers.RMSprop` adds epsilon to v. With `centered` the square of
    the mean gradient is subtracted from v.

    The arguments are those of `keras.optimizers.RMSprop`, with PyTorch's defaults: rate 0.01 (Keras: 0.001), rho, its
    alpha, of 0.99 (Keras: 0.9), and epsilon 1e-8 (Keras: 1e-7).
    """

    def __init__(self, learning_rate=0.01, *, rho=0.99, epsilon=1e-8, **arguments):
        super().__init__(learning_rate=learning_rate, rho=rho, epsilon=epsilon, **arguments)

    def update_step(self, gradient, variable, learning_rate):
        """One variable's update."""
        gradient, rate = _like(variable, gradient), _like(variable, learning_rate)
        velocity = self._of(self._velocities, variable)
        self._remember(velocity, self.rho, ops.square(gradient))
        variance = velocity
        if self.centered:
            mean = self._of(self._average_gradients, variable)
            self._remember(mean, self.rho, gradient)
            # Rounding may take it below 0.
            variance = ops.maximum(velocity - ops.square(mean), 0.0)
        step = gradient / (ops.sqrt(variance) + self.epsilon)
        if self.momentum:
            total = self._of(self._momentums, variable)
            self.assign(total, self.momentum * total + step)
            step = total
        self.assign_sub(variable, rate * step)
