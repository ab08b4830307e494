"""bin/evaluate: measure a trained or exported embedder on a data set, or embeddings that lie on disk."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from tfdml.cli import after_embedding, model_flags
from tfdml.cli import main as command_line
from tfdml.effects import Effect, both, either, needs
from tfdml.errors import UserError
from tfdml.io.files import require_writable, sweep, write_json

USAGE = f"""
Measure an embedder: Recall@K, precision, MAP@R, R-precision, mAP, NMI, AMI, pairwise F1.

  bin/evaluate --model=runs/cars_jrd
  bin/evaluate --model=models/cars --dataset=cars196 --data_dir=/data/cars196 --json=metrics.json
  bin/evaluate --model=models/cars/1/litert/int8.tflite --dataset=cars196 --data_dir=/data/cars196
  bin/evaluate --model=grpc://localhost:8500/cars --dataset=folder --data_dir=photos --intervals=classes
  bin/evaluate --model=embeddings/cars --metrics=recall,map@r --ks=1,10
  bin/evaluate --model=vectors.npz --distance=cosine
  bin/evaluate --model='lancedb:///data/galleries?table=cars&index=ivf_pq&effort=20' --ks=1,10
  bin/evaluate --model=embeddings/photos --metrics=recall --cluster=local --quantised=int8,pq
  bin/evaluate --model=runs/cars_jrd --after='views(flip=true) + whitening(dim=64) + query_expansion(k=5, alpha=3)'
  bin/evaluate --compare runs/cars_am runs/cars_jrd --report=comparison.html

{model_flags.SOURCES}
  a folder that bin/embed wrote; a Parquet file or a folder of them, with the columns embedding and label
  an .npy file of embeddings (N, d), with --dataset for the labels
  an .npz file with the arrays embeddings (N, d) and labels (N,), and for queries that are searched in the rest
  is_query (N,) bool
  the address of a gallery that bin/index wrote: what a search of the database finds, beside the exact search

