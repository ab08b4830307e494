"""Two devices make the update of one: in a process of its own, since devices are set before
TensorFlow starts."""

import numpy as np
import pytest

from tests.support.distribution_steps import BATCH
from tests.support.mathematics import assert_close
from tests.support.processes import run_python

PLAIN = ("contrastive/11", "am/19", "given/19")
LEARNERS = (
    "regularized on batch/9",
    "tuned/19",
    "terms/19",
    "memory/19",
    "ensemble/10",
    "two views/19",
    "rank_mi cached/19",
    "rank_mi twice/19",
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    parts = [",".join(cases) for cases in (PLAIN, *(LEARNERS[part::3] for part in range(3)))]
    # Convolutions by oneDNN on two logical CPU devices at once corrupt the heap now and then
    # (TensorFlow 2.21).
    run_python(
        "-m",
        "tests.support.distribution_steps",
        folder,
        *parts,
        environment={"TF_ENABLE_ONEDNN_OPTS": "0"},
    )
    return {
        name: array
        for part in range(len(parts))
        for name, array in np.load(folder / f"{part}.npz").items()
    }


def check(arrays, case):
    one = {key: value for key, value in arrays.items() if key.startswith(f"{case}|1|")}
    assert len(one) > 3
    largest = max(
        np.abs(value).max()
        for key, value in one.items()
        if "loss" not in key and "observed" not in key
    )
    assert largest > 1e-3
    for key, expected in one.items():
        rows = case.partition("/")[2]
        # A bias that all embeddings share moves no distance: what is left of its gradient is the
        # rounding of terms that cancel, as large as those of the other weights. An update is a
        # difference of stored weights, up to 2 here, which each step rounds by up to half a unit on
        # either side.
        rounding = -(-int(rows) // BATCH) * float(np.finfo(np.float32).eps)
        assert_close(
            arrays[key.replace("|1|", "|2|")], expected, 1e-5, floor=max(1e-6 * largest, rounding)
        )


@pytest.mark.parametrize("case", [*PLAIN, *LEARNERS])
def test_two_devices_make_the_update_of_one(arrays, case):
    check(arrays, case)
    observed = sum("observed" in key for key in arrays if key.startswith(f"{case}|1|"))
    expected = {"terms": 4, "memory": 1, "rank_mi cached": 3, "rank_mi twice": 3}
    assert observed == expected.get(case.split("/")[0], 0)
