"""The version of tfdml, kept apart so that packaging reads it without importing TensorFlow."""

__version__ = "0.1.0"
