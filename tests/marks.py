"""Marks of parametrised tests."""

import pytest


def first_quick(values):
    """The values as parameters of which all but the first are slow: cases that differ little, and cost seconds each."""
    first, *others = values
    rows = [value if isinstance(value, tuple) else (value,) for value in others]
    return [first, *(pytest.param(*row, marks=pytest.mark.slow) for row in rows)]
