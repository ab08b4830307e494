"""Where a run is trained: `ClusterSettings`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from tfdml.options import Settings, option


@dataclasses.dataclass(frozen=True)
class ClusterSettings(Settings):
    """Where a run is trained.

    Raises:
        UserError: A number is out of range.
    """

    stored: ClassVar[bool] = False
    title: ClassVar[str] = "Where a run is trained"

    cluster: str = option(
        "", help="Train on a Ray cluster: its address, such as ray://host:10001, or local."
    )
    workers: int = option(
        1,
        at_least=1,
        requires="cluster",
        help="With --cluster: how many processes train, each on a GPU where the cluster has as "
        "many.",
    )
    storage: str = option(
        "",
        requires="cluster",
        help="With --cluster: a folder or URL that all hosts see, where the run is kept until it "
        "has ended, such as s3://bucket/runs; empty: next to --run_dir.",
    )
