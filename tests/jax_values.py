"""Computes losses, kernels and objectives on Keras's JAX backend, and writes values and gradients to a file.

KERAS_BACKEND=jax python -m tests.jax_values IN.npz OUT.npz

IN holds labels, embedding, pooled and class; OUT, per name of `cases`, "name|value" and "name|gradient".
"""

import sys

import jax
import keras
import numpy as np

import tfdml
from tfdml import kernels, losses, models, objectives

FAR_LABELS = np.array([2**53, 2**53 + 1, 2**53, 2**24, 2**24 + 1, 2**24])


def cases():
    """Name -> (the array to differentiate by, a function of labels and that array)."""
    table = {
        "contrastive": ("embedding", losses.ContrastiveLoss(1.3, "euclidean")),
        "contrastive sum": ("embedding", losses.ContrastiveLoss(reduction="sum")),
        "binomial": ("embedding", losses.BinomialDevianceLoss()),
        "am": ("class", losses.AMSoftmaxLoss()),
        "norm": ("class", losses.NormSoftmaxLoss()),
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


def fit():
    """The losses of a learner that trains on coloured images."""
    from tests.models.networks import coloured_batch, jrd, tiny_embedder

    labels, x = coloured_batch()
    learner = models.MetricLearner(tiny_embedder(batch_norm="train"), [*jrd(), losses.BinomialDevianceLoss()])
    learner.compile(optimizer=keras.optimizers.SGD(0.1))
    history = learner.fit(x, labels, batch_size=len(x), epochs=10, verbose=0).history["loss"]
    embeddings = learner.predict(x, verbose=0)
    assert embeddings.shape == (12, 5)
    return np.array(history)


def main(source, target):
    assert keras.backend.backend() == "jax"
    assert "tensorflow" not in sys.modules, "the backend-free part imports TensorFlow"
    given = dict(np.load(source))
    arrays = {"version": np.array(tfdml.__version__)}
    for name, (by, function) in cases().items():
        labels = given["labels"]
        value, gradient = jax.jit(jax.value_and_grad(lambda x, f=function, y=labels: f(y, x)))(given[by])
        arrays[f"{name}|value"], arrays[f"{name}|gradient"] = np.asarray(value), np.asarray(gradient)
    for name, x in (("identical", np.ones((6, 4), "float32")), ("zero", np.zeros((6, 4), "float32"))):
        for loss in ("contrastive", "binomial", "gaussian", "laplace"):
            function = cases()[loss][1]
            value, gradient = jax.value_and_grad(lambda x, f=function: f(np.array([0, 0, 1, 1, 2, 2]), x))(x)
            arrays[f"{name} {loss}|value"], arrays[f"{name} {loss}|gradient"] = np.asarray(value), np.asarray(gradient)
    arrays["far|loss"] = np.asarray(losses.ContrastiveLoss()(FAR_LABELS, given["embedding"]))
    far = objectives.JointRepresentationSimilarity("embedding")({"embedding": given["embedding"]}, FAR_LABELS)
    arrays["far|jrs"] = np.asarray(far)
    arrays["fit"] = fit()
    np.savez(target, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
