"""Computes objectives and losses on Keras's JAX backend, and writes values and gradients to a file.

KERAS_BACKEND=jax python -m tests.jax_values IN.npz OUT.npz

IN holds labels, embedding, class, and the weights of each of `cases`, "name|index". OUT has for
each "name|value" and "name|gradient", those of identical and of zero vectors, and "name|rounded",
how many products of the program are not in full float32.
"""

import sys

import keras
import numpy as np
import pytest

import tfdml
from tfdml import losses, models, objectives
from tfdml.pairs import pairs_by_name

# What floats merge, as a compiled step sees it.
MERGED_LABELS = {
    "fractions": [0.5, 1.5] * 3,
    "missing": [0, 1, np.nan] * 2,
    "large": [1e8, 1e8 + 1] * 3,
}
FAR_LABELS = np.array([2**53, 2**53 + 1, 2**53, 2**24, 2**24 + 1, 2**24])


def cases():
    """Name -> an objective's case: those of other paths, and those with a memory."""
    from tests.objectives.cases import CASES, PATHS, Case

    memories = {
        "cross batch": objectives.CrossBatchMemory(
            losses.ContrastiveLoss(1.0, "euclidean"), size=5
        ),
        "prism": objectives.Prism(
            losses.ContrastiveLoss(1.0, "euclidean"), 3, noise_rate=0.3, size=5
        ),
    }
    for objective in memories.values():
        objective.build({"embedding": (None, 4)})
        objective.remember({"embedding": np.eye(4, dtype="float32")[:3]}, np.arange(3))
    return {name: CASES[name] for name in PATHS} | {
        name: Case(made, None) for name, made in memories.items()
    }


def function_of(case, labels):
    """The value as a function of the vectors."""
    return lambda x: case.objective(case.inputs(x), labels)


def statistics_of(objective, labels, x):
    """The loss of RankMI's V as a function of its weights."""

    def loss(values):
        with keras.StatelessScope(list(zip(objective.network.weights, values, strict=True))):
            return objective.statistics_loss(pairs_by_name({"embedding": x}, labels))

    return loss


def fit_sampled():
    """Which proxies a step with drawn classes changes."""
    from tests.models.networks import images, tiny_embedder, values

    proxies = objectives.ProxyLoss(losses.AMSoftmaxLoss(), 30, sample=0.4)
    learner = models.MetricLearner(
        tiny_embedder(), [proxies, objectives.JointRepresentationSimilarity()]
    )
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
    """How many weights a plain model and a learner lack after a step that fails as it is
    compiled."""
    from tests.models.networks import colored_batch, tiny_embedder

    def planted(labels, x):
        if x.shape[0] == 5:
            raise ZeroDivisionError
        return 0.0 * x[:, 0]

    labels, x = colored_batch()
    with pytest.raises(tfdml.UserError, match="labels must fit int32 on JAX"):
        models.MetricLearner(tiny_embedder(), planted).fit(
            x, labels.astype("int64") + 2**40, verbose=0
        )
    plain = keras.Sequential(
        [keras.Input(x.shape[1:]), keras.layers.Flatten(), keras.layers.Dense(2)]
    )
    plain.compile("sgd", planted)
    learner = models.MetricLearner(tiny_embedder(), planted)
    learner.compile("sgd")
    for model in (plain, learner):
        model.fit(x, labels, verbose=0)
        with pytest.raises(ZeroDivisionError):
            model.fit(x[::2][:5], labels[::2][:5], verbose=0)
    return np.array(
        [sum(weight._value is None for weight in model.weights) for model in (plain, learner)]
    )


def main(source, target):
    import jax

    assert keras.backend.backend() == "jax"
    assert "tensorflow" not in sys.modules, "the backend-free part imports TensorFlow"
    given, arrays = dict(np.load(source)), {}
    labels, x = given["labels"], given["embedding"]
    every = cases()
    for name, case in every.items():
        for i, weight in enumerate(case.objective.weights):
            weight.assign(given[f"{name}|{i}"])
        program = jax.value_and_grad(function_of(case, labels))
        for prefix, vectors in (
            ("", x),
            ("identical ", np.ones_like(x)),
            ("zero ", np.zeros_like(x)),
        ):
            value, gradient = jax.jit(program)(vectors)
            arrays |= {
                f"{prefix}{name}|value": np.asarray(value),
                f"{prefix}{name}|gradient": np.asarray(gradient),
            }
        written = str(jax.make_jaxpr(program)(x))
        arrays[f"{name}|rounded"] = np.array(
            written.count("dot_general[") - written.count("(Precision.HIGHEST, ")
        )
    for name, merged in MERGED_LABELS.items():
        for kind, loss in (
            ("embedding", losses.ContrastiveLoss()),
            ("class", losses.NormSoftmaxLoss()),
        ):
            arrays[f"merged|{kind} {name}"] = np.asarray(
                jax.jit(loss)(np.array(merged, "float32"), given[kind])
            )
    arrays["whole floats"] = np.asarray(
        jax.jit(losses.ContrastiveLoss())(labels.astype("float32"), x)
    )
    arrays["far|loss"] = np.asarray(losses.ContrastiveLoss()(FAR_LABELS, x))
    far = objectives.JointRepresentationSimilarity("embedding")({"embedding": x}, FAR_LABELS)
    arrays["far|jrs"] = np.asarray(far)
    arrays["fit sampled"] = fit_sampled()
    arrays["fit together"] = fit_together()
    arrays["lost"] = lost_by_a_failing_step()
    rank_mi = every["mutual information"].objective
    loss = statistics_of(rank_mi, labels, x)
    value, gradients = jax.jit(jax.value_and_grad(loss))(
        [weight.value for weight in rank_mi.network.weights]
    )
    arrays["rank mi statistics|value"] = np.asarray(value)
    arrays |= {
        f"rank mi statistics|gradient {i}": np.asarray(gradient)
        for i, gradient in enumerate(gradients)
    }
    np.savez(target, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
