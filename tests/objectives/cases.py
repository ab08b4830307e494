"""Every objective with the arguments by which its path differs, what it reads, and its float64
reference."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

from tests.losses import references as of_losses
from tests.models.networks import values
from tests.objectives import references_classes as of_classes
from tests.objectives import references_rankmi, references_views
from tests.support import references as plain
from tests.support import references_moments
from tfdml import kernels, losses, objectives

#: Of a batch for objectives with weights for each class, or whose input has one size.
CLASSES, DIM = 9, 4


def embedding(x):
    """The vectors as the embedding."""
    return {"embedding": x}


class Case(NamedTuple):
    """An objective, and its reference.

    Args:
        objective: The objective, built.
        reference: The value of labels, of each array that it reads, and of each of `weights`.
        inputs: From vectors (B, 4) to the arrays that it reads, by name.
        weights: The variables whose gradient is compared as well.
        frozen: A function of labels, arrays and weights: what the reference takes as constant where
            the gradient is compared, by argument.
        unit: Whether the vectors have length 1 where the gradient is compared.
        relative: The tolerance of the gradient.
        floor: That of the value on degenerate batches.
    """

    objective: Any
    reference: Callable
    inputs: Callable = embedding
    weights: Sequence = ()
    frozen: Callable | None = None
    unit: bool = True
    relative: float = 1e-5
    floor: float = 2e-6


def built(objective, inputs=embedding, **weights):
    """The objective with weights of these values."""
    shapes = {
        name: (None, *x.shape[1:]) for name, x in inputs(np.zeros((1, DIM), "float32")).items()
    }
    objective.build_from(shapes)
    objective.built = True
    for name, value in weights.items():
        getattr(objective, name).assign(value)
    return objective


# Regularizers

DENSITIES = [4.0, 1.0, 0.25, 9.0, 2.0, 0.0, 1.5, 3.0, 7.0]
TARGETS = [0.5, 0.2, 0.9, 0.4, 0.7, 0.3, 0.6, 0.1, 0.8]
FORMS = ("log", "plain", "log_of_mean")


def density(**arguments):
    """With targets of each class, or (hard) with the first of them as their mean."""
    hard = arguments.get("constraint") == "hard"
    objective = objectives.DensityAdaptivity(CLASSES, reference_density=DENSITIES, **arguments)
    built(objective, target_density=TARGETS[0] if hard else TARGETS)

    def reference(labels, x, targets):
        return of_classes.density_adaptivity(labels, x, targets, DENSITIES, **arguments)

    return Case(objective, reference, weights=[objective.target_density])


def energy(form, **arguments):
    reference = functools.partial(of_classes.energy_confusion, form=form, **arguments)
    objective = objectives.EnergyConfusion(form, **arguments)
    return Case(objective, reference, lambda x: {"detached_embedding": x})


def regularizers():
    """Objectives on the embedding without weights, but for the targets of density adaptivity."""
    table = {
        "density soft": density(),
        "density soft sum": density(reduction="sum"),
        "density soft, eta 1": density(eta=1.0),
        "density soft, eta 0": density(eta=0.0),
        "density hard": density(constraint="hard"),
        "density none": density(constraint=None),
        "density none sum": density(constraint=None, reduction="sum"),
        "energy with an offset": energy("log_of_mean", offset=2.0),
        "orthogonal": Case(objectives.GlobalOrthogonal(), of_classes.global_orthogonal),
    }
    for form, reduction in itertools.product(FORMS, ("mean", "sum")):
        table[f"energy {form} {reduction}"] = energy(form, reduction=reduction)
    spread = objectives.EntropySpread
    table["pairs at 2.5"] = Case(
        spread(threshold=2.5), functools.partial(of_classes.entropy_of_pairs, threshold=2.5)
    )
    for reduction in ("mean", "sum"):
        reduced = {"reduction": reduction}
        table[f"pairs {reduction}"] = Case(
            spread(**reduced), functools.partial(of_classes.entropy_of_pairs, **reduced)
        )
        table[f"nearest {reduction}"] = Case(
            spread("nearest", **reduced), functools.partial(of_classes.nearest_entropy, **reduced)
        )
        table[f"penalty {reduction}"] = Case(
            objectives.IntraClassPenalty(**reduced),
            functools.partial(plain.intra_class_penalty, **reduced),
        )
    return table


# Kernel embedding

#: Pooled features are not normalized.
LEVELS = {"pooled": lambda x: 3 * x, "embedding": lambda x: x, "class": lambda x: x[:, :3]}
MULTIPLIERS = {"pooled": (0.5, 1.0, 2.0), "embedding": (0.5, 1.0, 2.0), "class": (1.0,)}
SUBSETS = [levels for size in (1, 2, 3) for levels in itertools.combinations(LEVELS, size)]
KINDS = {
    "similarity": objectives.JointRepresentationSimilarity,
    "mmd": objectives.JointMMD,
    "intra": objectives.JointIntra,
}
#: A kernel for all levels, its reference, and the distance whose mean is its bandwidth.
KERNELS = {
    "gaussian": (
        kernels.GaussianMixture((1.0,)),
        lambda x, tau: plain.gaussian(x, None, (1.0,), tau),
        plain.squared_distance,
    ),
    "laplace": (
        kernels.Laplace(),
        lambda x, tau: plain.laplace(x, None, 1.0, tau),
        plain.absolute_distance,
    ),
    "polynomial 2": (kernels.Polynomial(2), lambda x, tau: plain.polynomial(x, None, 2), None),
    "polynomial 5": (kernels.Polynomial(5), lambda x, tau: plain.polynomial(x, None, 5), None),
    "exponential": (kernels.Exponential(), lambda x, tau: plain.exponential(x), None),
}


def joint(kind, levels=tuple(LEVELS), kernel=None, **arguments):
    """JRD or a norm of it, on some levels; its bandwidths carry no gradient."""
    one, gram, spread = KERNELS[kernel] if kernel else (None, None, plain.squared_distance)

    def bandwidths(labels, *arrays):
        return {"taus": [plain.bandwidth(x, kind=spread) if spread else None for x in arrays]}

    def reference(labels, *arrays, taus=None):
        rows = list(zip(levels, arrays, taus or [None] * len(levels), strict=True))
        grams = [
            gram(x, tau) if gram else plain.gaussian(x, None, MULTIPLIERS[level], tau)
            for level, x, tau in rows
        ]
        if kind == "similarity":
            return plain.joint_representation_similarity(labels, grams, **arguments)
        return of_classes.joint_norms(labels, grams, kind, **arguments)

    def inputs(x):
        return {level: LEVELS[level](x) for level in levels}

    objective = KINDS[kind](levels, kernels=one, **arguments)
    return Case(objective, reference, inputs, frozen=bandwidths)


def kernel_embedding():
    table = {f"similarity {'+'.join(levels)}": joint("similarity", levels) for levels in SUBSETS}
    table |= {f"similarity of {name}": joint("similarity", kernel=name) for name in KERNELS}
    table["similarity sum"] = joint("similarity", reduction="sum")
    for kind, squared in itertools.product(("mmd", "intra"), (False, True)):
        table[f"{kind} squared={squared}"] = joint(kind, squared=squared)._replace(floor=1e-5)
        table[f"{kind} squared={squared} sum"] = joint(
            kind, ("pooled", "embedding"), squared=squared, reduction="sum"
        )._replace(floor=1e-4)
    return table


# Weights for each class

BETA = [1.2, 0.9, 1.0, 1.1, 0.8, 1.3, 0.7, 1.0, 1.1]


def margin(**arguments):
    objective = built(objectives.LearnedMargin(CLASSES, **arguments), beta=BETA)

    def drawn(labels, x, beta):
        return {"probabilities": of_losses.draw_probabilities(labels, x)}

    reference = functools.partial(of_classes.learned_margin, **arguments)
    return Case(objective, reference, weights=[objective.beta], frozen=drawn)


def on_proxies(objective, reference, *more, **weights):
    """An objective with proxies, whose reference takes them, and other variables of it by name."""
    built(objective, **weights)
    variables = [objective.class_proxies.proxies, *(getattr(objective, name) for name in more)]
    return Case(objective, reference, weights=variables, unit=False, relative=2e-5, floor=2e-5)


def proxies(reduction="mean", **arguments):
    """AMSoftmax, of which the images of the highest values may be dropped."""
    loss = losses.AMSoftmaxLoss(reduction="sum" if reduction == "sum" else "sum_over_batch_size")

    def reference(labels, x, centers):
        cosines = plain.class_similarities(x, centers)
        costs = sorted(
            plain.am_softmax([label], [row]) for label, row in zip(labels, cosines, strict=True)
        )
        # Of several that are the highest all count.
        highest = costs[len(costs) - int(arguments.get("drop_highest", 0) * len(costs)) - 1]
        costs = [cost for cost in costs if cost <= highest]
        return plain.total(costs) if reduction == "sum" else plain.mean(costs)

    return on_proxies(objectives.ProxyLoss(loss, CLASSES, **arguments), reference)


def of_faces():
    face, two = objectives.CurricularFace, objectives.SphereFace2
    flat = {"scale": 3.0, "margin": 0.1, "balance": 0.5, "adjustment": 1.0}

    def constant(labels, x, centers, bias):
        return {"at": (x, centers)}

    return {
        "curricular": on_proxies(
            face(CLASSES, scale=4.0),
            lambda y, x, p: of_classes.curricular(y, x, p, 0.3, 4.0),
            t=0.3,
        ),
        "curricular wide": on_proxies(
            face(CLASSES, scale=16.0, margin=1.2),
            lambda y, x, p: of_classes.curricular(y, x, p, 0.9, 16.0, 1.2),
            t=0.9,
        ),
        "sphere face 2": on_proxies(
            two(CLASSES, scale=6.0, detached=False),
            lambda y, x, p, b: of_classes.sphere_face2(y, x, p, float(b), 6.0),
            "bias",
        ),
        "sphere face 2 flat": on_proxies(
            two(CLASSES, detached=False, **flat),
            lambda y, x, p, b: of_classes.sphere_face2(y, x, p, float(b), **flat),
            "bias",
            bias=0.7,
        ),
        "sphere face 2 detached": on_proxies(
            two(CLASSES, scale=6.0),
            lambda y, x, p, b, at=None: of_classes.sphere_face2(y, x, p, float(b), 6.0, at=at),
            "bias",
        )._replace(frozen=constant),
    }


def with_class_weights():
    table = {
        "margin mean": margin(),
        "margin sum": margin(reduction="sum"),
        "margin nu": margin(nu=0.3),
        "margin nu sum": margin(nu=0.3, reduction="sum"),
        "proxies": proxies(),
        "proxies sum": proxies("sum"),
        **{f"proxies dropping {share}": proxies(drop_highest=share) for share in (0.1, 0.3, 0.85)},
        "proxies sum dropping 0.3": proxies("sum", drop_highest=0.3),
        **of_faces(),
    }
    for tau in (0.2, 0.0):
        table[f"soft triple {tau}"] = on_proxies(
            objectives.RegularizedSoftTriple(CLASSES, 3, scale=5.0, tau=tau),
            lambda y, x, centers, tau=tau: of_classes.regularized_soft_triple(
                y, x, centers, tau, scale=5.0
            ),
        )
    objective = built(objectives.InstanceLoss(CLASSES))
    table["instance"] = Case(objective, of_classes.instance, weights=[objective.head], unit=False)
    return table


# Losses on representations


def binomial_on_prefixes(labels, x, dims, factors):
    units = [references_moments.unit(np.asarray(x, np.float64)[:, :dim]) for dim in dims]
    return sum(
        factor * plain.binomial(labels, unit) for factor, unit in zip(factors, units, strict=True)
    )


def shaped(x, *shape):
    return (
        x.reshape(-1, *shape) if isinstance(x, np.ndarray) else keras.ops.reshape(x, (-1, *shape))
    )


def heads(x):
    """Two heads of two components."""
    return {"heads": shaped(x, 2, 2)}


def divergence(pairs, average, margin):
    reference = functools.partial(
        of_classes.divergence, margin=margin, pairs=pairs, average=average
    )
    objective = objectives.HeadDivergence(margin, pairs, average)
    return Case(objective, lambda labels, x: reference(x), heads)


def feature_map(x):
    """Two positions of two channels."""
    return {"feature_map": shaped(x, 2, 1, 2)}


#: A loss, what else HORDE needs for it, and its reference on vectors (and class proxies, where it
#: has them).
BASES = {
    "pairs": (
        losses.ContrastiveLoss(1.3, "euclidean"),
        {},
        lambda y, x: plain.contrastive(y, x, 1.3, "euclidean"),
    ),
    "pairs sum": (
        losses.BinomialDevianceLoss(reduction="sum"),
        {},
        lambda y, x: plain.binomial(y, x, reduction="sum"),
    ),
    "classes": (
        losses.AMSoftmaxLoss(),
        {"num_classes": CLASSES},
        lambda y, x, p: plain.am_softmax(y, plain.class_similarities(x, p)),
    ),
    "image by image": (
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        {},
        lambda y, x: plain.mean(
            [of_losses.cross_entropy(label, list(row)) for label, row in zip(y, x, strict=True)]
        ),
    ),
}


def moments(base, orders=3, mode="cascaded", embedding_dim=CLASSES, reduce_to=None, **options):
    """HORDE: the sum over orders of a loss on their vectors, by its projections, dense layers and
    proxies."""
    loss, extra, of_vectors = BASES[base]
    keras.utils.set_random_seed(2)
    objective = objectives.HighOrderMomentLoss(
        loss, orders, 6, embedding_dim, mode, reduce_to=reduce_to, **extra, **options
    )
    objective.build_from({"feature_map": (None, 2, 1, 2), "embedding": (None, DIM)})
    objective.built = True
    layer = objective.moments
    groups = (
        list(layer.moments.projections) if mode != "random" else [],
        [layer.dense[f"order_{order}"].kernel for order in layer.orders] if layer.dense else [],
        [term.class_proxies.proxies for term in objective.terms] if extra else [],
        [layer.reduction.kernel] if reduce_to else [],
    )
    fixed = values(layer.moments.projections)

    def reference(labels, features, *arrays):
        ends = list(itertools.accumulate(map(len, groups)))
        projections, dense, centers, reduction = (
            arrays[end - len(group) : end] for end, group in zip(ends, groups, strict=True)
        )
        vectors = references_moments.embeddings(
            features, projections or fixed, dense, objective.orders, mode, *reduction
        )
        terms = zip(vectors.values(), objective.order_weights, strict=True)
        return sum(
            weight * of_vectors(labels, x, *centers[i : i + 1])
            for i, (x, weight) in enumerate(terms)
        )

    # Rounding of duplicates leaves squared distances of 1e-7, whose root is 3e-4.
    weights = [variable for group in groups for variable in group]
    return Case(objective, reference, feature_map, weights, unit=False, relative=2e-5, floor=1e-4)


def of_representations():
    mean_of_heads = functools.partial(of_classes.mean_of_heads, margin=1.3, kind="euclidean")
    table = {
        name: Case(objectives.MetricLoss(loss, "pooled"), reference, lambda x: {"pooled": x})
        for name, (loss, _, reference) in BASES.items()
        if name.startswith("pairs")
    }
    for dims, factors in (((2, 3, 4), None), ((1, 4), (0.5, 2.0))):
        table[f"matryoshka {dims}"] = Case(
            objectives.Matryoshka(losses.BinomialDevianceLoss(), dims, factors),
            functools.partial(
                binomial_on_prefixes, dims=dims, factors=factors or (1.0,) * len(dims)
            ),
            floor=2e-5,
        )
    for pairs, average in itertools.product(("all", "image"), ("active", "all")):
        table[f"divergence {pairs} {average}"] = divergence(pairs, average, 0.2)
    table["divergence of margin -1"] = divergence("all", "active", -1.0)
    table["headwise"] = Case(
        objectives.HeadwiseLoss(losses.ContrastiveLoss(1.3, "euclidean")),
        mean_of_heads,
        heads,
        floor=1e-5,
    )
    for base in BASES:
        table[f"moments of {base}"] = moments(base, reduce_to=2)
    for name, options in {
        "whole": {"orders": 4},
        "weighted": {"orders": 4, "order_weights": [1.0, 0.5, 0.25]},
        "one order": {"orders": [3], "scaled": False},
        "independent": {"mode": "independent", "order_weights": 0.2},
        "random": {"mode": "random", "embedding_dim": None},
        "random with dense": {"mode": "random"},
    }.items():
        table[f"moments {name}"] = moments("pairs", **options)
    return table


# Two views, and mutual information


def views(x):
    """The second view is the first in another order, and longer."""
    return {"embedding": x, "text_embedding": 1.5 * x[::-1]}


def across(make, reference, shared):
    objective = built(make(shared=shared), views)
    of_rule = functools.partial(reference, shared=shared)
    return Case(objective, of_rule, views, objective.weights, unit=False, relative=3e-5, floor=2e-5)


def rank_mi(seed=0, root=1.1, **arguments):
    """A RankMI whose V falls, with random kinks, and has a root at about `root`."""
    objective = objectives.RankMI(
        **{"hidden": 6, "depth": 1, "negatives": "all", "seed": 1, **arguments}
    )
    objective.build_from({})
    objective.built = True
    generator = np.random.default_rng(seed)
    for variable in objective.network.weights:
        variable.assign(0.4 * generator.normal(size=variable.shape))
    last = objective.network.biases[-1]
    last.assign([float(last[0]) - references_rankmi.statistic(weights_of_v(objective), root)])
    return objective


def weights_of_v(objective):
    """Kernels and biases in turn."""
    network = objective.network
    pairs = zip(network.kernels, network.biases, strict=True)
    return [keras.ops.convert_to_numpy(weight) for pair in pairs for weight in pair]


def v_of(objective):
    weights = weights_of_v(objective)
    return lambda d: references_rankmi.statistic(weights, d)


def mutual_information():
    objective = rank_mi(2)
    v, beta = v_of(objective), float(objective.network.root(objective.beta))
    return Case(
        objective, lambda y, x: references_rankmi.violating_pairs(y, x, v, beta, 0.2), floor=1e-5
    )


CASES = {
    **regularizers(),
    **kernel_embedding(),
    **with_class_weights(),
    **of_representations(),
    **{
        f"{make.__name__} {shared}": across(make, reference, shared)
        for make, reference in (
            (objectives.SoftmaxAcrossViews, references_views.softmax_across),
            (objectives.SigmoidAcrossViews, references_views.sigmoid_across),
        )
        for shared in ("positive", "left_out")
    },
    "mutual information": mutual_information(),
}

#: The first case of each objective, and those that take another path than it.
FIRST = list({type(case.objective): name for name, case in reversed(CASES.items())}.values())[::-1]
PATHS = [
    *FIRST,
    *(
        "density hard",
        "density none",
        "energy plain mean",
        "energy log_of_mean mean",
        "nearest mean",
    ),
    *(f"similarity of {name}" for name in ("laplace", "polynomial 5", "exponential")),
    *("margin nu", "proxies dropping 0.3", "sphere face 2 detached", "divergence image all"),
    *(
        "moments of classes",
        "moments of image by image",
        "moments independent",
        "moments random with dense",
    ),
]


def by_mode(quick, compiled=(), among=tuple(CASES)):
    """Cases eagerly, of which those of `quick` are quick, and those of `compiled` by XLA."""
    rows = [("eager", name) for name in among] + [("xla", name) for name in compiled]
    parameters = [
        pytest.param(
            mode, CASES[name], id=f"{mode} {name}", marks=[] if name in quick else pytest.mark.slow
        )
        for mode, name in rows
    ]
    return pytest.mark.parametrize(("mode", "case"), parameters)
