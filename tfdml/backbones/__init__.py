"""Networks from images to feature maps, by name."""

from tfdml.backbones.cutting import cut
from tfdml.backbones.resolver import Backbone, check, load_weights, names, published_weights, resolve

__all__ = ["Backbone", "check", "cut", "load_weights", "names", "published_weights", "resolve"]
