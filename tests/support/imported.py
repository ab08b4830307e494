"""What most tests and every command import, and the glyphs that a tiny run draws."""

import functools

import faiss  # noqa: F401
import hypothesis  # noqa: F401
import keras  # noqa: F401
import sklearn.metrics  # noqa: F401
import tensorflow  # noqa: F401

from tfdml import data, evaluation, export, report, training  # noqa: F401
from tfdml.data.readers import glyphs

glyphs.draw = functools.cache(glyphs.draw)
for _character in glyphs.CHARACTERS:
    for _instance in range(4):
        glyphs.draw(_character, _instance, size=32, seed=0)
