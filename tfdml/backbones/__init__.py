"""Networks from images to feature maps, by name."""

from tfdml.backbones.cutting import cut
from tfdml.backbones.resolver import Backbone, load_weights, names, resolve

__all__ = ["Backbone", "cut", "load_weights", "names", "resolve"]
