"""The five methods as heads on stored features, on the data sets of `benchmarks.defaults`, over several seeds.

    python -m benchmarks.head_study --features=features --sets=sets --weights=MNV2_100.weights.h5    makes the features
    python -m benchmarks.head_study --features=features --results=heads.json --seeds=5               trains, resumes
    python -m benchmarks.head_study --results=heads.json --plot=heads.png --json=docs/numbers/head_study.json

Features are the last map of MobileNetV2 1.0 from ImageNet weights at 224 px, averaged over the four quadrants of the
image, which share their middle row and column. A head is a residual adapter of rank 32, by which a method can change
the features that HORDE takes its moments of, and a projection of the mean of the four to 128 dimensions. Each method
and its base have the same first weights and the same batches of 10 classes of 5 images, Adam, and its rates: 1e-3 for
the head, 1e-2 for the objective, falling to zero as a cosine. --updates is the number of steps of the head: 8,000 as
in the papers of JRD (50 epochs of Cars-196 in batches of 50) and HORDE (40 epochs of 200 batches of 40). Nothing is
chosen: the last step counts, and the unseen classes are also measured on the way.
"""

import dataclasses
import json
import pathlib

import numpy as np

from benchmarks.defaults import METRICS, SETS, with_interval
from benchmarks.study import write_results
from benchmarks.study_rows import AM_SOFTMAX, CONTRASTIVE, SHARES, TERMS
from tfdml.data.sampling import ClassBalancedSampler
from tfdml.evaluation import student_interval
from tools.numbers import Results, command_line

# Updates after which the unseen classes are measured too.
ON_THE_WAY = (125, 500, 2000)


@dataclasses.dataclass(frozen=True)
class Head:
    """A row: what is minimized, and the row it is compared with."""

    objectives: str
    base: str = ""


# Moments of 128 dimensions, a half of the study's, for two cores.
METHODS = {**TERMS, "HORDE": "{} * horde(loss=contrastive, orders=3, dim=128)"}
HEADS = {
    "AMSoftmax": Head(AM_SOFTMAX),
    "+ JRS": Head(f"{AM_SOFTMAX} + jrs", "AMSoftmax"),
    "contrastive": Head(CONTRASTIVE),
    **{
        name: Head(f"{CONTRASTIVE} + {METHODS[name[2:]].format(f'auto(share={share})')}", "contrastive")
        for name, share in SHARES.items()
    },
    "margin": Head("margin(beta=0.6)"),
    "RankMI": Head("rank_mi(initial_beta=0.9)", "margin"),
}


def write_features(arguments):
    """Write `<features>/<data set>.npz` for each data set that has none yet."""
    import keras
    import tensorflow as tf

    import tfdml

    backbone = tfdml.backbones.resolve("mobilenetv2", 224, str(arguments.weights))
    scaling = tfdml.models.Embedder(backbone, embedding_dim=0, image_size=224)
    view = tfdml.data.EvaluationTransform.of(scaling)
    inputs = keras.Input((224, 224, 3))
    features = keras.Model(inputs, scaling.represent(inputs)["feature_map"])

    def quadrants(images):
        maps = features.predict_on_batch(images)
        size = -(-maps.shape[1] // 2)
        rows = np.stack([maps[:, :size].mean(1), maps[:, -size:].mean(1)], 1)
        return np.stack([rows[:, :, :size].mean(2), rows[:, :, -size:].mean(2)], 2)

    for dataset, words in SETS.items():
        path = arguments.features / f"{dataset}.npz"
        if path.exists() or (arguments.only and dataset not in arguments.only):
            continue
        name, place = words[0].partition("=")[2], str(arguments.sets / dataset)
        found = {}
        for split in ("train", "test"):
            images = tfdml.data.load(name, None if dataset == "glyphs" else place, split)
            batches = tfdml.data.evaluation_batches(images, view, 50)
            maps = [quadrants(images) for images, _ in batches.prefetch(tf.data.AUTOTUNE)]
            found[split] = np.concatenate(maps, 0).astype("float16")
            found[f"{split}_labels"] = images.labels
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **found)
        print(f"{dataset}: {len(found['train']):,} and {len(found['test']):,} images", flush=True)


