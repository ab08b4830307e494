"""Networks from images to feature maps, by name."""

from tfdml.backbones.hub import HubTokenizer as HubTokenizer
from tfdml.backbones.hub import TokenBackbone as TokenBackbone
from tfdml.backbones.hub import load_text_preset as load_text_preset
from tfdml.backbones.hub import text_network as text_network
from tfdml.backbones.networks import cut as cut
from tfdml.backbones.resolver import Backbone as Backbone
from tfdml.backbones.resolver import check as check
from tfdml.backbones.resolver import load_weights as load_weights
from tfdml.backbones.resolver import names as names
from tfdml.backbones.resolver import resolve as resolve
