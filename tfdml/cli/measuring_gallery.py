"""The part of bin/evaluate that measures what a search of a gallery finds."""

from __future__ import annotations

import json
from pathlib import Path

from absl import flags

from tfdml.cli.progress import Progress
from tfdml.errors import UserError
from tfdml.io.files import write_json


def measure_gallery(uri: str) -> None:
    """Measure the gallery at an address as the flags say.

    Raises:
        UserError: As `connect` and `evaluate_gallery`, or `--distance` is not the gallery's.
    """
    from tfdml.cli.measuring import fitting_ks
    from tfdml.evaluation import evaluate_gallery
    from tfdml.evaluation.approximate_search import METRICS
    from tfdml.evaluation.per_query import requested
    from tfdml.retrieval import connect

    values = flags.FLAGS
    metrics = values.metrics or list(METRICS)
    requested((1,), metrics, METRICS)
    with connect(uri) as gallery:
        if values["distance"].present and values.distance != gallery.distance:
            raise UserError(f"--distance={values.distance}: the gallery was made with {gallery.distance}")
        with Progress(0) as progress_line:
            measured = evaluate_gallery(gallery, values.split, fitting_ks, metrics, progress_line.images_of)
        address, kind = gallery.address, gallery.address.index or "exact"
    found, exact = measured.found, measured.exact
    print(f"{address}: {measured.images:,} images of {measured.classes:,} classes, {gallery.distance}")
    print(f"  {'':<24}{kind:>8}{'exactly':>10}")
    for name, value in found.items():
        if isinstance(value, float):
            print(f"  {name:<24}{100 * value:6.2f} %{100 * exact[name]:8.2f} %")
        else:
            print(f"  {name:<24}{value:>6,}")
    for name in measured.left_out:
        print(f"  {name} is left out: a class has more images than a search returns")
    if values.json:
        about = {"model": str(address), "split": values.split, "distance": gallery.distance, "index": kind}
        write_json(Path(values.json), {**about, **found, "exact": exact})
        print(json.dumps({"written": values.json}))
