"""Two and three workers make the update of one process; each run in processes of their own."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.mathematics import assert_close

CASES = ("all", "alternating", "cached")
COUNTS = (1, 2)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    root = pathlib.Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "tests.worker_steps", str(folder), ",".join(map(str, COUNTS)), *CASES]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return {(count, i): dict(np.load(folder / f"{count}-{i}.npz")) for count in COUNTS for i in range(count)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("count", "index"), [(count, i) for count in COUNTS[1:] for i in range(count)])
def test_workers_update_a_learner_as_one_process_does(arrays, case, count, index):
    one = {key: value for key, value in arrays[1, 0].items() if key.startswith(f"{case}|")}
    changes = [key for key in one if key.partition("|")[2].isdigit()]
    largest = max(np.abs(one[key]).max() for key in changes)
    assert len(changes) > 3
    assert largest > 1e-3
    for key, expected in one.items():
        if key.endswith(("d_pos", "d_neg")):
            continue  # of the pairs on a replica
        # An update is a difference of two float32 weights of up to 1, each of which is rounded.
        assert_close(arrays[count, index][key], expected, 1e-5, floor=max(1e-6 * largest, 2.0**-23))


def test_keras_and_tensorflow_still_need_what_is_done_for_them(arrays):
    # What is missing here works without tfdml.models.several_workers or tfdml.replicas now: take the mend out.
    assert arrays[2, 0]["lacking"].tolist() == ["fit", "average", "gather", "narrow"]
