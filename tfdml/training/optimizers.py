"""Optimisers with a rate per part and layer of the learner, weight decay, clipping of the global gradient, averages."""

from __future__ import annotations

from collections.abc import Sequence

import keras
from keras import ops

from tfdml.errors import UserError
from tfdml.models.alternating_optimizer import AlternatingOptimizer
from tfdml.training.layer_groups import depths, layer_factor, thaw_step
from tfdml.training.part_rates import PartRates, part_optimizers
from tfdml.training.pytorch_optimizers import PyTorchAdam, PyTorchAdamW, PyTorchRMSprop, PyTorchSGD
from tfdml.training.schedules import WarmUp

PARTS = ("backbone", "projection", "objectives")


@keras.saving.register_keras_serializable("tfdml")
class PartAdam(PartRates, keras.optimizers.Adam):
    """Adam with a rate per part."""


@keras.saving.register_keras_serializable("tfdml")
class PartAdamW(PartRates, keras.optimizers.AdamW):
    """AdamW with a rate per part, at which its decoupled decay goes too."""


@keras.saving.register_keras_serializable("tfdml")
class PartSGD(PartRates, keras.optimizers.SGD):
    """SGD with a rate per part."""


@keras.saving.register_keras_serializable("tfdml")
class PartRMSprop(PartRates, keras.optimizers.RMSprop):
    """RMSprop with a rate per part."""


@keras.saving.register_keras_serializable("tfdml")
class PartLion(PartRates, keras.optimizers.Lion):
    """Lion with a rate per part; its decay is decoupled."""


@keras.saving.register_keras_serializable("tfdml")
class PartMuon(PartRates, keras.optimizers.Muon):
    """Muon for matrices and Adam for all else, as Keras has it, with a rate per part; its decay is decoupled."""


@keras.saving.register_keras_serializable("tfdml")
class PartPyTorchAdam(PartRates, PyTorchAdam):
    """PyTorch's Adam with a rate per part."""


@keras.saving.register_keras_serializable("tfdml")
class PartPyTorchAdamW(PartRates, PyTorchAdamW):
    """PyTorch's AdamW with a rate per part, at which its decoupled decay goes too, as in PyTorch."""


@keras.saving.register_keras_serializable("tfdml")
class PartPyTorchSGD(PartRates, PyTorchSGD):
    """PyTorch's SGD with a rate per part."""


@keras.saving.register_keras_serializable("tfdml")
class PartPyTorchRMSprop(PartRates, PyTorchRMSprop):
    """PyTorch's RMSprop with a rate per part."""


_CLASSES: dict[str, dict[str, type]] = {
    "keras": {
        "adam": PartAdam,
        "adamw": PartAdamW,
        "sgd": PartSGD,
        "rmsprop": PartRMSprop,
        "lion": PartLion,
        "muon": PartMuon,
    },
    "pytorch": {
        "adam": PartPyTorchAdam,
        "adamw": PartPyTorchAdamW,
        "sgd": PartPyTorchSGD,
        "rmsprop": PartPyTorchRMSprop,
    },
}
FORMS = tuple(_CLASSES)
OPTIMIZERS = tuple(_CLASSES["keras"])
CLIPPED = ("all", "part")
_DECOUPLED = (keras.optimizers.AdamW, keras.optimizers.Lion, keras.optimizers.Muon)


def check_form(name: str, form: str, argument: str = "`form`") -> None:
    """Refuse an optimiser that a form does not have.

    Args:
        name: One of `OPTIMIZERS`.
        form: One of `FORMS`.
        argument: What messages call the form.

    Raises:
        UserError: The form has no such optimiser.

    Example:
        >>> check_form("adam", "pytorch")
    """
    if name not in _CLASSES[form]:
        raise UserError(f"{argument} {form!r} has {', '.join(_CLASSES[form])}, and no {name}")


