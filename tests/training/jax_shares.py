"""Every objective on Keras's JAX backend, and the losses that sort or count, of a batch on one device or on two.

`values()` gives, by "name|devices|...", the value and the gradient to every representation and trained weight.
"""

import jax
import keras
import numpy as np

from tests.mathematics import random_batch
from tfdml import losses, objectives

BATCH, CLASSES = 12, 3
LOSSES = ("TripletLoss", "MultiSimilarityLoss", "HistogramLoss")
REFERENCE = [1.0, 2.0, 0.5]
OBJECTIVES = {
    "jrs": objectives.JointRepresentationSimilarity,
    "joint mmd": lambda: objectives.JointMMD(("pooled", "embedding")),
    "joint intra": lambda: objectives.JointIntra(("pooled", "embedding")),
    "intra class": objectives.IntraClassPenalty,
    "energy": objectives.EnergyConfusion,
    "energy sum": lambda: objectives.EnergyConfusion("plain", reduction="sum"),
    "energy of mean": lambda: objectives.EnergyConfusion("log_of_mean"),
    "density": lambda: objectives.DensityAdaptivity(CLASSES, reference_density=REFERENCE),
    "density hard": lambda: objectives.DensityAdaptivity(CLASSES, reference_density=REFERENCE, constraint="hard"),
    "entropy": objectives.EntropySpread,
    "nearest": lambda: objectives.EntropySpread("nearest"),
    "orthogonal": objectives.GlobalOrthogonal,
    "learned margin": lambda: objectives.LearnedMargin(CLASSES, beta=0.6, nu=0.1),
    "soft triple": lambda: objectives.RegularizedSoftTriple(CLASSES, 2, scale=5.0),
    "proxies": lambda: objectives.ProxyLoss(losses.AMSoftmaxLoss(), CLASSES),
    "horde": lambda: objectives.HighOrderMomentLoss(losses.ContrastiveLoss(), 3, 16, 4, seed=1),
    "heads": lambda: objectives.HeadwiseLoss(losses.ContrastiveLoss(0.5, "cosine")),
    "divergence": lambda: objectives.HeadDivergence(margin=-0.5),
    "rank mi": lambda: objectives.RankMI(1.5, hidden=8, depth=1, seed=7),
}


def _representations():
    labels, embedding = random_batch(1, BATCH, CLASSES, 4)
    generator = np.random.default_rng(2)

    def draw(*shape):
        return generator.normal(size=(BATCH, *shape)).astype("float32")

    heads = draw(2, 3)
    heads /= np.linalg.norm(heads, axis=-1, keepdims=True)
    vectors = {"embedding": embedding, "pooled": draw(5), "projection": draw(4), "feature_map": draw(2, 2, 3)}
    return labels.astype("int32"), {**vectors, "class": np.tanh(draw(CLASSES)), "heads": heads}


def _terms():
    """By name: a function of (weights, representations, labels), and its weights."""
    _, x = _representations()
    shapes = {name: (None, *array.shape[1:]) for name, array in x.items()}
    terms = {}
    for name, make in OBJECTIVES.items():
        keras.utils.set_random_seed(1)
        objective = make()
        objective.build_from({k: v for k, v in shapes.items() if k not in objective.provides})
        objective.built = True

        def run(weights, x, labels, objective=objective):
            given = {k: v for k, v in x.items() if k not in objective.provides}
            scope = list(zip(objective.trainable_variables, weights, strict=True))
            with keras.StatelessScope(scope):
                return objective(given, labels)

        terms[name] = (run, [variable.value for variable in objective.trainable_variables])
    for name in LOSSES:
        loss = getattr(losses, name)()
        terms[name] = (lambda weights, x, labels, loss=loss: loss(labels, x["embedding"]), [])
    return terms


def values():
    """Of one device and of two."""
    labels, x = _representations()
    terms = _terms()

    @jax.jit
    def everything(weights, x, labels):
        return {
            name: jax.value_and_grad(run, argnums=(0, 1))(weights[name], x, labels) for name, (run, _) in terms.items()
        }

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
    whole, rows = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in ((), ("batch",)))
    weights = {name: weights for name, (_, weights) in terms.items()}
    found = {}
    for devices in (1, 2):
        if devices == 2:
            weights = jax.device_put(weights, whole)
            x, labels = jax.device_put((x, labels), rows)
        for name, (value, gradients) in everything(weights, x, labels).items():
            found[f"{name}|{devices}|value"] = np.asarray(value)
            for i, gradient in enumerate(jax.tree.leaves(gradients)):
                found[f"{name}|{devices}|{i}"] = np.asarray(gradient)
    return found
