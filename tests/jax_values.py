"""Computes losses, kernels and objectives on Keras's JAX backend, and writes values and gradients to a file.

KERAS_BACKEND=jax python -m tests.jax_values IN.npz OUT.npz

IN holds labels, embedding, pooled and class; OUT, per name of `cases`, "name|value" and "name|gradient"; and
"name|rounded", how many products of the program are not in full float32. What `cases` returns is the same on every
backend: its weights come from NumPy.
"""

import functools
import sys

import keras
import numpy as np
import pytest

import tfdml
from tfdml import kernels, losses, models, objectives
from tfdml.layers.moments import MODES
from tfdml.pairs import pairs_by_name

DENSITIES = [1.0, 2.0, 0.5]
# What floats merge, as a compiled step sees it.
MERGED_LABELS = {"fractions": [0.5, 1.5] * 3, "missing": [0, 1, np.nan] * 2, "large": [1e8, 1e8 + 1] * 3}
FAR_LABELS = np.array([2**53, 2**53 + 1, 2**53, 2**24, 2**24 + 1, 2**24])


def cases():
    """Name -> (the array to differentiate by, a function of labels and that array)."""
    table = {
        "contrastive": ("embedding", losses.ContrastiveLoss(1.3, "euclidean")),
        "contrastive sum": ("embedding", losses.ContrastiveLoss(reduction="sum")),
        "binomial": ("embedding", losses.BinomialDevianceLoss()),
        "am": ("class", losses.AMSoftmaxLoss()),
        "norm": ("class", losses.NormSoftmaxLoss()),
        **objectives_over_classes(),
        **rank_mi_cases(),
        **two_views(),
        **{f"horde {mode}": ("embedding", horde_on_pairs_of_positions(mode)) for mode in MODES},
        "metric": ("pooled", lambda y, x: objectives.MetricLoss(losses.ContrastiveLoss(), "pooled")({"pooled": x}, y)),
    }
    for name, kernel in {
        "gaussian": kernels.GaussianMixture(),
        "laplace": kernels.Laplace(),
        "polynomial": kernels.Polynomial(3),
        "exponential": kernels.Exponential(),
    }.items():
        table[name] = ("embedding", lambda y, x, kernel=kernel: keras.ops.mean(kernel(x)))
        jrs = objectives.JointRepresentationSimilarity("pooled", kernels=kernel)
        table[f"jrs {name}"] = ("pooled", lambda y, x, jrs=jrs: jrs({"pooled": x}, y))
    return table


def objectives_over_classes():
    """The objectives that read the embedding alone, by name."""
    found = {
        "energy": objectives.EnergyConfusion(),
        "energy of mean": objectives.EnergyConfusion("log_of_mean"),
        "density": objectives.DensityAdaptivity(3, reference_density=DENSITIES),
        "density hard": objectives.DensityAdaptivity(3, reference_density=DENSITIES, constraint="hard"),
        "entropy": objectives.EntropySpread(),
        "nearest": objectives.EntropySpread("nearest"),
        "orthogonal": objectives.GlobalOrthogonal(),
        "joint mmd": objectives.JointMMD("embedding", kernels=kernels.Polynomial(2)),
        "joint intra": objectives.JointIntra("embedding", kernels=kernels.Polynomial(2)),
        "intra class": objectives.IntraClassPenalty(),
        "learned margin": objectives.LearnedMargin(3, beta=0.8),
        "cross batch": objectives.CrossBatchMemory(losses.ContrastiveLoss(1.0, "euclidean"), size=5),
        "prism": objectives.Prism(losses.ContrastiveLoss(1.0, "euclidean"), 3, noise_rate=0.3, size=5),
    }
    for objective in found.values():
        objective.build({"embedding": (None, 4)})
    for name in ("cross batch", "prism"):
        found[name].remember({"embedding": np.eye(4, dtype="float32")[:3]}, np.arange(3))
    return {name: ("embedding", lambda y, x, o=objective: o({"embedding": x}, y)) for name, objective in found.items()}


def two_views():
    """The objectives over two views, the second of which is the first in another order, by name."""
    terms = (
        objectives.SoftmaxAcrossViews(),
        objectives.SigmoidAcrossViews(),
        objectives.AcrossViews(losses.ContrastiveLoss(1.3, "euclidean"), shared="left_out"),
    )
    for term in terms:
        term.build(dict.fromkeys(term.views, (None, 4)))
    return {
        term.name: ("embedding", lambda y, x, o=term: o({"embedding": x, "text_embedding": x[::-1]}, y))
        for term in terms
    }


@functools.cache
def rank_mi():
    """RankMI with random weights of V, whose root lies near 1."""
    objective = objectives.RankMI(0.5, hidden=6, depth=1, negatives="all")
    objective.build_from({})
    generator = np.random.default_rng(0)
    for variable in objective.network.weights:
        variable.assign(0.4 * generator.normal(size=variable.shape))
    bias = objective.network.biases[-1]
    bias.assign(bias - objective.network(np.ones(1, "float32")))
    return objective


def rank_mi_cases():
    objective = rank_mi()  # outside of any trace
    return {
        "rank mi": ("embedding", lambda y, x: objective({"embedding": x}, y)),
        "rank mi root": ("embedding", lambda y, x: objective.network.root(keras.ops.mean(x))),
    }


def rank_mi_weights():
    """V's weights as kernels and biases in turn."""
    network = rank_mi().network
    return [v for pair in zip(network.kernels, network.biases, strict=True) for v in pair]


def rank_mi_statistics(labels, x):
    """V's loss as a function of its weights."""
    objective, variables = rank_mi(), rank_mi_weights()

    def loss(values):
        with keras.StatelessScope(list(zip(variables, values, strict=True))):
            return objective.statistics_loss(pairs_by_name({"embedding": x}, labels))

    return loss