def build_optimizer(
    name: str,
    learner,
    learning_rate,
    learning_rates: dict[str, float] | None = None,
    weight_decay: float = 0.0,
    epsilon: float | None = None,
    momentum: float = 0.9,
    clip_norm: float = 0.0,
    form: str = "keras",
    clip: str = "all",
    layer_decay: float = 1.0,
    unfreeze_steps: Sequence[int] = (),
    ema: float = 0.0,
):
    """Return an optimizer, built on the learner's variables, with a rate per part; one for each phase if there are two.

    It is saved with the learner, with its rates and its state: `keras.saving.load_model` and `ModelCheckpoint` work.

    Args:
        name: One of `OPTIMIZERS`.
        learner: A `MetricLearner`, which is built if it is not.
        learning_rate: A number or schedule, the base rate.
        learning_rates: The rates of `PARTS` that have one of their own, at the first step; where the base rate is a
            schedule they follow it in proportion.
        weight_decay: Coupled (added to the gradient, as in PyTorch's Adam) for adam, sgd and rmsprop; decoupled, at
            each variable's own rate, for adamw, lion and muon. 0 by default for all, whereas AdamW's own default is
            0.004 in Keras and 0.01 in PyTorch: a decay is part of the recipe that the caller states.
        epsilon: Adam's, RMSprop's and Muon's; None for 1e-7 in Keras's form and 1e-8 in PyTorch's, their defaults.
        momentum: SGD's.
        clip_norm: The largest norm of the gradient over all replicas; 0 for none.
        form: `"keras"` or `"pytorch"`: whose convention epsilon and momentum follow; the formulas stand side by side in
            `tfdml.training.pytorch_optimizers`.
        clip: What `clip_norm` bounds: the whole gradient (`"all"`), or that of each part by itself (`"part"`).
        layer_decay: What the backbone's rate is multiplied by from each of its 12 groups of layers to the one below:
            see `tfdml.training.layer_groups`. 1 for one rate.
        unfreeze_steps: Ascending steps. With one, the backbone does not change before it; with n, the n-th part of its
            layers nearest to the output trains from the first step named, and so on downwards.
        ema: With 0.999, say, `averages` of the weights are kept: see `tfdml.training.averaging`. 0 for none.

    Raises:
        UserError: The name, the form or a part is unknown, there is no such form of the optimiser, or the base rate
            is 0.

    Example:
        >>> rates = {"projection": 1e-2, "objectives": 1e-2}
        >>> learner.compile(build_optimizer("adam", learner, 3e-4, rates))
    """
    if name not in OPTIMIZERS:
        raise UserError(f"`name={name!r}`: known are {', '.join(OPTIMIZERS)}")
    if form not in FORMS:
        raise UserError(f"`form={form!r}`: known are {', '.join(FORMS)}")
    check_form(name, form)
    if clip not in CLIPPED:
        raise UserError(f"`clip={clip!r}`: known are {', '.join(CLIPPED)}")
    if not learner.built:
        size = learner.embedder.image_size
        learner.build((None, size, size, 3))
    own = {id(variable) for variable in learner.statistics_variables}
    factors = _factors(learning_rate, learning_rates or {})
    parts = learner.parts()
    by_id = {id(variable): factors[part] for part, members in parts.items() for variable in members}
    thaw: dict[int, int] = {}
    for variable, depth in depths(parts["backbone"]):
        by_id[id(variable)] *= layer_factor(depth, layer_decay)
        thaw[id(variable)] = thaw_step(depth, unfreeze_steps)
    part_of = {id(variable): part for part, members in parts.items() for variable in members}

    def build(variables):
        optimizer = _make(_CLASSES[form][name], learning_rate, epsilon, momentum)
        decoupled = isinstance(optimizer, _DECOUPLED)
        members = {part: [i for i, v in enumerate(variables) if part_of.get(id(v)) == part] for part in PARTS}
        optimizer.configure(
            [by_id.get(id(variable), 1.0) for variable in variables],
            coupled_decay=0.0 if decoupled else weight_decay,
            decoupled_decay=weight_decay if decoupled else 0.0,
            norm=clip_norm or None,
            norm_by_part=clip == "part",
            thaw_steps=[thaw.get(id(variable), 0) for variable in variables],
            ema=ema,
            parts=members,
        )
        optimizer.build(variables)
        return optimizer

    embedder = build([variable for variable in learner.trainable_variables if id(variable) not in own])
    if not own:
        return embedder
    optimizer = AlternatingOptimizer(embedder, build([v for v in learner.trainable_variables if id(v) in own]))
    optimizer.in_statistics = lambda variable: id(variable) in own
    optimizer.build(learner.trainable_variables)
    return optimizer


def part_rates(optimizer) -> dict[str, float]:
    """The present rate of each of `PARTS` that trains, of a backbone's layers the highest.

    Args:
        optimizer: Of `build_optimizer`; of another there is nothing to say.

    Example:
        >>> part_rates(build_optimizer("adam", learner, 1e-3, {"backbone": 1e-4}))["backbone"]
        0.0001
    """
    rates: dict[str, float] = {}
    for part in part_optimizers(optimizer):
        # The statistics are a part of the objectives, whose other weights count: theirs come last.
        rates.update(part.highest_rates())
    return rates


def _factors(learning_rate, learning_rates: dict[str, float]) -> dict[str, float]:
    """What each part's rate is of the base rate."""
    unknown = sorted(set(learning_rates) - set(PARTS))
    if unknown:
        raise UserError(f"`learning_rates`: there is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    if isinstance(learning_rate, keras.optimizers.schedules.PiecewiseConstantDecay):
        base = learning_rate.values[0]
    elif isinstance(learning_rate, WarmUp):
        base = learning_rate.peak
    elif isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        base = float(ops.convert_to_numpy(learning_rate(0)))
    else:
        base = float(learning_rate)
    if learning_rates and base <= 0:
        raise UserError(f"`learning_rate` must be positive where parts have rates of their own, not {base:g}")
    return {part: learning_rates[part] / base if part in learning_rates else 1.0 for part in PARTS}


def _make(cls: type, learning_rate, epsilon: float | None, momentum: float):
    """The optimiser, without Keras's weight decay: see `PartRates`."""
    if issubclass(cls, keras.optimizers.SGD):
        return cls(learning_rate, momentum=momentum)
    if issubclass(cls, keras.optimizers.Lion):
        return cls(learning_rate)
    extra = {} if epsilon is None else {"epsilon": epsilon}
    if issubclass(cls, keras.optimizers.Muon):
        # The projection to embeddings is a matrix like any other.
        return cls(learning_rate, exclude_embeddings=False, **extra)
    return cls(learning_rate, **extra)
