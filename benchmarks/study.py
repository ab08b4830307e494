r"""What the five methods gain over their bases, by equal effort, on stored feature maps:
`study_plan.md` is the plan.

    python -m benchmarks.study --features=features --data=DATA \
        --weights=MNV2_100.weights.h5    stores the maps
    python -m benchmarks.study --features=features --results=study.json \
        --part=trials    chooses the parameters
    python -m benchmarks.study --features=features --results=study.json \
        --part=finals    ten paired seeds
    python -m benchmarks.study --features=features --results=study.json \
        --part=checks    the checks of causes
    python -m benchmarks.study --results=study.json \
        --json=docs/numbers/study.json    the tables so far

`curves`, `rates` and `offsets` of benchmarks/results/study.json are earlier runs, on held-out
classes. Each run adds its entry to --results when it ends. The same command resumes: it skips the
runs that are there.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import time

import keras
import numpy as np
import tensorflow as tf

import tfdml
from tfdml.data import EvaluationTransform
from tfdml.data.sampling import ClassBalancedSampler
from tfdml.evaluation import retrieval_per_query, student_interval
from tfdml.io.files import write_whole
from tfdml.training.optimizers import build_optimizer
from tools.numbers import Results, command_line

METRICS = ("recall@1", "map@r")
# The size of the images of a data set, and one of how many classes is taken.
SETS = {"cars196": (160, 1), "glyphs": (96, 1), "omniglot": (96, 4)}
TRIALS, CHANNELS = 8, 256
# Of the adapter and the projection, and of the weights of objectives.
RATE, OBJECTIVE_RATE = 2e-3, 1e-2
CHECKPOINTS = (125, 250, 500, 1000)
SEEDS = range(100, 110)
METRIC_COLUMNS = ("Recall@1", "MAP@R")
COLUMNS = ("Recall@1", "gain", "gain in MAP@R", "gain at the chosen update")


@dataclasses.dataclass(frozen=True)
class Row:
    """A method or a base.

    Args:
        objectives: The sum of its terms, with a field for each parameter.
        space: The range of each parameter, drawn evenly on a logarithmic scale; or its values.
        base: The row that it is compared with; empty for a base.
        term: The name of the term that it adds to its base, whose parameters are its own too.
    """

    objectives: str
    space: dict[str, tuple]
    base: str = ""
    term: str = ""


CONTRASTIVE = "contrastive(margin={margin}, distance=sqeuclidean, reduction=sum)"
AM_SOFTMAX = "am_softmax(scale={scale}, margin={margin})"
HORDE = f"{{weight}} * horde(loss={CONTRASTIVE}, orders=3, dim=128)"
DENSITY = "{weight} * density(normalize_reference=true)"
FORMS = ("log, representation=embedding", "log_of_mean, representation=projection")
BOUNDARY = {"alpha": (0.05, 0.4), "beta": (0.5, 1.2)}
ROWS = {
    "AMSoftmax": Row(AM_SOFTMAX, {"scale": (8, 32), "margin": (0.02, 0.3)}),
    "JRD": Row(f"{AM_SOFTMAX} + {{weight}} * jrs", {"weight": (0.1, 100)}, "AMSoftmax", "jrs"),
    "contrastive": Row(CONTRASTIVE, {"margin": (0.3, 1.2)}),
    "HORDE": Row(f"{CONTRASTIVE} + {HORDE}", {"weight": (0.1, 10)}, "contrastive", "horde"),
    "ECAML": Row(
        f"{CONTRASTIVE} + {{weight}} * ecaml(form={{form}})",
        {"weight": (0.3, 300), "form": FORMS},
        "contrastive",
        "ecaml",
    ),
    "DML-DA": Row(f"{CONTRASTIVE} + {DENSITY}", {"weight": (10, 10000)}, "contrastive", "density"),
    "margin": Row("margin(alpha={alpha}, beta={beta})", BOUNDARY),
    "RankMI": Row(
        "rank_mi(margin={alpha}, initial_beta={beta}, negatives={negatives}, hidden=64)",
        {**BOUNDARY, "negatives": ("distance_weighted", "all")},
        "margin",
    ),
}


# Of the checks alone.
CHECKED = {"margin, learned": Row("learned_margin(alpha={alpha}, beta={beta})", BOUNDARY)}
# What a check is compared with in the final runs.
PAIRS = {"AMSoftmax": "JRD", "RankMI": "margin", "margin, learned": "contrastive"}


def draws(name, block=0):
    """Return `TRIALS` draws of a row's own parameters: one in each of as many equal parts of every
    range."""
    drawn = {}
    for key, values in (ROWS | CHECKED)[name].space.items():
        generator = np.random.default_rng([*f"{name} {key}".encode(), *([block] if block else [])])
        places = (generator.permutation(TRIALS) + generator.random(TRIALS)) / TRIALS
        if isinstance(values[0], str):
            drawn[key] = [values[int(place * len(values))] for place in places]
        else:
            low, high = values
            drawn[key] = [float(f"{low * (high / low) ** place:.3g}") for place in places]
    return [dict(zip(drawn, values, strict=True)) for values in zip(*drawn.values(), strict=True)]


def trials(name, entries):
    """Return the parameters of each trial: a method's are the best of its base's first trials, and
    draws of its own."""
    base = ROWS[name].base
    if not ROWS[name].term:
        return draws(name) + (
            draws(name, 1) if any(row.term and row.base == name for row in ROWS.values()) else []
        )
    first = [entry for entry in entries[base] if entry["parameters"] in draws(base)]
    return [best(first)["parameters"] | own for own in draws(name)]


def quadrants_of(backbone, size, weights):
    """Return the view of a network, and the function from pixels to means of the four overlapping
    quadrants of a map.

    Args:
        backbone: The name of the network.
        size: Of its images.
        weights: The file of its weights.
    """
    backbone = tfdml.backbones.resolve(backbone, size, str(weights))
    embedder = tfdml.models.Embedder(backbone, embedding_dim=0, image_size=size)
    inputs = keras.Input((size, size, 3))
    network = keras.Model(inputs, embedder.represent(inputs)["feature_map"])
    half = -(-network.output_shape[1] // 2)

    def quadrants(pixels):
        whole = np.asarray(network(pixels, training=False))
        rows = np.stack([whole[:, :half].mean(1), whole[:, -half:].mean(1)], 1)
        return np.stack([rows[:, :, :half].mean(2), rows[:, :, -half:].mean(2)], 2).astype(
            "float16"
        )

    return EvaluationTransform.of(embedder), quadrants


def store(path, splits, view, array_of):
    """Write the arrays and labels of `train` and of `test`, unless they are there.

    Args:
        path: The file.
        splits: Returns the images of a split.
        view: How they are seen.
        array_of: From pixels to what is written.
    """
    if path.exists():
        return
    stored = {}
    for split in ("train", "test"):
        images = splits(split)
        batches = tfdml.data.evaluation_batches(images, view, 50)
        stored |= {split: np.concatenate([array_of(pixels) for pixels, _ in batches])}
        stored |= {f"{split}_labels": images.labels}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **stored)


def part_of_set(name, place, split, every=1):
    """Return the images of a split of a data set, or of one of so many of its classes."""
    images = tfdml.data.load(name, None if name == "glyphs" else str(place), split)
    return images.select_classes(images.classes[::every])


def load(path, held_out):
    """Return the arrays and labels that are trained on, and those that are measured.

    Args:
        path: The file of `store`.
        held_out: Whether every fourth training class is measured in place of the unseen ones, and
            not trained on.
    """
    with np.load(path) as stored:
        parts = {name: stored[name] for name in stored.files}
    train, labels = parts["train"], np.unique(parts["train_labels"], return_inverse=True)[1]
    if not held_out:
        return train, labels, parts["test"], parts["test_labels"]
    apart = labels % 4 == 3
    return (
        train[~apart],
        np.unique(labels[~apart], return_inverse=True)[1],
        train[apart],
        labels[apart],
    )


def load_maps(path, held_out):
    """Return what `load` does, of maps, in their principal components: a sixth of the
    arithmetic."""
    train, labels, measured, its_labels = load(path, held_out)
    train, measured = train.astype("float32"), measured.astype("float32")
    rows = train.reshape(-1, train.shape[-1])
    mean = rows.mean(0)
    axes = np.linalg.eigh((rows - mean).T @ (rows - mean))[1][:, : -CHANNELS - 1 : -1]
    return (train - mean) @ axes, labels, (measured - mean) @ axes, its_labels


class MapEmbedder(tfdml.models.Embedder):
    """Stored maps to embeddings: x + U relu(V x) at each position, their mean, and a projection. U
    starts at 0."""

    def __init__(self, embedding_dim=64, size=2):
        inputs = keras.Input((size, size, CHANNELS))
        hidden = keras.layers.Dense(64, activation="relu")(inputs)
        change = keras.layers.Dense(CHANNELS, kernel_initializer="zeros")(hidden)
        super().__init__(
            keras.Model(inputs, keras.layers.Add()([inputs, change])),
            embedding_dim,
            image_size=size,
            scaling="none",
        )

    @property
    def view_shape(self):
        """The shape of a map."""
        return (self.image_size, self.image_size, CHANNELS)


def learner_of(maps, row, parameters, seed):
    """Return a compiled learner with the first weights of a seed."""
    keras.utils.set_random_seed(seed)
    objectives = row.objectives.format(**parameters)
    embedder = MapEmbedder(size=maps[0].shape[1])
    learner = tfdml.models.MetricLearner(embedder, objectives, num_classes=maps[1].max() + 1)
    learner.compile(
        build_optimizer("adam", learner, RATE, {"objectives": OBJECTIVE_RATE}, weight_decay=1e-4)
    )
    return learner


def adapted(learner, maps):
    """Return a learner that has measured the densities of the training classes, on the centers of
    images."""
    train, labels, size = *maps[:2], maps[2].shape[1]
    edge = (train.shape[1] - size) // 2
    train = train[:, edge : edge + size, edge : edge + size]
    learner.adapt(
        (train[rows : rows + 500], labels[rows : rows + 500]) for rows in range(0, len(train), 500)
    )
    return learner


def mean_metrics(vectors, labels):
    """Return `METRICS` of embeddings, by name."""
    values = retrieval_per_query(vectors, labels, metrics=METRICS)
    return {metric: float(of_queries.mean()) for metric, of_queries in values.items()}


def courses(maps, row, trials, seeds, checkpoints, measure=mean_metrics):
    """Train a head with each of the parameters and seeds; yield both, and its metrics and logs
    after some updates.

    Args:
        maps: As of `load_maps`.
        row: The method or base.
        trials: Its parameters, which differ in their weight alone.
        seeds: Of the first weights and the batches.
        checkpoints: After how many updates it is measured, ascending; the last is the length.
        measure: From embeddings and their labels to measures by name.
    """
    keras.backend.clear_session()
    train, labels, measured, its_labels = maps
    x, y = tf.constant(train), tf.constant(labels, "int32")
    learner = adapted(learner_of(maps, row, trials[0], seeds[0]), maps)
    weight = tf.Variable(1.0)
    for objective in learner.objectives:
        if objective.name == row.term:
            objective.weight = weight
    state = [variable.numpy() for variable in learner.optimizer.variables]
    keys = ["loss", "d_pos", "d_neg", *learner.observation_trackers]

    @tf.function(autograph=False)
    def updates(batches):
        def update(rows):
            logs = learner.train_step((tf.gather(x, rows), tf.gather(y, rows)))
            return tf.stack([tf.cast(logs[key], "float32") for key in keys])

        return tf.map_fn(update, batches, fn_output_signature=tf.float32)[-1]

    for parameters, seed in itertools.product(trials, seeds):
        # The graph of the step serves all: each begins from the weights of a learner of its own.
        weight.assign(parameters.get("weight", 1.0))
        fresh = adapted(learner_of(maps, row, parameters, seed), maps)
        for variable, other in zip(learner.variables, fresh.variables, strict=True):
            variable.assign(other)
        for variable, value in zip(learner.optimizer.variables, state, strict=True):
            variable.assign(value)
        sampler = ClassBalancedSampler(labels, 10, 5, seed=seed)
        course, done = {}, 0
        for until in checkpoints:
            learner.reset_metrics()
            for start in range(done, until, 125):
                steps = range(start, min(start + 125, until))
                rows = np.stack([sampler.batch(step) for step in steps])
                logs = dict(zip(keys, updates(rows).numpy(), strict=True))
            done = until
            vectors = learner.embedder.predict(measured, batch_size=2000, verbose=0)
            # A run that diverges has nothing.
            values = dict.fromkeys(METRICS, 0.0)
            if np.isfinite(vectors).all():
                values = measure(vectors, its_labels)
            values = {**values, **logs}
            course[str(until)] = {key: float(f"{value:.4g}") for key, value in values.items()}
        yield parameters, seed, course


def best(entries):
    """Return the trial with the best MAP@R on the held-out classes after its last update."""
    return max(entries, key=lambda entry: list(entry["course"].values())[-1]["map@r"])


def run(arguments, results):
    """Train what is missing of a part, data set after data set."""
    part = arguments.part
    for dataset in arguments.only or SETS:
        maps = load_maps(arguments.features / f"{dataset}.npz", held_out=part == "trials")
        for name in ROWS:
            if part == "trials":
                runs = trials(name, results.get(part, {}).get(dataset, {})), [0], CHECKPOINTS
            else:
                chosen = best(results["trials"][dataset][name])
                early = max(chosen["course"], key=lambda until: chosen["course"][until]["map@r"])
                runs = [chosen["parameters"]], SEEDS, sorted({int(early), CHECKPOINTS[-1]})
            train_missing(
                results, arguments.results, (part, dataset, name), maps, ROWS[name], *runs
            )


def train_missing(
    results, path, place, maps, row, wanted, seeds, checkpoints, measure=mean_metrics
):
    """Train the runs that are not among the results, print each, and write it when it has joined
    them.

    Args:
        results: The runs so far.
        path: The file of the results.
        place: The part, the data set and the name of the row.
        wanted: The parameters, each with all seeds.
        maps, row, seeds, checkpoints, measure: As of `courses`.
    """
    entries = results.setdefault(place[0], {}).setdefault(place[1], {}).setdefault(place[2], [])
    groups = {}
    for parameters in wanted:
        same = "weight" if row.term else ""
        groups.setdefault(str({**parameters, same: 0}), []).append(parameters)
    for group in groups.values():
        done = [(entry["parameters"], entry["seed"]) for entry in entries]
        seeds_left = [
            seed for seed in seeds if any((parameters, seed) not in done for parameters in group)
        ]
        left = [
            parameters
            for parameters in group
            if any((parameters, seed) not in done for seed in seeds)
        ]
        start = time.process_time()
        for parameters, seed, course in (
            courses(maps, row, left, seeds_left, checkpoints, measure) if left else ()
        ):
            seconds, start = round(time.process_time() - start, 1), time.process_time()
            entries.append(
                {"parameters": parameters, "seed": seed, "course": course, "cpu_seconds": seconds}
            )
            write_results(results, path)
            metrics = " ".join(f"{at['recall@1']:.3f}/{at['map@r']:.3f}" for at in course.values())
            print(*place[1:], parameters, f"seed {seed}: {metrics}", flush=True)


def check(arguments, results):
    """Train what is missing of the checks of causes: those that the plan names."""
    chosen = {
        dataset: {name: best(of)["parameters"] for name, of in by_row.items()}
        for dataset, by_row in results["trials"].items()
    }
    learned, path = "margin, learned", arguments.results
    maps = load_maps(arguments.features / "cars196.npz", held_out=True)
    place = "trials", "cars196", learned
    train_missing(results, path, place, maps, CHECKED[learned], draws(learned), [0], CHECKPOINTS)
    runs = [
        (
            "cars196",
            "AMSoftmax",
            [{key: chosen["cars196"]["JRD"][key] for key in ("scale", "margin")}],
        ),
        ("cars196", learned, [best(results["trials"]["cars196"][learned])["parameters"]]),
    ]
    for dataset in ("glyphs", "omniglot"):
        near = [
            {**chosen[dataset]["margin"], "negatives": negatives}
            for negatives in ("all", "distance_weighted")
        ]
        runs.append((dataset, "RankMI", near))
    for dataset, name, wanted in runs:
        maps, row = (
            load_maps(arguments.features / f"{dataset}.npz", held_out=False),
            (ROWS | CHECKED)[name],
        )
        train_missing(
            results, path, ("checks", dataset, name), maps, row, wanted, SEEDS[:3], CHECKPOINTS[-1:]
        )


def paired(entries, base, metric, last):
    """Return the metric of a row and of its base in percent, seed by seed; after the last update,
    or the chosen one."""

    def by_seed(runs):
        ends = {run["seed"]: list(run["course"].values())[-1 if last else 0] for run in runs}
        return {seed: 100 * end[metric] for seed, end in ends.items()}

    own, other = by_seed(entries), by_seed(base)
    seeds = sorted(own.keys() & other.keys())
    return [np.array([side[seed] for seed in seeds]) for side in (own, other)]


def with_interval(values):
    """Return the mean of gains in points, with Student's interval where there are several; empty
    without any."""
    return f"{points(values)} ({interval(values)})" if len(values) > 1 else points(values)


def points(values):
    """Return the mean of gains in points, in print; empty without any."""
    return f"{np.mean(values):+.1f}" if len(values) else ""


def interval(values):
    """Return Student's interval of gains in points, in print; empty without several."""
    if len(values) < 2:
        return ""
    ends = student_interval(np.asarray(values))
    return f"{ends.low:+.1f} to {ends.high:+.1f}"


