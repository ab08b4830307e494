"""The papers' backbones give the same features on Keras's JAX backend."""

import keras
import numpy as np
import pytest

from tests.support.marks import JAX
from tests.support.mathematics import assert_close
from tests.support.processes import run_python
from tfdml import backbones

pytest.importorskip("jax")
SCRIPT = """
import sys
import numpy as np
from tfdml import backbones
folder, *names = sys.argv[1:]
x = np.load(f"{folder}/x.npy")
for name in names:
    model = backbones.resolve(name, 64, weights=f"{folder}/{name}.weights.h5").model
    trunk, rest = backbones.cut(model, "inception_4a")
    # Compiled as one: layer by layer takes minutes.
    np.save(f"{folder}/{name}.npy", rest.predict(trunk.predict(x, verbose=0), verbose=0))
assert "tensorflow" not in sys.modules
"""


@pytest.mark.slow
def test_features_are_those_of_tensorflow(tmp_path):
    names = ("googlenet", "bn_inception")
    x = np.random.default_rng(0).uniform(-100, 100, (2, 64, 64, 3)).astype("float32")
    np.save(tmp_path / "x.npy", x)
    expected = {}
    for name in names:
        keras.utils.set_random_seed(1)
        model = backbones.resolve(name, 64).model
        model.save_weights(tmp_path / f"{name}.weights.h5")
        expected[name] = model(x)
    run_python("-c", SCRIPT, tmp_path, *names, environment=JAX)
    for name in names:
        assert_close(np.load(tmp_path / f"{name}.npy"), expected[name], 1e-4)
