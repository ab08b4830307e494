"""What an image set is: where its bytes lie, their headers and sizes, decoding, and faults."""

from tfdml.data.images.base import Images
from tfdml.data.images.containers import ArrayImages, EncodedImages, FileImages
from tfdml.data.images.record_images import RecordImages

__all__ = ["ArrayImages", "EncodedImages", "FileImages", "Images", "RecordImages"]
