"""Computes objectives and losses on Keras's JAX backend, and writes values and gradients to a file.

KERAS_BACKEND=jax python -m tests.support.jax_values IN.npz OUT.npz

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


def large_ids_are_refused():
    """Labels beyond int32 are refused before a step."""
    from tests.models.networks import colored_batch, tiny_embedder

    labels, x = colored_batch()
    with pytest.raises(tfdml.UserError, match="labels must fit int32 on JAX"):
        models.MetricLearner(tiny_embedder(), losses.ContrastiveLoss()).fit(
            x, labels.astype("int64") + 2**40, verbose=0
        )


def interrupted(labels, x):
    """A loss that is interrupted while a step on 5 images is compiled."""
    if x.shape[0] == 5:
        raise KeyboardInterrupt
    return x[:, 0]


INTERRUPTED = {
    "fit": lambda model, x, y: model.fit(x[:5], y[:5], verbose=0),
    "evaluate": lambda model, x, y: model.evaluate(x[:5], y[:5], verbose=0),
    "train_on_batch": lambda model, x, y: model.train_on_batch(x[:5], y[:5]),
    "test_on_batch": lambda model, x, y: model.test_on_batch(x[:5], y[:5]),
    # The second of two steps that are one execution.
    "fit later": lambda model, x, y: model.fit(
        x[:11], y[:11], batch_size=6, shuffle=False, verbose=0
    ),
}
GRAY = {
    # The second batch, at which nothing looks first.
    "predict": lambda model, x: model.predict(((images,) for images in (x, x[..., :1])), verbose=0),
    "predict_on_batch": lambda model, x: model.predict_on_batch([x[..., :1]]),
}


def lacking(model):
    """How many variables of a model and its optimizer have no value that can be read."""
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *getattr(optimizer, "variables", ())]
    return sum(variable._value is None or variable._value.is_deleted() for variable in variables)


def lost_by_interrupted_steps():
    """How many values a plain model lacks after a step that is interrupted, and learners and
    embedders, by method."""
    from tests.models.networks import colored_batch, tiny_embedder, values

    labels, x = colored_batch()
    plain = keras.Sequential(
        [keras.Input(x.shape[1:]), keras.layers.Flatten(), keras.layers.Dense(2)]
    )
    plain.compile("sgd", interrupted)
    plain.fit(x[:6], labels[:6], verbose=0)
    with pytest.raises(KeyboardInterrupt):
        plain.fit(x[:5], labels[:5], verbose=0)
    lost = {"plain": lacking(plain)}
    for name, call in INTERRUPTED.items():
        learner = models.MetricLearner(tiny_embedder(), interrupted)
        together = 2 if name == "fit later" else 1
        learner.compile("adam", steps_per_execution=together)
        learner.train_on_batch(x[:6], labels[:6])
        # An older state must not come back.
        learner.embedder.dense.bias.assign(np.full(5, 7.0))
        with pytest.raises(KeyboardInterrupt):
            call(learner, x, labels)
        lost[name] = lacking(learner)
        np.testing.assert_allclose(learner.embedder.dense.bias, 7.0, atol=0.01)
        assert int(learner.optimizer.iterations) == together
        if name == "fit later":
            again = models.MetricLearner(tiny_embedder(), interrupted)
            again.compile("adam")
            again.train_on_batch(x[:6], labels[:6])
            again.embedder.dense.bias.assign(np.full(5, 7.0))
            again.train_on_batch(x[:6], labels[:6])
            for one, other in zip(values(learner.weights), values(again.weights), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    towers = {"embedder": tiny_embedder(), "reduced": models.TruncatedEmbedder(tiny_embedder(), 3)}
    for name, tower in towers.items():
        expected = tower.predict(x, verbose=0)
        for method, call in GRAY.items():
            with pytest.raises(Exception):  # noqa: B017, PT011
                call(tower, x)
            lost[f"{name} {method}"] = lacking(tower)
        np.testing.assert_array_equal(tower.predict(x, verbose=0), expected)
    return lost


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
    large_ids_are_refused()
    arrays |= {f"lost|{name}": np.array(n) for name, n in lost_by_interrupted_steps().items()}
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
