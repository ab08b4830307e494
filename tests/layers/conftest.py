"""What the tests of layers share."""

import keras
import pytest


@pytest.fixture(params=["float32", "mixed_bfloat16", "mixed_float16"])
def policy(request):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)
