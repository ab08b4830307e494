"""Work over many processes and machines, through Ray; needs the extra `ray`.

What is named here is imported on first use: an actor that embeds needs nothing of training.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfdml.cluster.bulk_embedding import BulkRequest, embed_in_bulk
    from tfdml.cluster.training import ClusterSettings, train_on_cluster

_WHERE = {
    "BulkRequest": "bulk_embedding",
    "ClusterSettings": "training",
    "embed_in_bulk": "bulk_embedding",
    "train_on_cluster": "training",
}

__all__ = ["BulkRequest", "ClusterSettings", "embed_in_bulk", "train_on_cluster"]


def __getattr__(name):
    if name in _WHERE:
        return getattr(importlib.import_module(f"tfdml.cluster.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'tfdml.cluster' has no attribute {name!r}")
