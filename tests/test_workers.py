"""Workers make the update of one process; each run in processes of their own."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests import worker_steps
from tests.mathematics import assert_close
from tfdml import objectives

CASES = ("all", "ensemble", "alternating", "cached")
# Three share the cores of a small machine: of them only the learner that takes turns.
WORKERS = {2: CASES, 3: ("alternating",)}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    root = pathlib.Path(__file__).resolve().parents[1]
    for counts, cases in (("1,2", CASES), ("3", WORKERS[3])):
        command = [sys.executable, "-m", "tests.worker_steps", str(folder), counts, *cases]
        result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, check=False)
        assert result.returncode == 0, result.stderr[-3000:]
    return {(count, i): dict(np.load(folder / f"{count}-{i}.npz")) for count in (1, *WORKERS) for i in range(count)}


@pytest.mark.parametrize(
    ("count", "index", "case"),
    [(count, i, case) for count, cases in WORKERS.items() for i in range(count) for case in cases],
)
def test_workers_update_a_learner_as_one_process_does(arrays, count, index, case):
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


def test_no_objective_is_left_out():
    seen = {type(term).__name__ for case in CASES for term in worker_steps.MORE[case]().objectives}
    # Proxies of another kind; what they keep is compared over replicas in tests/objectives.
    kinds = {"CurricularFace", "RegularizedSoftTriple", "SphereFace2"}
    assert set(objectives.__all__) - seen == {"AutoWeight", "Objective", *kinds}


def test_keras_and_tensorflow_still_need_what_is_done_for_them(arrays):
    # What is missing here works without tfdml.models.several_workers or tfdml.replicas now: take the mend out.
    assert arrays[2, 0]["lacking"].tolist() == ["fit", "average", "gather", "narrow"]