def train(data, objectives, seed, updates):
    """Train a head; the metrics on the unseen classes by the number of updates so far, from 0 on."""
    import keras
    import tensorflow as tf

    from benchmarks.learners import Adapter, FeatureEmbedder
    from tfdml.callbacks import AutoWeights
    from tfdml.evaluation import retrieval_per_query
    from tfdml.models import MetricLearner
    from tfdml.training.optimizers import build_optimizer
    from tfdml.training.terms import build_objectives

    x, labels = tf.constant(data["train"], "float32"), np.unique(data["train_labels"], return_inverse=True)[1]
    unseen, unseen_labels = data["test"].astype("float32"), data["test_labels"]
    num_classes = labels.max() + 1
    keras.utils.set_random_seed(seed)
    embedder = FeatureEmbedder(x.shape[1:], 128, Adapter(32))
    learner = MetricLearner(embedder, build_objectives(objectives, num_classes))
    learner.build((None, *x.shape[1:]))
    # RankMI has a step of its statistics after each of the projection.
    per_update = 2 if learner.statistics_variables else 1
    sampler = ClassBalancedSampler(labels, min(10, num_classes), 5, seed=seed)
    schedule = keras.optimizers.schedules.CosineDecay(1e-3, updates)
    optimizer = build_optimizer("adam", learner, schedule, {"objectives": 1e-2}, weight_decay=1e-4)
    # Several steps at once take less time. Weights that are measured and RankMI need single ones.
    learner.compile(optimizer, steps_per_execution=1 if learner.auto_weights or per_update == 2 else 25)

    def batches(first, until):
        # The batches of the statistics are others, so those of the projection are the same for every head.
        steps = range(first * per_update, until * per_update)
        rows = [sampler.batch(step // per_update + step % per_update * updates) for step in steps]
        return tf.data.Dataset.from_tensor_slices(rows).map(lambda one: (tf.gather(x, one), tf.gather(labels, one)))

    def measure():
        found = retrieval_per_query(
            embedder.predict(unseen, batch_size=1000, verbose=0), unseen_labels, metrics=METRICS
        )
        return {name: round(float(values.mean()), 6) for name, values in found.items()}

    # Without crops an image has the same features in every pass: one pass gives the densities of the classes.
    learner.calibrate((x[rows : rows + 500], labels[rows : rows + 500]) for rows in range(0, len(x), 500))
    course, done = {0: measure()}, 0
    for until in sorted({*(n for n in ON_THE_WAY if n < updates), updates}):
        measuring = learner.auto_weights is not None and not learner.auto_weights.done
        learner.fit(batches(done, until), verbose=0, callbacks=[AutoWeights()] if measuring else [])
        course[until], done = measure(), until
        if measuring and learner.auto_weights.done:
            learner.compile(optimizer, steps_per_execution=25)
    return course


def reached(runs, dataset, head, metric="recall@1", after=None):
    """Seed to what a head reached in percent, at its last update or after so many, where a run was measured then."""
    own = (run for run in runs if (run["dataset"], run["head"]) == (dataset, head))
    measured = {run["seed"]: run["course"].get(str(run["updates"] if after is None else after)) for run in own}
    return {seed: 100 * metrics[metric] for seed, metrics in measured.items() if metrics}


def paired(runs, dataset, head, metric="recall@1", after=None):
    """The gains of a head over its base in points, seed by seed."""
    own, base = (reached(runs, dataset, name, metric, after) for name in (head, HEADS[head].base))
    return [own[seed] - base[seed] for seed in sorted(own.keys() & base.keys())]


def tables(runs, results):
    """Print and write what each head reaches, and what each method gains."""
    datasets = [dataset for dataset in SETS if any(run["dataset"] == dataset for run in runs)]
    add = results.table("recalls", "Recall@1", *datasets)
    untrained = {
        dataset: [100 * run["course"]["0"]["recall@1"] for run in runs if run["dataset"] == dataset]
        for dataset in datasets
    }
    add("untrained", *(f"{np.mean(untrained[dataset]):.1f}" for dataset in datasets))
    for head in HEADS:
        found = [list(reached(runs, dataset, head).values()) for dataset in datasets]
        if any(found):
            add(head, *(f"{np.mean(values):.1f}" if values else "" for values in found))
    add = results.table("gains", "method", "base", *datasets, "mean, 95 % over data sets", "in MAP@R", "seeds")
    for head in HEADS:
        found = {dataset: gains for dataset in datasets if (gains := paired(runs, dataset, head))}
        if not found:
            continue
        precision = [np.mean(paired(runs, dataset, head, "map@r")) for dataset in found]
        cells = [with_interval(found.get(dataset, [])) for dataset in datasets]
        mean = with_interval([np.mean(gains) for gains in found.values()])
        counts = sorted({len(gains) for gains in found.values()})
        seeds = " to ".join(str(count) for count in (counts[0], counts[-1])[: len(counts)])
        add(head, HEADS[head].base, *cells, mean, f"{np.mean(precision):+.1f}", seeds)
    steps = sorted({int(step) for run in runs for step in run["course"]})
    add = results.table("course", "mean Recall@1 (and gain) after", *(f"{step:,} updates" for step in steps))

    def mean(by_dataset):
        """Over the data sets, of the means over seeds; NaN where a data set has none."""
        return np.mean([np.mean(values) if values else np.nan for values in by_dataset])

    for head in HEADS:
        cells = []
        for step in steps:
            value = mean([*reached(runs, dataset, head, after=step).values()] for dataset in datasets)
            base = HEADS[head].base
            gain = mean(paired(runs, dataset, head, after=step) for dataset in datasets) if base else np.nan
            cell = "" if np.isnan(value) else f"{value:.1f}"
            cells.append(cell if np.isnan(gain) else f"{cell} ({gain:+.1f})")
        if any(cells):
            add(head, *cells)


def draw(runs, path):
    """The gain of each method on each data set as a PNG: the mean over seeds with its interval, and each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    methods = [head for head in HEADS if HEADS[head].base]
    datasets = [dataset for dataset in SETS if any(run["dataset"] == dataset for run in runs)]
    figure, axes = pyplot.subplots(1, len(methods), figsize=(2.4 * len(methods), 1 + 0.35 * len(datasets)), sharey=True)
    for method, axis in zip(methods, axes, strict=True):
        for place, dataset in enumerate(reversed(datasets)):
            gains = paired(runs, dataset, method)
            if len(gains) > 1:
                interval = student_interval(gains)
                axis.plot([interval.low, interval.high], [place] * 2, color="tab:blue", lw=2)
            if gains:
                axis.plot(np.mean(gains), place, "o", color="tab:blue", ms=5)
            axis.plot(gains, [place] * len(gains), "|", color="black", ms=8)
        axis.axvline(0, color="gray", lw=1)
        axis.grid(axis="x", alpha=0.3)
        axis.set_title(f"{method}\nover {HEADS[method].base}", fontsize=9)
    axes[0].set_yticks(range(len(datasets)), list(reversed(datasets)))
    figure.supxlabel("gain in Recall@1 on unseen classes, points: mean, 95 % over seeds; strokes: seeds", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main():
    """Make the features, or train what is missing; then print the tables."""
    parser = command_line(__doc__)
    parser.add_argument("--features", type=pathlib.Path, help="the folder of the features")
    parser.add_argument("--sets", type=pathlib.Path, help="the folder of the data sets, where features are made")
    parser.add_argument("--weights", type=pathlib.Path, help="of MobileNetV2 1.0: a .weights.h5 file")
    parser.add_argument("--results", type=pathlib.Path, help="the JSON file of the runs")
    parser.add_argument("--only", nargs="*", default=[], help="names of data sets, of heads, or of both")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=8000)
    parser.add_argument("--plot", type=pathlib.Path, help="a PNG of the gains")
    arguments = parser.parse_args()
    if unknown := set(arguments.only) - {*SETS, *HEADS}:
        parser.error(f"--only: unknown {sorted(unknown)}")
    if arguments.sets:
        return write_features(arguments)
    if not arguments.results:
        parser.error("--results: name the JSON file of the runs, or --sets and --weights to make the features")
    runs = json.loads(arguments.results.read_text())["runs"] if arguments.results.exists() else []
    if arguments.features:
        datasets, heads = ([name for name in names if name in arguments.only] or names for names in (SETS, HEADS))
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            for dataset in (name for name in datasets if (arguments.features / f"{name}.npz").exists()):
                stored = np.load(arguments.features / f"{dataset}.npz")
                data = {name: stored[name] for name in stored.files}
                for head in heads:
                    objectives = HEADS[head].objectives
                    about = {"dataset": dataset, "head": head, "seed": seed, "updates": arguments.updates}
                    about["objectives"] = objectives
                    if any(about.items() <= run.items() for run in runs):
                        continue
                    course = train(data, objectives, seed, arguments.updates)
                    runs.append({**about, "course": {str(step): found for step, found in course.items()}})
                    write_results({"runs": runs}, arguments.results)
                    reached = " ".join(f"{100 * found['recall@1']:.1f}" for found in course.values())
                    print(f"{dataset}, {head}, seed {seed}: {reached}", flush=True)
    tables(runs, Results(arguments.json))
    if arguments.plot:
        draw(runs, arguments.plot)


if __name__ == "__main__":
    main()
