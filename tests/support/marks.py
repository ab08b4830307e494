"""Marks of tests, and the environment of those in a process of its own on JAX."""

import importlib.util
import itertools
import os

import pytest

# KerasHub is imported by the tests that need it: it takes 150 MB.
has_keras_hub = pytest.mark.skipif(
    not importlib.util.find_spec("keras_hub"), reason="pip install 'tfdml[hub]'"
)

# Quick to compile rather than quick to run: a third of the time.
QUICK_XLA = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
JAX = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_XLA}


def first_quick(values):
    """The values as parameters of which all but the first are slow: cases that differ little, and
    cost seconds each."""
    first, *others = values
    rows = [value if isinstance(value, tuple) else (value,) for value in others]
    return [first, *(pytest.param(*row, marks=pytest.mark.slow) for row in rows)]


def each_quick_once(one, other):
    """All pairs of two lists as parameters, of which those are quick that walk through both."""
    one, other = list(one), list(other)
    steps = range(max(len(one), len(other)))
    quick = {(one[step % len(one)], other[step % len(other)]) for step in steps}
    return [
        pair if pair in quick else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in itertools.product(one, other)
    ]
