"""`tfdml evaluate`: measure embedders and stored embeddings, or compare runs."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdml.cli import model_flags
from tfdml.cli.command_line import Command, Flags
from tfdml.cli.measuring import EmbeddedSplit, fitting_ks, parsed_chains, print_metrics
from tfdml.cluster.query_blocks import values_over_ray
from tfdml.effects import Effect, both, either, needs
from tfdml.embeddings.reader import holds_embeddings
from tfdml.errors import UserError
from tfdml.evaluation import DEFAULT_METRICS, METRICS, evaluate_dataset, part_protocol, target_of
from tfdml.evaluation.chains import Step
from tfdml.evaluation.per_query import WHOLE_RANKING_METRICS, requested
from tfdml.io.files import require_writable, sweep, write_json
from tfdml.report import write_comparison
from tfdml.report.comparison import Paired
from tfdml.report.runs import read_runs
from tfdml.retrieval import is_gallery

USAGE = f"""
Measure an embedder: Recall@K, precision, MAP@R, R-precision, mAP, NMI, AMI, pairwise F1.

  tfdml evaluate --model=runs/cars_jrd
  tfdml evaluate --model=models/cars --dataset=cars196 --data_dir=/data/cars196 --json=metrics.json
  tfdml evaluate --model=models/cars/1/litert/int8.tflite --dataset=cars196 --data_dir=/data/cars196
  tfdml evaluate --model=http://localhost:8501/v1/models/cars --dataset=folder --data_dir=photos --intervals=classes
  tfdml evaluate --model=embeddings/cars --metrics=recall,map@r --ks=1,10
  tfdml evaluate --model=vectors.npz --distance=cosine
  tfdml evaluate --model=runs/head --features=new.npz
  tfdml evaluate --model='lancedb:///data/galleries?table=cars&index=ivf_pq&effort=20' --ks=1,10
  tfdml evaluate --model=runs/cars_jrd --after='views(flip=true) + whitening(dim=64) + query_expansion(k=5, alpha=3)'
  tfdml evaluate --model=embeddings/photos --metrics=recall,map@r --cluster=ray://head:10001
  tfdml evaluate --compare=runs/cars_am,runs/cars_jrd --report=comparison.html
  tfdml evaluate --model=runs/cars_jrd --task=verification --target=far=0.001 --json=threshold.json
  tfdml evaluate --model=runs/cars_jrd --task=classification

{model_flags.SOURCES}
  a folder that tfdml embed wrote; a Parquet file or a folder of them, with the columns embedding and label
  an .npy file of embeddings (N, d), with --dataset for the labels
  an .npz file with the arrays embeddings (N, d) and labels (N,), and for queries that are searched in the rest
  is_query (N,) bool

--metrics are of recall, recall@K (CMC), precision@K, map@K, mp@K, mmp@K, map@r, r_precision, nmi, ami, f1, and of map,
map_trapezoidal, minp, mrr, ndcg, h_ap, asi, gap and gap_known, which search once more; see docs/evaluation.md. The
default is what the benchmark of the data set reports: for market1501 CMC, mAP and mINP (docs/protocols.md).
--after measures each step of a chain, e.g. 'whitening(dim=128) + query_expansion(k=5)': its gain and cost. Steps:
views(flip=true, crops=1 or 5), whitening(dim=0, power=1, shrinkage=0), fitted to the training classes,
database_augmentation(k=10, alpha=3), query_expansion(k=10, alpha=3), and as the last one csls(k=10) or
k_reciprocal(k1=20, k2=6, weight=0.3, top=200).

--task=verification counts all pairs of images: AUC, equal error rate, and the true accept rate at false accept rates.
With --target=far=0.001, or precision=0.99, it also chooses the threshold on the distance; --json keeps it. --report has
the ROC curve and the worst errors as images; its threshold comes from the held-out classes of a run.
--task=classification votes by the nearest images of a gallery: every second image of each class, without the last half
of the classes, whose images are to be found unknown.

