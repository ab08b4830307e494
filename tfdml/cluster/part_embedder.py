"""What a worker does: load the model once, then embed one part of the images after another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdml.cluster.bulk_folder import BulkFolder


class PartEmbedder:
    """Embeds parts of a bulk folder; an actor of Ray Data, which calls it with batches of part numbers.

    The vectors go from here to their file, past Ray: what comes back is how many there are.

    Args:
        folder: See `BulkFolder`.
        model: See `load_backend`.
        options: Further arguments of `load_backend`.
        batch_size: Images per batch.
        dtype: See `tfdml.embeddings.parquet.table_of`.
        threads: CPUs that it may keep busy; 0: all.
    """

    def __init__(
        self, folder: str, model: str, options: Mapping[str, Any], batch_size: int, dtype: str, threads: int = 0
    ):
        from tfdml.embeddings.backends import load_backend

        _limit_threads(threads)
        self.folder = BulkFolder(folder)
        self.backend = load_backend(model, threads=threads, **options)
        self.batch_size = batch_size
        self.dtype = dtype

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Embed the parts of `part`; of each, `rows` and `bad` images."""
        facts = [self.embed(int(part)) for part in batch["part"]]
        rows, bad = [each["rows"] for each in facts], [len(each["bad"]) for each in facts]
        return {"part": batch["part"], "rows": np.array(rows), "bad": np.array(bad)}

    def embed(self, part: int) -> dict[str, Any]:
        """Embed one part; see `BulkFolder.write`."""
        from tfdml.data.dataset import ImageDataset
        from tfdml.data.images import FileImages
        from tfdml.embeddings.backends import embed_readable
        from tfdml.embeddings.parquet import table_of

        listed = self.folder.images(part)
        count = len(listed["path"])
        dataset = ImageDataset("input", "test", FileImages(tuple(listed["path"])), np.zeros(count, np.int64), {0: ""})
        found = embed_readable(self.backend, dataset, self.batch_size)
        bad = [[listed["id"][fault.index], listed["path"][fault.index], fault.reason] for fault in found.faults]
        if not len(found.rows):
            return self.folder.write(part, None, bad)
        kept = {name: [values[row] for row in found.rows] for name, values in listed.items()}
        return self.folder.write(part, table_of(kept, found.vectors, self.dtype), bad)


def _limit_threads(threads: int) -> None:
    if not threads:
        return
    import tensorflow as tf

    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
    except RuntimeError:
        pass  # TensorFlow has run already, as in a process that is not Ray's
