"""What `tfdml.workarounds` is still needed for; and the update of several workers, which equals that of one process."""

import ctypes
import sys

import keras
import numpy as np
import pytest

from tests import worker_steps
from tests.mathematics import assert_close, public_classes
from tests.processes import run_python
from tfdml import objectives, workarounds

CASES = ("all", "ensemble", "rank_mi", "cached")
# Three share the cores of a small machine.
WORKERS = {2: CASES, 3: ("rank_mi",)}

# Where a library has one of these public names now, use it in place of the private one in `tfdml.workarounds`.


def test_keras_shows_the_outermost_layers_alone():
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model = keras.Sequential([keras.Input((3,)), inner])
    assert inner.layers[0] not in model.layers
    assert inner.layers[0] in workarounds.layers_of(model)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere symbols are looked for in one library")
def test_the_symbols_of_tensorflows_openssl_are_global():
    assert hasattr(ctypes.CDLL(None), "SSL_CTX_free")


# Several workers


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    parts = [f"{count}={','.join(cases)}" for count, cases in {1: CASES, **WORKERS}.items()]
    run_python("-m", "tests.worker_steps", folder, *parts)
    return {(count, i): dict(np.load(folder / f"{count}-{i}.npz")) for count in (1, *WORKERS) for i in range(count)}


@pytest.mark.slow
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
        if key.endswith(("d_pos", "d_neg", "violations")):
            continue  # of the pairs on a replica
        # An update is a difference of two float32 weights of up to 1, each of which is rounded.
        assert_close(arrays[count, index][key], expected, 1e-5, floor=max(1e-6 * largest, 2.0**-23))


@pytest.mark.slow
def test_no_objective_is_left_out():
    seen = {type(term).__name__ for case in CASES for term in worker_steps.MORE[case]().objectives}
    # Proxies of another kind, a loss on prefixes, two views; they are compared over replicas in tests/objectives.
    views = {"AcrossViews", "SigmoidAcrossViews", "SoftmaxAcrossViews"}
    kinds = views | {"CurricularFace", "Matryoshka", "MatryoshkaProxyLoss", "RegularizedSoftTriple", "SphereFace2"}
    assert public_classes(objectives).keys() - seen == kinds
