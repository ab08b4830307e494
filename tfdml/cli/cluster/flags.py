"""The flags of `tfdml cluster`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from tfdml.cli.command_line import CommandFlags
from tfdml.options import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterFlags(CommandFlags):
    """What is grouped, by which classes, and where the list is written."""

    title: ClassVar[str] = "What is grouped, by which classes, and where the list is written"

    embeddings: str = option(
        help="Of the images to group: a folder that tfdml embed wrote, or a Parquet, .npz or .npy "
        "file."
    )
    held_out: str = option(
        help="Labeled embeddings by the same model, of classes that it was not trained on."
    )
    expected_classes: int = option(
        0,
        at_least=0,
        help="About how many classes the images have; 0: estimated.",
    )
    min_precision: float = option(
        0.0,
        at_least=0,
        below=1,
        help="The share of pairs within a group that are of one class, on held-out classes; 0: as "
        "is best for the adjusted Rand index.",
    )
    min_ari: float = option(
        0.2,
        at_most=1,
        help="Refuse to group where held-out classes reach a smaller adjusted Rand index.",
    )
    gallery: str = option(
        "", help="Known classes, which images join first: any gallery of tfdml search."
    )
    max_distance: str = option(
        "",
        requires="gallery",
        help="Within it images join a known class: a number, a JSON file of tfdml evaluate "
        "--target=fpir=0.01, or calibrated, the threshold of a retriever.",
    )
    min_images: int = option(2, at_least=1, help="The size of the smallest group in the list.")
    prefix: str = option("group-", help="Put before the numbers of groups, for their names.")
    data_dir: str = option(
        "", help="Where the names of the images count from; empty: the folder of --out."
    )
    out: str = option(help="The list to write, a .csv file.")
