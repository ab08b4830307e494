"""Folders of embeddings, as tfdml embed writes them."""

import numpy as np

from tfdml.embeddings.files import EmbeddingFolder


def write_folder(path, identity, images, vectors, about=None):
    """Write an `ImageTable` and its vectors as one part, and finish."""
    folder = EmbeddingFolder(path, identity)
    with folder.opened():
        folder.write_part(0, images.columns(), np.asarray(vectors, np.float32))
        return folder.finish(len(images), about)
