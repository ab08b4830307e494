"""What TF32 does to losses and gradients, on JAX: products of pairs rounded, and in full float32.

    KERAS_BACKEND=jax python -m benchmarks.rounding

A GPU may round the factors of a float32 product to 10 bits. A row is an objective on a batch of --batch images, 5 of a
class: the relative error of its value and of its gradient (Euclidean norm) with products as the GPU makes them by
itself, and with those of `tfdml.pairwise.matmul`, both next to float32 on the CPU. Without a GPU the factors are
rounded by hand, and there is no second way.
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
    "rank_mi(negatives=all)",
)
PER_CLASS = 5
PARTS = ("value", "gradient")


def made_outputs(batch, spread):
    """Labels and the representations of an embedder: images of a class lie `spread` of their distance to 0 apart."""
    generator = np.random.default_rng(0)
    labels = np.arange(batch) // PER_CLASS

    def points(dim, offset):
        centers = generator.normal(size=(labels[-1] + 1, dim))
        found = (centers + offset)[labels] + spread * generator.normal(size=(batch, dim))
        return found.astype("float32")

    projection = points(128, 0.0)
    embedding = projection / np.linalg.norm(projection, axis=1, keepdims=True)
    # What a network's last activation leaves is above 0.
    pooled, similarities = np.abs(points(1280, 0.5)), embedding @ embedding[::PER_CLASS].T
    return labels, {"embedding": embedding, "projection": projection, "pooled": pooled, "class": similarities}


def ten_bits(x):
    """What TF32 makes of a factor."""
    bits = jax.lax.bitcast_convert_type(x, jax.numpy.int32) + 2**12
    return jax.lax.bitcast_convert_type(bits & -(2**13), jax.numpy.float32)


@jax.custom_vjp
def rounded_matmul(x, y):
    """A product as a GPU makes it, on any device."""
    return ops.matmul(ten_bits(x), ten_bits(y))


def backward(factors, upstream):
    """Its gradients, which are such products too."""
    x, y = (ops.swapaxes(factor, -1, -2) for factor in factors)
    return rounded_matmul(upstream, y), rounded_matmul(x, upstream)


rounded_matmul.defvjp(lambda x, y: (rounded_matmul(x, y), (x, y)), backward)


@contextlib.contextmanager
def rounded_products(on_gpu):
    """Within it, products of pairs are as a GPU makes them by itself."""
    proper = pairwise.matmul
    pairwise.matmul = ops.matmul if on_gpu else rounded_matmul
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
    on_gpu = jax.default_backend() == "gpu"
    ways = ["TF32", *["float32"] * on_gpu]
    row = Results(arguments.json).table("table", "objective", *(f"{part}, {way}" for way in ways for part in PARTS))
    for text in arguments.objectives:
        keras.utils.set_random_seed(0)
        objectives = build_objectives(text, int(labels[-1]) + 1)
        for objective in objectives:
            objective.build({name: array.shape for name, array in outputs.items()})
        exact = measured(objectives, outputs, labels, jax.devices("cpu")[0])
        with rounded_products(on_gpu):
            errors = error(measured(objectives, outputs, labels, jax.devices()[0]), exact)
        if on_gpu:
            errors += error(measured(objectives, outputs, labels, jax.devices()[0]), exact)
        row(f"`{text}`", *(f"{value:.0e}" for value in errors))


if __name__ == "__main__":
    main()