def tables(results, add_table):
    """Write the tables of gains and of the best trials."""
    add = add_table("gains", "method, data set", *COLUMNS)
    finals = results.get("finals", {})
    for name, dataset in (
        (name, dataset) for name, row in ROWS.items() if row.base for dataset in finals
    ):
        base = ROWS[name].base
        sides = [finals[dataset].get(side, []) for side in (name, base)]
        pairs = [paired(*sides, metric, last) for last in (True, False) for metric in METRICS]
        if len(pairs[0][0]):
            own = pairs[0][0].mean()
            add(
                f"{name}, {dataset}",
                f"{own:.1f}",
                *(with_interval(own - other) for own, other in pairs[:3]),
            )
    columns = [(part, dataset) for part in ("trials", "rates") for dataset in results.get(part, ())]
    add = add_table(
        "trials", "best MAP@R of the trials", *(f"{part}, {dataset}" for part, dataset in columns)
    )
    for name in ROWS:
        entries = [results[part][dataset].get(name) for part, dataset in columns]
        add(
            name,
            *(
                f"{100 * list(best(of)['course'].values())[-1]['map@r']:.1f}" if of else ""
                for of in entries
            ),
        )


def course_tables(results, add_table):
    """Write the tables of what was logged along runs on held-out classes of Cars-196, and of the
    checks."""
    trials = results.get("trials", {}).get("cars196", {})
    if {"DML-DA", "RankMI"} <= trials.keys():
        runs = {f"{entry['parameters']['weight']:g}": entry for entry in trials["DML-DA"]}
        logged(
            add_table("density", "weight", *METRIC_COLUMNS, "D_c", "target"),
            runs,
            "density_d_avg",
            "density_target",
        )
        runs = {}
        for entry in trials["RankMI"]:
            negatives = entry["parameters"]["negatives"]
            runs[negatives] = best([entry, runs.get(negatives, entry)])
        logged(add_table("rankmi", "negatives", *METRIC_COLUMNS, "beta"), runs, "rank_mi_beta")
    if offsets := results.get("offsets"):
        runs = {}
        for entry in offsets["cars196"]["ECAML, offset"]:
            weight, offset = (entry["parameters"][key] for key in ("weight", "offset"))
            runs[f"{weight:g}" + (f", offset {offset}" if offset else "")] = entry
        logged(add_table("energy", "weight", *METRIC_COLUMNS, "energy"), runs, "ecaml_energy")
    if checks := results.get("checks"):
        add = add_table(
            "checks", "data set, row", "pair", *METRIC_COLUMNS, "gain", "gain in MAP@R", "seeds"
        )
        for dataset, name in ((dataset, name) for dataset, rows in checks.items() for name in rows):
            pair, groups = PAIRS[name], {}
            for entry in checks[dataset][name]:
                groups.setdefault(entry["parameters"].get("negatives", ""), []).append(entry)
            for negatives, entries in groups.items():
                sides = [
                    paired(entries, results["finals"][dataset][pair], metric, True)
                    for metric in METRICS
                ]
                means = [f"{own.mean():.1f}" for own, _ in sides]
                gains = [with_interval(own - other) for own, other in sides]
                add(
                    ", ".join(filter(None, (dataset, name, negatives))),
                    pair,
                    *means,
                    *gains,
                    len(entries),
                )