With --compare, the others are compared with the first run query by query, with 95 % intervals; --report and --json are
optional. With --dataset too, the page also shows what each run finds for the same queries.
"""

flags.DEFINE_enum("split", "test", ["test", "train"], "Which classes to measure on.", module_name=__name__)
flags.DEFINE_list(
    "metrics",
    [],
    "Which metrics: recall, recall@K, precision@K, map@r, r_precision, map, map@K, nmi, ami, f1. By default all that "
    "need no further search; without nmi, ami and f1 large sets are quicker.",
    module_name=__name__,
)
flags.DEFINE_list(
    "ks",
    ["1", "2", "4", "8"],
    "The K of Recall@K; by default without those that the images are too few for.",
    module_name=__name__,
)
flags.DEFINE_enum(
    "distance",
    "euclidean",
    ["euclidean", "sqeuclidean", "cosine", "dot"],
    "What near means.",
    module_name=__name__,
)
flags.DEFINE_enum(
    "intervals",
    "none",
    ["none", "classes", "queries", "parts"],
    "95 % confidence intervals: bootstrap over classes or over queries; or the means over ten disjoint parts of the "
    "images, which are measured besides.",
    module_name=__name__,
)
flags.DEFINE_bool(
    "generalisation",
    False,
    "Also measure how the embedding carries over from the training classes to these (which are embedded, too).",
    module_name=__name__,
)
flags.DEFINE_string(
    "cluster",
    "",
    "Search over Ray, blocks of queries for each process: local (processes of this machine), ray://host:10001 or "
    "host:6379. The numbers are the same.",
    module_name=__name__,
)
flags.DEFINE_integer(
    "workers",
    0,
    "With --cluster: how many processes; 0: one for each CPU.",
    lower_bound=0,
    module_name=__name__,
)
flags.DEFINE_list(
    "quantised",
    [],
    "Also Recall@1 in galleries that are kept in fewer bytes, beside float32: int8, pq or pqM (M bytes a vector).",
    module_name=__name__,
)
flags.DEFINE_string("json", "", "File to write the metrics to, as fractions.", module_name=__name__)
flags.DEFINE_string("report", "", "File to write an HTML page to.", module_name=__name__)
flags.DEFINE_list(
    "compare",
    [],
    "In place of --model: folders of finished runs, compared with the first of them on the same queries.",
    module_name=__name__,
)


def _subject(given: Mapping[str, Any]) -> str:
    """What is measured: `runs` (--compare), a `gallery`, stored `embeddings`, or a `model`."""
    from tfdml.embeddings.reader import holds_embeddings
    from tfdml.retrieval import is_gallery

    if given["compare"]:
        return "runs"
    if is_gallery(given["model"]):
        return "gallery"
    return "embeddings" if holds_embeddings(given["model"]) else "model"


_VECTORS = Effect(lambda given: _subject(given) in ("model", "embeddings"), "a model or stored embeddings as --model")
_NO_GALLERY = Effect(lambda given: _subject(given) != "gallery", "anything but a gallery as --model")
_ALONE = Effect(lambda given: not given["compare"], "--model in place of --compare")
_IMAGES = both(_NO_GALLERY, either(needs("dataset"), Effect(lambda given: _subject(given) == "model", "a model")))
_EMBEDDING = Effect(
    lambda given: _subject(given) == "model" or bool(given["compare"] and given["dataset"]),
    "a model that embeds images as --model, or --compare with --dataset",
)
EFFECTS = command_line.Effects(
    {
        **model_flags.EFFECTS,
        **dict.fromkeys(("data_dir", "dataset_options", "bad_images"), _IMAGES),
        "batch_size": _EMBEDDING,
        "dataset": _NO_GALLERY,
        "report": _NO_GALLERY,
        "split": either(_ALONE, needs("dataset")),
        "distance": either(_ALONE, needs("dataset")),
        **dict.fromkeys(("metrics", "ks"), _ALONE),
        **dict.fromkeys(("intervals", "generalisation", "quantised", "after", "cluster"), _VECTORS),
        "workers": both(_VECTORS, needs("cluster")),
    },
    frozenset({"model", "compare", "json"}),
)

# The flags whose names are not those of the arguments that they set.
FLAG_OF = {"uri": "model"}


def evaluate() -> None:
    """Evaluate as the flags say."""
    values = flags.FLAGS
    ks = _checked_flags()
    chains = after_embedding.chains()
    if values.compare:
        from tfdml.cli.comparing import compare_runs

        compare_runs(values.compare, values.report, values.json, values.split, values.distance)
        return
    from tfdml.cli.measuring_seeds import holds_seeds, measure_seeds

    if holds_seeds(values.model):
        measure_seeds(values.model, evaluate)
        return
    from tfdml.cli import measuring
    from tfdml.embeddings.reader import holds_embeddings
    from tfdml.retrieval import is_gallery

    if is_gallery(values.model):
        from tfdml.cli.measuring_gallery import measure_gallery

        measure_gallery(values.model)
        return
    from tfdml.evaluation import DEFAULT_METRICS, evaluate_dataset, part_protocol

    metrics = values.metrics or list(DEFAULT_METRICS)
    measured = measuring.stored if holds_embeddings(values.model) else measuring.embedded
    subject = measured(values.model, values.split, metrics)
    ks = measuring.fitting_ks(subject.images) if "recall" in metrics else ks
    options: dict[str, Any] = {"ks": ks, "metrics": metrics, "distance": values.distance}
    sample = measuring.kmeans_sample(subject, metrics)
    if values.cluster:
        from tfdml.cluster.query_blocks import values_over_ray

        options["per_query"] = values_over_ray(values.cluster, values.workers)
    resampled = values.intervals if values.intervals in ("classes", "queries") else None
    result = evaluate_dataset(subject.embeddings, subject.images, intervals=resampled, kmeans_sample=sample, **options)
    if values.intervals == "parts":
        if subject.images.is_query is not None:
            raise UserError("--intervals=parts: the parts are searched all in all, and these images have roles")
        result["parts"] = part_protocol(subject.embeddings, subject.images.labels, **options)
    if chains:
        result["after"] = after_embedding.measure(subject, chains, ks, metrics)
    if values.quantised:
        result["quantised"] = measuring.quantised(subject, values.quantised, values.distance)
    if values.generalisation:
        result["generalisation"] = measuring.generalisation(subject, values.distance)
    print(f"{values.model} on {subject.name}: {len(subject.embeddings):,} images of {subject.num_classes:,} classes")
    measuring.print_metrics(result)
    if chains:
        after_embedding.print_rows(result["after"])
    if values.json:
        about = {"model": values.model, "dataset": subject.dataset_name, "split": values.split}
        write_json(Path(values.json), {**about, "distance": values.distance, **result})
        print(json.dumps({"written": values.json}))
    if values.report:
        measuring.write_page(subject, result, values.report, values.distance)
        print(json.dumps({"written": values.report}))


def _checked_flags() -> tuple[int, ...]:
    """Checks the flags before anything is loaded, and returns the K of `--ks`."""
    values = flags.FLAGS
    if values.compare and values.model:
        raise UserError("--compare takes the place of --model: name one of them")
    if not values.compare and not values.model:
        raise UserError("--model is missing")
    for name in ("metrics", "ks", "compare", "quantised"):
        if values[name].present and not any(values[name].value or ()):
            raise UserError(f"--{name}= names nothing: leave the flag out, or name what it is to take")
    try:
        ks = tuple(int(k) for k in values.ks)
    except ValueError as error:
        raise UserError(f"--ks={','.join(values.ks)}: write integers with commas, e.g. 1,2,4") from error
    for name in ("json", "report"):
        path = values[name].value
        if path:
            require_writable(path, name)
            sweep(os.path.dirname(os.path.realpath(path)))
    if values.quantised:
        from tfdml.evaluation.approximate_search import check_kinds

        check_kinds(values.quantised)
    if values.metrics:
        from tfdml.evaluation import METRICS
        from tfdml.evaluation.per_query import requested

        requested(ks, values.metrics, METRICS)
    if values.after and "map" in values.metrics:
        raise UserError("--metrics=map ranks the whole gallery, which --after does not: name map@r or map@K")
    return ks


def joined_runs(argv: Sequence[str]) -> list[str]:
    """A command line with the folders that follow --compare put behind its equals sign, as a list flag wants them.

    Example:
        >>> joined_runs(["evaluate", "--compare", "runs/a", "runs/b", "--report=page.html"])
        ['evaluate', '--compare=runs/a,runs/b', '--report=page.html']
    """
    result: list[str] = []
    separator = ""
    for argument in argv:
        if separator and not argument.startswith("-"):
            result[-1] += separator + argument
            separator = ","
        else:
            result.append(argument)
            separator = "=" if argument in ("--compare", "-compare") else ""
    return result


def main() -> None:
    """Entry point."""
    command_line.run(evaluate, "evaluate", USAGE, joined_runs(sys.argv), FLAG_OF, effects=EFFECTS)


if __name__ == "__main__":
    main()
