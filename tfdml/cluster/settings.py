"""Where a run is trained and how a model is served: `ClusterSettings` and `ServeSettings`."""

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


@dataclasses.dataclass(frozen=True)
class ServeSettings(Settings):
    """How a model is served.

    Raises:
        UserError: A value is out of range.
    """

    stored: ClassVar[bool] = False
    title: ClassVar[str] = "How a model is served"

    replicas: int = option(1, at_least=1, help="Processes that compute.")
    max_waiting: int = option(
        100,
        at_least=1,
        help="Most requests that are not answered yet. Further ones are refused with 503.",
    )
    max_instances: int = option(256, at_least=1, help="Most images of a request.")
    max_request_mb: float = option(32.0, above=0, help="Most megabytes of a request.")
    max_megapixels: float = option(
        400.0,
        above=0,
        help="Most megapixels of the images of a request, as their headers state them.",
    )
    timeout: float = option(
        30.0,
        above=0,
        help="Seconds that a request may take to arrive, and the model to answer.",
    )