def logged(add, runs, *names):
    """Add a row for each run: its metrics after the last update, and values at the first and last
    checkpoint."""
    for label, entry in runs.items():
        first, *_, last = entry["course"].values()
        metrics = (f"{100 * last[metric]:.1f}" for metric in METRICS)
        add(label, *metrics, *(f"{first[name]:.3g} to {last[name]:.3g}" for name in names))


def write_results(values, path):
    """Write the results so far atomically."""
    write_whole(str(path), (json.dumps(values, separators=(",", ":")) + "\n").encode())


def main():
    """Store maps, train what is missing, or print the tables."""
    parser = command_line(__doc__)
    parser.add_argument("--results", type=pathlib.Path, help="the JSON file")
    parser.add_argument("--features", type=pathlib.Path, help="the folder of the stored maps")
    parser.add_argument(
        "--data", type=pathlib.Path, help="the folder of the data sets: stores their maps"
    )
    parser.add_argument("--weights", default="", help="of MobileNetV2 1.0")
    parser.add_argument("--part", choices=("trials", "finals", "checks"))
    parser.add_argument("--only", nargs="*", choices=SETS, default=[], help="data sets")
    arguments = parser.parse_args()
    if arguments.data:
        for name, (size, every) in SETS.items():
            splits = functools.partial(part_of_set, name, arguments.data / name, every=every)
            store(
                arguments.features / f"{name}.npz",
                splits,
                *quadrants_of("mobilenetv2", size, arguments.weights),
            )
        return
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    if arguments.part == "checks":
        check(arguments, results)
    elif arguments.part:
        run(arguments, results)
    add_table = Results(arguments.json).table
    tables(results, add_table)
    course_tables(results, add_table)


if __name__ == "__main__":
    main()
