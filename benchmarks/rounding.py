"""What TF32 does to losses and gradients on a GPU, on JAX: products of pairs rounded, and in float32 proper.

    KERAS_BACKEND=jax python -m benchmarks.rounding

A GPU may round the factors of a float32 product to 10 bits. A row is an objective on a batch of --batch images, 5 of a
class, as a trained embedder might have it: the relative error of its value and of its gradient (Euclidean norm) next
to the same on the CPU, as it would be with products as the GPU makes them, and with those of `tfdml.pairwise.matmul`.
"""

import contextlib

import jax
import keras
import numpy as np
from keras import ops

from tfdml import pairwise
from tfdml.training.terms import build_objectives
from tools.numbers import Results, command_line

OBJECTIVES = (
    "contrastive(distance=sqeuclidean)",
    "contrastive(distance=euclidean)",
    "triplet",
    "margin",
    "multi_similarity",
    "binomial_deviance",
    "n_pair",
    "am_softmax(scale=20, margin=0.1)",
    "jrs",
    "ecaml",
    "ecaml(form=log_of_mean, representation=projection)",
    "density",
    "rank_mi(negatives=all)",
)
PER_CLASS = 5


def made_outputs(batch, spread):
    """Labels and the representations of an embedder: images of a class lie `spread` of their distance to 0 apart."""
    generator = np.random.default_rng(0)
    labels = np.arange(batch) // PER_CLASS

    def points(dim, offset):
        centres = generator.normal(size=(labels[-1] + 1, dim))
        found = (centres + offset)[labels] + spread * generator.normal(size=(batch, dim))
        return found.astype("float32")

    projection = points(128, 0.0)
    embedding = projection / np.linalg.norm(projection, axis=1, keepdims=True)
    # What a network's last activation leaves is above 0.
    pooled, similarities = np.abs(points(1280, 0.5)), embedding @ embedding[::PER_CLASS].T
    return labels, {"embedding": embedding, "projection": projection, "pooled": pooled, "class": similarities}


@contextlib.contextmanager
def rounded_products():
    """Within it, products of pairs are as the backend makes them."""
    proper = pairwise.matmul
    pairwise.matmul = ops.matmul
    try:
        yield
    finally:
        pairwise.matmul = proper


def measured(objectives, outputs, labels, device):
    """Value and gradient, in float64."""

    def value(outputs):
        return sum(ops.mean(objective(outputs, labels)) for objective in objectives)

    with jax.default_device(device):
        found, gradients = jax.jit(jax.value_and_grad(value))(outputs)
    return float(found), np.concatenate([np.ravel(g) for g in jax.tree.leaves(gradients)]).astype("float64")


def error(found, expected):
    """Relative errors of value and gradient."""
    length = np.linalg.norm(expected[1])
    return abs(found[0] - expected[0]) / abs(expected[0]), np.linalg.norm(found[1] - expected[1]) / length


def main():
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--batch", type=int, default=120)
    parser.add_argument("--spread", type=float, default=1.5)
    parser.add_argument("--objectives", nargs="*", default=OBJECTIVES)
    arguments = parser.parse_args()
    labels, outputs = made_outputs(arguments.batch, arguments.spread)
    results = Results(arguments.json)
    columns = ("value, TF32", "gradient, TF32", "value, float32", "gradient, float32")
    row = results.table("table", "objective", *columns)
    for text in arguments.objectives:
        keras.utils.set_random_seed(0)
        objectives = build_objectives(text, int(labels[-1]) + 1)
        for objective in objectives:
            objective.build({name: array.shape for name, array in outputs.items()})
        exact = measured(objectives, outputs, labels, jax.devices("cpu")[0])
        with rounded_products():
            rounded = measured(objectives, outputs, labels, jax.devices()[0])
        proper = measured(objectives, outputs, labels, jax.devices()[0])
        errors = (*error(rounded, exact), *error(proper, exact))
        row(f"`{text}`", *(f"{value:.0e}" for value in errors))


if __name__ == "__main__":
    main()
