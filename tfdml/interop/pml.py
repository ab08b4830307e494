"""Losses of pytorch-metric-learning 2.9 by their names and arguments there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tfdml.errors import UserError
from tfdml.interop import pml_pairs, pml_proxies
from tfdml.interop.given import Given
from tfdml.interop.pml_parts import Part, as_part, is_part, make_part

_TRANSLATED: dict[str, Callable[..., Any]] = {**pml_pairs.TRANSLATED, **pml_proxies.TRANSLATED}
# Arguments of every loss there, and what leaves them as if they were not given.
_WITHOUT_EFFECT: dict[str, Any] = {
    "collect_stats": ...,
    "embedding_regularizer": None,
    "embedding_reg_weight": ...,
    "weight_regularizer": None,
    "weight_reg_weight": ...,
    "weight_init_func": None,
}
_INSTEAD = {
    "embedding_regularizer": "another term beside the loss, such as `tfdml.objectives.GlobalOrthogonal()`",
    "weight_regularizer": "`tfdml.objectives.RegularizedSoftTriple`, or `weight_decay` of the optimiser",
    "weight_init_func": "`objective.class_proxies.proxies.assign(...)` after the first call",
}
#: What comes nearest to a loss that cannot be expressed.
NEAREST = {
    "CrossBatchMemory": "`tfdml.objectives.CrossBatchMemory` of the loss",
    "DynamicSoftMarginLoss": "`tfdml.losses.TripletLoss(mining='hard')`",
    "GenericPairLoss": "a `tfdml.losses.EmbeddingLoss` of your own",
    "InstanceLoss": "`tfdml.objectives.InstanceLoss`, the paper's classification over instances; the one there takes "
    "classes for positions in the batch",
    "IntraPairVarianceLoss": "`tfdml.losses.TupletMarginLoss(variance_weight=0.5)`, which has it as a term",
    "LargeMarginSoftmaxLoss": "`tfdml.losses.SphereFaceLoss`, on normalised vectors",
    "ManifoldLoss": "`ProxyAnchorLoss`",
    "MultipleLosses": "several terms: `MetricLearner(embedder, [loss, loss])`",
    "NCALoss": "`tfdml.losses.SoftNearestNeighborLoss(temperature=1 / softmax_scale)`, the logarithm of the same share",
    "NPairsLoss": "`tfdml.losses.NPairLoss`, with all images of other classes as negatives, not one a class",
    "P2SGradLoss": "`tfdml.losses.NormSoftmaxLoss`, as an objective",
    "PNPLoss": "`tfdml.losses.SmoothAPLoss`",
    "RankedListLoss": "`tfdml.losses.RankedListLoss(margin, alpha, Tn, Tp)`, whose weights carry no gradient",
    "SelfSupervisedLoss": "labels that say which views belong together",
    "SignalToNoiseRatioContrastiveLoss": "`ContrastiveLoss`",
    "SmoothAPLoss": "`tfdml.losses.SmoothAPLoss`, which leaves an image out of its own ranking, as the paper does",
    "SphereFaceLoss": "`tfdml.losses.SphereFaceLoss`, on normalised vectors; there logits grow with their lengths",
    "ThresholdConsistentMarginLoss": "`tfdml.losses.MarginLoss`",
    "VICRegLoss": "`tfdml.losses.VICRegLoss`, of one labelled batch and not of two batches",
}


def from_pml(name: str, miner: str | Part | None = None, **arguments: Any) -> Any:
    """What pytorch-metric-learning calls `name`, as tfdml has it, with its arguments, defaults and conventions.

    Losses come with the distance, the normalisation and the reduction that they have there: `TripletMarginLoss`
    compares Euclidean distances of normalised embeddings, and averages over the triplets that are not 0. A miner is
    given with the loss, and not at each call. What cannot be expressed exactly is refused; what agrees and what
    differs by rounding or on purpose is listed in `docs/parity.md`. PyTorch is not needed.

    Args:
        name: The class there: a loss, or a distance, reducer or miner to give to one.
        miner: Which pairs or triplets the loss learns from: the name of a miner, or what `from_pml` makes of it.
        **arguments: Those of the class there. `distance` and `reducer` are names, or made by `from_pml` too.
            `embedding_size` is accepted and not needed.

    Returns:
        A `keras.losses.Loss` on embeddings; a `tfdml.objectives.ProxyLoss` for a loss with weights of its own; a
        description to pass on for a distance, reducer or miner.

    Raises:
        UserError: There is no such name or argument, or tfdml has no equal; the message says what is nearest.

    Example:
        >>> from_pml("TripletMarginLoss", margin=0.2)
        NormalizedLoss(loss=TripletLoss(... margin=0.2, mining='all', distance='euclidean', average='active'), ...)
        >>> from_pml("ArcFaceLoss", num_classes=98, embedding_size=128, margin=28.6).loss.margin  # radians
        0.4991641...
        >>> loss = from_pml("ContrastiveLoss", distance=from_pml("LpDistance", power=2), reducer="MeanReducer")
        >>> from_pml("MultiSimilarityLoss", miner=from_pml("MultiSimilarityMiner", epsilon=0.05)).mining_epsilon
        0.05
        >>> from_pml("TripletMarginLoss", swap=True)
        Traceback (most recent call last):
        tfdml.errors.UserError: TripletMarginLoss: `swap=True` has no equal in tfdml; nearest: `swap=False`

    Source: K. Musgrave, S. Belongie, S.-N. Lim, "PyTorch Metric Learning", 2020; version 2.9.
    """
    if is_part(name):
        if miner is not None:
            raise UserError(f"{name} takes no `miner`")
        return make_part(name, arguments)
    if name in NEAREST:
        raise UserError(f"{name} of pytorch-metric-learning has no equal in tfdml; nearest: {NEAREST[name]}")
    if name not in _TRANSLATED:
        raise UserError(
            f"pytorch-metric-learning 2.9 has no {name!r} that tfdml knows; losses: {', '.join(sorted(_TRANSLATED))}"
        )
    for argument, allowed in _WITHOUT_EFFECT.items():
        if arguments.pop(argument, allowed) is not allowed and allowed is not ...:
            raise UserError(f"{name}: `{argument}` has no equal in tfdml; nearest: {_INSTEAD[argument]}")
    parts = {
        kind: as_part(kind, value)
        for kind, value in (
            ("distance", arguments.pop("distance", None)),
            ("reducer", arguments.pop("reducer", None)),
            ("miner", miner),
        )
        if value is not None
    }
    translate = _TRANSLATED[name]
    parameters = dict(inspect.signature(translate).parameters)
    del parameters["given"]
    for argument in arguments:
        if argument not in parameters:
            raise UserError(f"{name}: no argument `{argument}`; it has {', '.join(parameters)}, distance, reducer")
    for argument, parameter in parameters.items():
        if parameter.default is parameter.empty and argument not in arguments:
            raise UserError(f"{name}: `{argument}` is missing")
    try:
        return translate(Given(name, parts), **arguments)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: {error}") from error