With --compare, the others are compared with the first run query by query, with 95 % intervals; --report and --json are
optional. With --dataset too, the page also shows what each run finds for the same queries.
"""

FLAGS = Flags()
model_flags.define_model_flags(FLAGS)
model_flags.define_data_flags(FLAGS)
FLAGS.define("split", "test", "Which classes to measure on.", ["test", "train"])
FLAGS.define("metrics", [], "Which metrics, see above. Large sets are quicker without nmi, ami and f1.")
FLAGS.define(
    "ks",
    ["1", "2", "4", "8"],
    "The K of Recall@K; by default the benchmark's, or those that the images are enough for.",
)
FLAGS.define("distance", "euclidean", "What near means.", ["euclidean", "sqeuclidean", "cosine", "dot"])
FLAGS.define(
    "intervals",
    "none",
    "95 % intervals: bootstrap over classes or queries, or means over ten parts.",
    ["none", "classes", "queries", "parts"],
)
FLAGS.define("task", "retrieval", "What the embeddings are for.", ["retrieval", "verification", "classification"])
FLAGS.define("target", "", "With --task=verification: choose a threshold, such as far=0.001 or precision=0.99.")
FLAGS.define("neighbors", 5, "With --task=classification: how many images vote.", lower_bound=1)
FLAGS.define("generalisation", False, "Also compare the embeddings of the training classes with these.")
FLAGS.define("cluster", "", "Search over Ray, with the same result: local, ray://host:10001 or host:6379.")
FLAGS.define("workers", 0, "With --cluster: how many processes; 0: one for each CPU.", lower_bound=0)
FLAGS.define("json", "", "File to write the metrics to, as fractions.")
FLAGS.define("report", "", "File to write an HTML page to.")
FLAGS.define("compare", [], "In place of --model: finished runs, compared with the first of them.")
FLAGS.define(
    "after",
    [],
    "A chain of steps after the embedding, see above; repeat the flag for another chain.",
    kind="multi_string",
)


def evaluate(values: Flags) -> None:
    """Evaluate as the flags say."""
    ks = _checked_ks(values)
    chains = parsed_chains(values.after)
    kind = _kind(values.flag_values_dict())
    if kind == "runs":
        _compare_runs(values)
        return

    metrics = values.metrics or list(DEFAULT_METRICS)
    if values.task != "retrieval":
        metrics = []
    split = EmbeddedSplit.on_disk(values) if kind == "embeddings" else EmbeddedSplit.by_model(values, metrics)
    benchmark = getattr(split.images, "protocol", None)
    if benchmark and not values.metrics:
        metrics = list(benchmark.metrics)
    about = {"model": values.model, "dataset": split.dataset_name, "split": values.split, "distance": values.distance}
    if values.task == "retrieval":
        result = _retrieval(values, split, metrics, ks, chains)
    else:
        about["task"] = values.task
        result = split.verification() if values.task == "verification" else split.classification()
    if values.json:
        _write(values.json, {**about, **result})
    if values.report:
        split.write_page(result)
        print(json.dumps({"written": values.report}))


def _retrieval(
    values: Flags, split: EmbeddedSplit, metrics: Sequence[str], ks: Sequence[int], chains: Sequence[Sequence[Step]]
) -> dict[str, Any]:
    """Print the retrieval metrics of a split, and return them for JSON."""
    ks = fitting_ks(values, split.images) if "recall" in metrics else ks
    options: dict[str, Any] = {"ks": ks, "metrics": metrics, "distance": values.distance}
    over_ray = {}
    if values.cluster:
        over_ray = {"per_query": values_over_ray(values.cluster, values.workers)}
    resampled = values.intervals if values.intervals in ("classes", "queries") else None
    result = evaluate_dataset(split.embeddings, split.images, intervals=resampled, **options, **over_ray)
    if values.intervals == "parts":
        if split.images.is_query is not None or getattr(split.images, "groups", None) is not None:
            raise UserError("--intervals=parts: parts are searched all in all, and these images have roles or groups")
        result["parts"] = part_protocol(split.embeddings, split.images.labels, **options)
    if chains:
        result["after"] = split.after_embedding(chains, ks, values.metrics or list(DEFAULT_METRICS))
    if values.generalisation:
        result["generalisation"] = split.generalisation()
    print(f"{values.model} on {split.name}: {len(split.embeddings):,} images of {split.num_classes:,} classes")
    print_metrics(result)
    return result


def _write(path: str, result: dict[str, Any]) -> None:
    write_json(Path(path), result)
    print(json.dumps({"written": path}))


def _checked_ks(values: Flags) -> tuple[int, ...]:
    """Check the flags before anything is loaded, and returns the K of `--ks`."""
    if values.compare and values.model:
        raise UserError("--compare takes the place of --model: name one of them")
    if not values.compare and not values.model:
        raise UserError("--model is missing")
    if is_gallery(values.model):
        raise UserError("--model is the address of a gallery in a database, and no model: see tfdml search --gallery")
    for name in ("metrics", "ks", "compare"):
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
    if values.target:
        target_of(values.target)
    if values.metrics:
        requested(ks, values.metrics, METRICS)
        if values.after and (ranked := [name for name in values.metrics if name in WHOLE_RANKING_METRICS]):
            raise UserError(
                f"--metrics={ranked[0]} ranks the whole gallery, which --after does not: name map@r or map@K"
            )
    return ks


def _compare_runs(values: Flags) -> None:
    """Print how runs compare with the first, and write the page; with `--dataset`, embed its images by each run.

    Raises:
        UserError: As `write_comparison`, or a file cannot be written.
    """
    folders, report, distance = values.compare, values.report, values.distance
    runs = read_runs(folders)
    dataset, embeddings = None, None
    if values.dataset or values.features:
        dataset = model_flags.chosen_data(values, "").load(values.split)
        # Of several seeds, the first embeds the images that the page shows.
        models = [str(run.seeds[0].path if run.seeds else run.path) for run in runs]
        embeddings = [model_flags.chosen_source(values, model).embed(dataset, values.batch_size) for model in models]
    try:
        pairs = write_comparison(report or None, folders, dataset=dataset, embeddings=embeddings, distance=distance)
    except OSError as error:
        raise UserError(f"--report={report} cannot be written: {error.strerror or error}") from error
    for pair in pairs:
        if pair.refused:
            print(f"{pair.name} and {pair.reference} are not compared query by query: {pair.refused}")
        for metric in () if pair.refused else pair.classes:
            print(pair.sentence(metric))
    if values.json:
        _write(values.json, {"first": folders[0], "differences": [_as_json(pair) for pair in pairs]})
    if report:
        print(json.dumps({"written": report}))


def _as_json(pair: Paired) -> dict[str, Any]:
    if pair.refused:
        return {"run": pair.name, "refused": pair.refused}
    return {"run": pair.name, "over_classes": pair.classes, "over_seeds": pair.seeds}


def _kind(given: Mapping[str, Any]) -> str:
    """Return what is measured: `runs` (--compare), stored `embeddings`, or a `model`."""
    if given["compare"]:
        return "runs"
    return "embeddings" if holds_embeddings(given["model"]) else "model"


_RETRIEVAL = needs("task", "retrieval")
_ALONE = Effect(lambda given: not given["compare"], "--model in place of --compare")
_IMAGES = either(needs("dataset"), needs("features"), Effect(lambda given: _kind(given) == "model", "a model"))
_EMBEDDING = Effect(
    lambda given: _kind(given) == "model" or bool(given["compare"] and (given["dataset"] or given["features"])),
    "a model that embeds images as --model, or --compare with --dataset",
)
COMMAND = Command(
    "evaluate",
    evaluate,
    FLAGS,
    USAGE,
    effects={
        **model_flags.EFFECTS,
        **dict.fromkeys(("data_dir", "dataset_options", "bad_images"), _IMAGES),
        **dict.fromkeys(("batch_size", "truncate_dim"), _EMBEDDING),
        "report": needs("task", "retrieval", "verification"),
        "features": Effect(lambda given: _kind(given) != "embeddings", "a head as --model"),
        **dict.fromkeys(("split", "distance"), either(_ALONE, needs("dataset"), needs("features"))),
        **dict.fromkeys(("metrics", "ks", "intervals", "generalisation", "after", "cluster"), both(_ALONE, _RETRIEVAL)),
        "workers": needs("cluster"),
        "task": _ALONE,
        "target": needs("task", "verification"),
        "neighbors": needs("task", "classification"),
    },
)
