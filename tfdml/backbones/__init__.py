"""Networks from images to feature maps, by name."""

from tfdml.backbones.resolver import Backbone, load_weights, names, resolve

__all__ = ["Backbone", "load_weights", "names", "resolve"]
