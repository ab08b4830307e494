"""What the package computes on seeded inputs is what was recorded: `tests/support/records.py`."""

import json

import numpy as np
import pytest

from tests.support import records

# Training multiplies last digits; images depend on the versions of their decoders.
TOLERANCES = {"runs": 1e-2, "decodes": 2e-3}
QUICK = ("miners", "samplers", "searches", "evaluation", "transforms")


def assert_as_recorded(value, expected, name, relative):
    """A hash is the same, and sums of floats differ by rounding alone."""
    if isinstance(expected, str) or not isinstance(expected[0], (int, float)):
        assert type(value) is type(expected), name
    if isinstance(expected, str):
        assert value == expected, name
    elif isinstance(expected[0], list):
        for part, expected_part in zip(value, expected, strict=True):
            assert_as_recorded(part, expected_part, name, relative)
    else:
        count, total, size, *others = expected
        assert value[0] == count, name
        # Of the terms' sizes, as sums of opposite signs cancel.
        floor = relative * (size + 1e-3)
        np.testing.assert_allclose(value[1:3], [total, size], rtol=0, atol=floor, err_msg=name)
        np.testing.assert_allclose(value[3], others[0], rtol=0, atol=floor, err_msg=name)
        np.testing.assert_allclose(value[4], others[1], rtol=4 * relative, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=[] if part in QUICK else pytest.mark.slow) for part in records.PARTS],
)
def test_values_are_those_recorded(part):
    recorded = json.loads(records.PATH.read_text(encoding="utf-8"))[part]
    now = dict(records.PARTS[part]())
    assert sorted(now) == sorted(recorded)
    for name, expected in recorded.items():
        assert_as_recorded(now[name], expected, f"{part}: {name}", TOLERANCES.get(part, 1e-4))
