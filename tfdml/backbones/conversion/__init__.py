"""Published checkpoints of PyTorch and Caffe as weights of the Keras backbones."""

from tfdml.backbones.conversion.convert import ARCHITECTURES, Conversion, convert
from tfdml.backbones.conversion.readers import read_checkpoint

__all__ = ["ARCHITECTURES", "Conversion", "convert", "read_checkpoint"]