@functools.cache
def horde(mode):
    """HORDE on two positions of two channels, in blocks of 150 moments."""
    objective = objectives.HighOrderMomentLoss(losses.BinomialDevianceLoss(), 4, 300, 3, mode, seed=1)
    objective.build({"feature_map": (None, 2, 2)})
    generator = np.random.default_rng(1)
    for weight in objective.moments.weights:
        values = generator.normal(size=weight.shape)
        weight.assign(np.sign(values) if weight.dtype == "int8" else values)
    return objective


def horde_on_pairs_of_positions(mode):
    objective = horde(mode)  # outside of any trace
    return lambda y, x: objective({"feature_map": keras.ops.reshape(x, (-1, 2, 2))}, y)


def fit_sampled():
    """Which proxies a step with drawn classes changes."""
    from tests.models.networks import images, tiny_embedder, values

    proxies = objectives.ProxyLoss(losses.AMSoftmaxLoss(), 30, sample=0.4)
    learner = models.MetricLearner(tiny_embedder(), [proxies, objectives.JointRepresentationSimilarity()])
    learner.build((None, 12, 12, 3))
    learner.compile("sgd")
    (before,) = values(proxies.drawn_weights)
    learner.fit(images(0), np.array([4, 9, 4, 0, 9, 29, 4, 0]), batch_size=8, verbose=0)
    return np.any(values(proxies.drawn_weights)[0] != before, axis=1)


def fit_together():
    """The weights after three steps, one and then two an execution."""
    from tests.models.networks import colored_batch, tiny_embedder, values

    labels, x = colored_batch()
    trained = []
    for steps in (1, 2):
        learner = models.MetricLearner(tiny_embedder(), losses.ContrastiveLoss())
        learner.compile("adam", steps_per_execution=steps)
        learner.fit(x, labels, batch_size=-(-len(x) // 3), shuffle=False, verbose=0)
        trained.append(np.concatenate([value.ravel() for value in values(learner.weights)]))
    return np.stack(trained)


def lost_by_a_failing_step():
    """How many weights a plain model and a learner lack after a step that fails as it is compiled."""
    from tests.models.networks import colored_batch, tiny_embedder

    def planted(labels, x):
        if x.shape[0] == 5:
            raise ZeroDivisionError
        return 0.0 * x[:, 0]

    labels, x = colored_batch()
    with pytest.raises(tfdml.UserError, match="labels must fit int32 on JAX"):
        models.MetricLearner(tiny_embedder(), planted).fit(x, labels.astype("int64") + 2**40, verbose=0)
    plain = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Flatten(), keras.layers.Dense(2)])
    plain.compile("sgd", planted)
    learner = models.MetricLearner(tiny_embedder(), planted)
    learner.compile("sgd")
    for model in (plain, learner):
        model.fit(x, labels, verbose=0)
        with pytest.raises(ZeroDivisionError):
            model.fit(x[::2][:5], labels[::2][:5], verbose=0)
    return np.array([sum(weight._value is None for weight in model.weights) for model in (plain, learner)])


def main(source, target):
    import jax

    assert keras.backend.backend() == "jax"
    assert "tensorflow" not in sys.modules, "the backend-free part imports TensorFlow"
    given = dict(np.load(source))
    arrays = {"version": np.array(tfdml.__version__)}
    for name, (by, function) in cases().items():
        labels = given["labels"]
        program = jax.value_and_grad(lambda x, f=function, y=labels: f(y, x))
        value, gradient = jax.jit(program)(given[by])
        arrays[f"{name}|value"], arrays[f"{name}|gradient"] = np.asarray(value), np.asarray(gradient)
        written = str(jax.make_jaxpr(program)(given[by]))
        arrays[f"{name}|rounded"] = np.array(written.count("dot_general[") - written.count("(Precision.HIGHEST, "))
    for name, x in (("identical", np.ones((6, 4), "float32")), ("zero", np.zeros((6, 4), "float32"))):
        for loss in ("contrastive", "binomial", "gaussian", "laplace", *objectives_over_classes()):
            function = cases()[loss][1]
            value, gradient = jax.value_and_grad(lambda x, f=function: f(np.array([0, 0, 1, 1, 2, 2]), x))(x)
            arrays[f"{name} {loss}|value"], arrays[f"{name} {loss}|gradient"] = np.asarray(value), np.asarray(gradient)
    for name, merged in MERGED_LABELS.items():
        for kind, loss in (("pairs", losses.ContrastiveLoss()), ("classes", losses.NormSoftmaxLoss())):
            x = given["embedding" if kind == "pairs" else "class"]
            arrays[f"merged|{kind} {name}"] = np.asarray(jax.jit(loss)(np.array(merged, "float32"), x))
    whole = jax.jit(losses.ContrastiveLoss())(given["labels"].astype("float32"), given["embedding"])
    arrays["whole floats"] = np.asarray(whole)
    arrays["far|loss"] = np.asarray(losses.ContrastiveLoss()(FAR_LABELS, given["embedding"]))
    far = objectives.JointRepresentationSimilarity("embedding")({"embedding": given["embedding"]}, FAR_LABELS)
    arrays["far|jrs"] = np.asarray(far)
    arrays["fit sampled"] = fit_sampled()
    arrays["fit together"] = fit_together()
    arrays["lost"] = lost_by_a_failing_step()
    loss = rank_mi_statistics(given["labels"], given["embedding"])
    value, gradients = jax.jit(jax.value_and_grad(loss))([v.value for v in rank_mi_weights()])
    arrays["rank mi statistics|value"] = np.asarray(value)
    arrays |= {f"rank mi statistics|gradient {i}": np.asarray(gradient) for i, gradient in enumerate(gradients)}
    np.savez(target, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
