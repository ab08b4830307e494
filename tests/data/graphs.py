"""What an exported graph does with files before the network, built once for all tests of a process:
a graph that decodes takes three seconds to build."""

import tensorflow as tf

from tfdml.data import EvaluationTransform
from tfdml.data.decoding import decode_image
from tfdml.export.saved_model import RequestPreprocessor

VIEW = EvaluationTransform(12, 8)
PREPROCESSOR = RequestPreprocessor(VIEW)

decode = tf.function(decode_image, input_signature=[tf.TensorSpec((), tf.string)], autograph=False)


@tf.function(input_signature=[tf.TensorSpec((None,), tf.string)], autograph=False)
def exported(batch):
    """The views and faults of images."""
    return PREPROCESSOR.each(batch)


@tf.function(input_signature=[tf.TensorSpec((None,), tf.string)], autograph=False)
def exported_or_refused(batch):
    """The views of images of which none has a fault."""
    return PREPROCESSOR.all_or_error(batch, "image_bytes")
