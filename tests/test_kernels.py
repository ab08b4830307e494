import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tests.support import references
from tests.support.mathematics import (
    MODES,
    assert_close,
    degenerate_batches,
    finite_differences,
    random_batch,
    value_and_gradients,
)
from tfdml import kernels
from tfdml.pairs import Pairs

# Each kernel with its reference, and the bandwidth that the reference keeps while it is
# differentiated.
CASES = {
    "gaussian": (kernels.GaussianMixture(), references.gaussian, references.squared_distance),
    "single gaussian": (
        kernels.GaussianMixture((1.0,)),
        lambda x, y=None, tau=None: references.gaussian(x, y, (1.0,), tau),
        references.squared_distance,
    ),
    "fixed gaussian": (
        kernels.GaussianMixture((1.0, 3.0), bandwidth=0.7),
        lambda x, y=None, tau=None: references.gaussian(x, y, (1.0, 3.0), 0.7),
        None,
    ),
    "laplace": (
        kernels.Laplace(2.0),
        lambda x, y=None, tau=None: references.laplace(x, y, 2.0, tau),
        references.absolute_distance,
    ),
    "fixed laplace": (
        kernels.Laplace(bandwidth=1.3),
        lambda x, y=None, tau=None: references.laplace(x, y, 1.0, 1.3),
        None,
    ),
    "polynomial 1": (
        kernels.Polynomial(1),
        lambda x, y=None, tau=None: references.polynomial(x, y, 1),
        None,
    ),
    "polynomial 2": (
        kernels.Polynomial(2),
        lambda x, y=None, tau=None: references.polynomial(x, y, 2),
        None,
    ),
    "polynomial 5": (
        kernels.Polynomial(5),
        lambda x, y=None, tau=None: references.polynomial(x, y, 5),
        None,
    ),
    "exponential": (
        kernels.Exponential(),
        lambda x, y=None, tau=None: references.exponential(x, y),
        None,
    ),
}
every_kernel = pytest.mark.parametrize(("kernel", "reference", "spread"), CASES.values(), ids=CASES)


@every_kernel
@pytest.mark.parametrize("sizes", [(2, None), (9, None), (1, 1), (4, 7)])
@pytest.mark.parametrize("seed", range(2))
def test_equals_the_paper(kernel, reference, spread, sizes, seed):
    arrays = [
        random_batch(seed + i, size, 1, 6, unit=bool(seed))[1]
        for i, size in enumerate(sizes)
        if size
    ]
    assert_close(kernel(*arrays), reference(*arrays))


@every_kernel
@pytest.mark.parametrize("between_two", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_gradient_holds_the_bandwidth_fixed(kernel, reference, spread, between_two, mode):
    arrays = [random_batch(seed, 5, 1, 4)[1] for seed in range(1 + between_two)]
    weights = np.random.default_rng(9).normal(size=(5, 5)).astype("float32")
    tau = references.bandwidth(*arrays, kind=spread) if spread and not between_two else None
    if spread and between_two:
        tau = references.bandwidth(arrays[0], arrays[1], spread)
    value, gradients = value_and_gradients(
        lambda *a: ops.sum(weights * kernel(*a)), *arrays, mode=mode
    )
    assert_close(value, np.sum(weights * reference(*arrays)))
    expected = finite_differences(
        lambda *a: float(np.sum(weights * reference(*a, tau=tau))), *arrays
    )
    for actual, wanted in zip(gradients, expected, strict=True):
        assert_close(actual, wanted)


# Of half precision, batches whose mean distance is 0, and one with a distance of 0.
_ROUNDED = ("all identical", "duplicates across classes")
_OF_DTYPES = [("float32", batch) for batch in degenerate_batches()]
_OF_DTYPES += [
    pytest.param(dtype, batch, marks=pytest.mark.slow)
    for dtype in ("bfloat16", "float16")
    for batch in _ROUNDED
]


@every_kernel
@pytest.mark.parametrize(("dtype", "batch"), _OF_DTYPES)
def test_degenerate_batches_are_finite(kernel, reference, spread, batch, dtype):
    x = degenerate_batches()[batch][1]
    rounded = np.asarray(ops.cast(ops.cast(x, dtype), "float32"))
    value, (gradient,) = value_and_gradients(lambda a: ops.sum(kernel(ops.cast(a, dtype))), rounded)
    assert_close(value, np.sum(reference(rounded)))
    assert np.all(np.isfinite(gradient))
    assert kernel(ops.cast(x, dtype)).dtype == tf.float32


@every_kernel
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_factor_and_exponent_make_the_matrix(kernel, reference, spread, scale):
    x = random_batch(4, 8, 1, 8)[1] * np.float32(scale)
    factor, exponent = kernel.scaled(Pairs.of_batch(x))
    assert_close(factor * (1.0 if exponent is None else ops.exp(exponent)), reference(x))
    assert np.max(np.abs(factor)) <= 1.0
