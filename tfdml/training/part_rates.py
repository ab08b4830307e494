"""What an optimiser does for each variable that Keras's does for all alike."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
from keras import ops

from tfdml.models.alternating_optimizer import AlternatingOptimizer


class PartRates:
    """Mixed into a Keras optimizer: a rate, weight decay and an average for each variable, clipping over replicas.

    A Keras optimizer has one learning rate. Settings of a variable are found by its index in the list that `build`
    takes, so that they work with every backend and under a distribution strategy, and can be saved with the optimizer.
    """

    _tfdml_factors: Sequence[float] = ()
    _tfdml_coupled = 0.0
    _tfdml_decoupled = 0.0
    _tfdml_norm: float | None = None
    _tfdml_by_part = False
    _tfdml_thaw: Sequence[int] = ()
    _tfdml_ema = 0.0
    _tfdml_parts: Mapping[str, Sequence[int]] = types.MappingProxyType({})
    #: Returns the step that `thaw_steps` refer to, where it is not the optimizer's own: that of both phases.
    clock: Callable[[], Any] | None = None
    averages: Sequence[Any] = ()

    def configure(
        self,
        factors: Sequence[float] = (),
        coupled_decay: float = 0.0,
        decoupled_decay: float = 0.0,
        norm: float | None = None,
        norm_by_part: bool = False,
        thaw_steps: Sequence[int] = (),
        ema: float = 0.0,
        parts: dict[str, Sequence[int]] | None = None,
    ) -> None:
        """Set what is applied in each update. Call it before `build`.

        Args:
            factors: The rate of each variable as a multiple of the base rate; empty for the base rate.
            coupled_decay: Weight decay that is added to the gradient.
            decoupled_decay: Weight decay at the variable's own rate.
            norm: The largest norm of a group's gradient; None for any.
            norm_by_part: Whether the group is a part; otherwise all are one.
            thaw_steps: The first step at which each variable changes; empty for step 0.
            ema: The share of the old value in the average of each variable; 0 for no averages.
            parts: The indices of the variables of each part.
        """
        self._tfdml_factors = list(factors)
        self._tfdml_coupled, self._tfdml_decoupled = float(coupled_decay), float(decoupled_decay)
        self._tfdml_parts = {part: list(indices) for part, indices in (parts or {}).items()}
        self._tfdml_norm, self._tfdml_by_part = norm, norm_by_part
        self._tfdml_thaw = list(thaw_steps)
        self._tfdml_ema = float(ema)

    def build(self, variables):
        """Create the optimizer's state for these variables, their averages included."""
        if self.built:  # type: ignore[attr-defined]
            return
        super().build(variables)  # type: ignore[misc]
        if self._tfdml_ema:
            self.averages = [self.add_variable_from_reference(v, name="average") for v in variables]  # type: ignore[attr-defined]

    def get_config(self):
        """Return Keras's config, with the arguments of `configure` as `part_rates`."""
        own = {
            "factors": list(self._tfdml_factors),
            "coupled_decay": self._tfdml_coupled,
            "decoupled_decay": self._tfdml_decoupled,
            "norm": self._tfdml_norm,
            "norm_by_part": self._tfdml_by_part,
            "thaw_steps": list(self._tfdml_thaw),
            "ema": self._tfdml_ema,
            "parts": {part: list(indices) for part, indices in self._tfdml_parts.items()},
        }
        return {**super().get_config(), "part_rates": own}  # type: ignore[misc]

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Return the optimizer of `get_config`, not built yet."""
        config = dict(config)
        own = config.pop("part_rates", {})
        optimizer = super().from_config(config, custom_objects)  # type: ignore[misc]
        optimizer.configure(**own)
        return optimizer

    def update_step(self, gradient, variable, learning_rate):
        """One variable's update, at its own rate."""
        index = self._get_variable_index(variable)  # type: ignore[attr-defined]
        if self._tfdml_coupled:
            gradient = gradient + ops.cast(self._tfdml_coupled, variable.dtype) * ops.cast(variable, gradient.dtype)
        rate = self.rate_of(index, learning_rate)
        if self._tfdml_decoupled:
            self.assign_sub(variable, variable * ops.cast(rate * self._tfdml_decoupled, variable.dtype))  # type: ignore[attr-defined]
        super().update_step(gradient, variable, rate)  # type: ignore[misc]
        if self.averages:
            self._average(self.averages[index], variable)

    def rate_of(self, index, learning_rate):
        """The rate of a variable, where the optimiser's is `learning_rate`."""
        rate = learning_rate * self._tfdml_factors[index] if self._tfdml_factors else learning_rate
        if thaw := self._tfdml_thaw[index] if self._tfdml_thaw else 0:
            step = self.iterations if self.clock is None else self.clock()  # type: ignore[attr-defined]
            rate = rate * ops.cast(ops.convert_to_tensor(step) >= thaw, rate.dtype)
        return rate

    def highest_rates(self) -> dict[str, float]:
        """The present rate of each part that has weights here, of a backbone's layers the highest."""
        now = ops.cast(self.learning_rate, "float32")  # type: ignore[attr-defined]
        members = {part: indices for part, indices in self._tfdml_parts.items() if indices}
        return {
            part: max(float(ops.convert_to_numpy(self.rate_of(index, now))) for index in indices)
            for part, indices in members.items()
        }

    def with_averages(self) -> Iterator[tuple]:
        """Each weight with its average; nothing before the first step, when there is none."""
        if self.averages and int(ops.convert_to_numpy(self.iterations)):  # type: ignore[attr-defined]
            yield from zip(self._trainable_variables, self.averages, strict=True)  # type: ignore[attr-defined]

    def _average(self, average, variable):
        # Early on the average follows fast: it must not keep what the weights were before training.
        step = ops.cast(self.iterations, "float32")  # type: ignore[attr-defined]
        kept = ops.minimum(self._tfdml_ema, (1.0 + step) / (10.0 + step))
        kept = ops.cast(ops.where(step > 0, kept, 0.0), variable.dtype)
        self.assign(average, kept * average + (1.0 - kept) * variable)  # type: ignore[attr-defined]

    def _apply_weight_decay(self, variables):
        """Nothing: Keras's decay goes at the base rate, that of `update_step` at the variable's own."""

    def _all_reduce_sum_gradients(self, grads_and_vars):
        # Keras clips before it sums over replicas; the norm that counts is that of the sum.
        reduced = super()._all_reduce_sum_gradients(grads_and_vars)  # type: ignore[misc]
        return list(zip(self._clipped([g for g, _ in reduced]), [v for _, v in reduced], strict=True))

    def _clip_gradients(self, grads):
        # Elsewhere than on TensorFlow gradients are of the global batch already, and the hook above is not called.
        grads = super()._clip_gradients(grads)  # type: ignore[misc]
        return grads if keras.backend.backend() == "tensorflow" else self._clipped(grads)

    def _clipped(self, grads: list) -> list:
        if self._tfdml_norm is None:
            return grads
        clipped = list(grads)
        for group in self._tfdml_parts.values() if self._tfdml_by_part else [range(len(grads))]:
            members = [index for index in group if grads[index] is not None]
            total = sum((ops.sum(ops.square(ops.cast(grads[i], "float32"))) for i in members), ops.zeros(()))
            scale = self._tfdml_norm / ops.maximum(ops.sqrt(total), self._tfdml_norm)
            for index in members:
                clipped[index] = grads[index] * ops.cast(scale, grads[index].dtype)
        return clipped


def part_optimizers(optimizer) -> Iterator[PartRates]:
    """The optimisers with `PartRates` that one of `build_optimizer` is made of; of two phases, the embedder's last.

    Args:
        optimizer: Also one within Keras's `LossScaleOptimizer`; of another kind there is none.
    """
    if isinstance(optimizer, AlternatingOptimizer):
        yield from part_optimizers(optimizer.statistics_optimizer)
        yield from part_optimizers(optimizer.embedder_optimizer)
        return
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    if isinstance(optimizer, PartRates):
        yield optimizer
