"""What a server takes and how long it waits: `WebSettings`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from tfdml.options import Settings, option


@dataclasses.dataclass(frozen=True)
class WebSettings(Settings):
    """Where a server listens, and what it takes.

    Raises:
        UserError: A value is out of range.
    """

    stored: ClassVar[bool] = False
    title: ClassVar[str] = "Where the server listens, and what it takes"

    host: str = option("127.0.0.1", help="Address to listen at; 0.0.0.0: at all of this machine.")
    lanes: int = option(
        2,
        at_least=1,
        help="Requests that are computed at once. One that takes long holds up its lane alone.",
    )
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
