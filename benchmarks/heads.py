"""Heads on stored vectors: their time next to PyTorch with pytorch-metric-learning, and a table of every objective.

    python -m benchmarks.heads                                              100,000 x 768 vectors, 20 epochs
    python -m benchmarks.heads --torch_python=PYTHON --rounds=3             where PyTorch is installed
    python -m benchmarks.heads --table --features=cars.npz --data_dir=CARS196 --weights=MNV2.weights.h5 --json=x.json

Without --table, a linear head is trained on vectors in overlapping classes, by `tfdml.training.train` as
`tfdml train --features` runs it and by a loop in PyTorch, in turns. With --table, every objective that reads the
embedding trains a head with each seed. Recall@1 is that of the test classes; its difference to the first objective
has a 95 % interval over classes, the seeds averaged. --features is made of Cars-196 where it is not there yet: pooled
features of MobileNetV2, of length 1.
"""

import contextlib
import io
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

from tools.numbers import Results, command_line

ROOT = pathlib.Path(__file__).resolve().parents[1]
OBJECTIVES = (
    *("contrastive", "triplet", "quadruplet", "n_pair", "angular", "lifted_structure", "generalized_lifted_structure"),
    *("binomial_deviance", "margin", "multi_similarity", "circle", "tuplet_margin", "ranked_list", "histogram"),
    *("fast_ap", "smooth_ap", "recall_at_k", "nt_xent", "sup_con", "soft_nearest_neighbor", "vic_reg", "am_softmax"),
    *("arc_face", "sub_center_arc_face", "sphere_face", "sphere_face2", "curricular_face", "norm_softmax"),
    *("proxy_nca", "proxy_nca_plus_plus", "proxy_anchor", "soft_triple", "instance", "cosine_contrastive"),
    *("rank_mi", "xbm(loss=contrastive, size=1024)", "matryoshka(loss=multi_similarity, dims=[32, 64])"),
    *("am_softmax + 0.4 * jrs(levels=[pooled, embedding])", "contrastive + auto(share=0.1) * ecaml"),
    *("contrastive + auto(share=0.1) * density", "contrastive + auto(share=0.1) * gor"),
)


