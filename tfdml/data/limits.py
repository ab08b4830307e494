"""How large an image may be."""

# TensorFlow's decoders hold at most 2^29 values, that is so many pixels of three.
DECODER_LIMIT = 178_956_970
# By default in a server, where an image takes up to ten bytes a pixel: 1 GB for the largest.
SERVING_LIMIT = 100_000_000
# A side may be this many times the other: enlarged until its shorter side fits, a line of pixels
# would fill the memory.
NARROWEST = 100
