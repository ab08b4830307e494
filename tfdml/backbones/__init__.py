"""Networks from images to feature maps, by name."""

from tfdml.backbones.cutting import cut
from tfdml.backbones.lora import enable_lora
from tfdml.backbones.resolver import Backbone, check, load_weights, names, published_weights, resolve
from tfdml.backbones.tokens import TokenBackbone

__all__ = [
    "Backbone",
    "TokenBackbone",
    "check",
    "cut",
    "enable_lora",
    "load_weights",
    "names",
    "published_weights",
    "resolve",
]