def write_vectors(path, count, dimension, per_class=20):
    """Vectors of `count` training rows and a tenth as many test rows in overlapping classes."""
    generator = np.random.default_rng(0)
    labels = np.arange(count + count // 10) // per_class
    centers = generator.normal(size=(labels[-1] + 1, dimension)).astype("float32")
    vectors = centers[labels] + 2 * generator.standard_normal((len(labels), dimension), "float32")
    roles = np.where(np.arange(len(labels)) < count, "train", "test")
    np.savez(path, embeddings=vectors / np.linalg.norm(vectors, axis=1, keepdims=True), labels=labels, roles=roles)


def write_features(path, data_dir, weights, size=224):
    """Pooled features of MobileNetV2 of Cars-196, training and test images."""
    import tfdml

    backbone = tfdml.backbones.resolve("mobilenetv2", size, weights)
    embedder = tfdml.models.Embedder(backbone, embedding_dim=0, image_size=size)
    view, parts = tfdml.data.EvaluationTransform.of(embedder), {}
    for split in ("train", "test"):
        images = tfdml.data.load("cars196", data_dir, split)
        vectors = tfdml.embeddings.embed(embedder, tfdml.data.evaluation_batches(images, view, 100))
        names = [os.path.relpath(name, data_dir) for name in images.names]
        parts[split] = {"embeddings": vectors, "labels": images.labels, "names": names, "roles": [split] * len(images)}
    np.savez(path, **{name: np.concatenate([part[name] for part in parts.values()]) for name in parts["train"]})


def train(features, folder, arguments, objectives, **changes):
    """Train a head quietly; the seconds of its steps, those of all, and the result."""
    from tfdml.training import Experiment
    from tfdml.training import train as run

    settings = {
        "head": arguments.head,
        "embedding_dim": arguments.dim,
        "epochs": arguments.epochs,
        "classes_per_batch": arguments.classes,
        "images_per_class": arguments.per_class,
        "learning_rate": arguments.rate,
        "evaluate_every": 0,
        "report": False,
        "watch_every": 0,
    }
    experiment = Experiment(run_dir=str(folder), features=features, objectives=objectives, **{**settings, **changes})
    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        result = run(experiment)
    return result.get("train_seconds", 0.0), time.perf_counter() - started, result


def measure(arguments):
    """Print the seconds of both sides."""
    with tempfile.TemporaryDirectory() as folder:
        path, rows = f"{folder}/vectors.npz", {"tfdml": [], "tfdml with its evaluations": [], "PyTorch": []}
        write_vectors(path, arguments.count, arguments.dimension)
        words = [path, arguments.dim, arguments.epochs, arguments.classes, arguments.per_class, arguments.rate]
        peer = [arguments.torch_python, str(ROOT / "benchmarks" / "heads_peer.py"), arguments.threads, *words]
        for number in range(arguments.rounds):
            steps, whole, _ = train(path, f"{folder}/{number}", arguments, "multi_similarity")
            rows["tfdml"].append(steps)
            rows["tfdml with its evaluations"].append(whole)
            # Its libraries may lie in the folder of the other programs, as in the tests.
            paths = [os.environ.get("PYTHONPATH", ""), f"{os.environ.get('TFDML_PEERS', '')}/site"]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            words = [str(word) for word in peer]
            done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                rows["PyTorch"].append(json.loads(done.stdout)["seconds"])
            elif number == 0:
                print(f"PyTorch: {done.stderr.strip().splitlines()[-1]}")
    row = Results(arguments.json).table("seconds", f"{arguments.count:,} vectors", "seconds")
    for name, seconds in rows.items():
        if seconds:
            row(name, f"{statistics.median(seconds):.1f}")


def tabulate(arguments):
    """Print a row for each objective."""
    from tfdml.evaluation import QueryValues, paired_differences

    if not pathlib.Path(arguments.features).exists():
        write_features(arguments.features, arguments.data_dir, arguments.weights)
    first, columns = None, ("objective", "Recall@1", "difference", "95 % interval", "seconds")
    row = Results(arguments.json).table("objectives", *columns)
    for objectives in arguments.objectives or OBJECTIVES:
        with tempfile.TemporaryDirectory() as folder:
            seconds, values = 0.0, []
            for seed in range(arguments.seeds):
                run = f"{folder}/{seed}"
                seconds += train(arguments.features, run, arguments, objectives, seed=seed)[1]
                queries = QueryValues.read(f"{run}/queries.npz")
                values.append({"recall@1": queries.values["recall@1"]})
        first = first or values
        recall = float(np.mean([np.nanmean(one["recall@1"]) for one in values]))
        interval = paired_differences(values, first, queries.labels)["recall@1"]
        ends = " to ".join(f"{100 * end:.1f}" for end in interval[1:3])
        row(f"`{objectives}`", f"{100 * recall:.1f}", f"{100 * interval[0]:+.1f}", ends, f"{seconds:.1f}")


def main():
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--table", action="store_true", help="a row for each objective")
    parser.add_argument("--features", default="cars_mobilenetv2.npz", help="of --table; see above")
    parser.add_argument("--data_dir", default="", help="Cars-196, where --features are made")
    parser.add_argument("--weights", default="imagenet", help="of MobileNetV2, where --features are made")
    parser.add_argument("--objectives", nargs="*", default=[], help="of --table; by default all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--head", default="linear")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--classes", type=int, default=64, help="classes of a batch")
    parser.add_argument("--per_class", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--count", type=int, default=100_000, help="training vectors without --table")
    parser.add_argument("--dimension", type=int, default=768, help="of the vectors without --table")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of PyTorch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--torch_python", default=sys.executable, help="Python with PyTorch")
    arguments = parser.parse_args()
    tabulate(arguments) if arguments.table else measure(arguments)


if __name__ == "__main__":
    main()
