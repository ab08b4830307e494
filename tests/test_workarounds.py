"""What `tfdml.workarounds` is still needed for."""

import ctypes
import sys

import keras
import pytest

from tfdml import workarounds

# Where a library has one of these public names now, use it in place of the private one in
# `tfdml.workarounds`.


def test_keras_shows_the_outermost_layers_alone():
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model = keras.Sequential([keras.Input((3,)), inner])
    assert inner.layers[0] not in model.layers
    assert inner.layers[0] in workarounds.layers_of(model)


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere symbols are looked for in one library"
)
def test_the_symbols_of_tensorflows_openssl_are_global():
    assert hasattr(ctypes.CDLL(None), "SSL_CTX_free")
