"""The gradient of each term of a sum of objectives, compared with that of another term, on batches of a run.

    python -m benchmarks.term_gradients --run_dir=runs/cars_dmlda
    python -m benchmarks.term_gradients --run_dir=runs/cars --objectives="contrastive + 10 * density + 0.1 * ecaml"

Shows why a term has little effect, or dominates the others, before a training with another weight. Embedder and
objectives come from the run's last checkpoint; with --objectives the embedder alone does, and the terms are new.
Gradients are of the weighted terms, by the projection and by the backbone: their length divided by that of the term
--beside, and the mean cosine between the two. The default of --beside is the term with the largest gradient at the
projection (medians over the batches). A cosine below 0 means that the terms work against each other.
"""

import statistics

import keras
import numpy as np
import tensorflow as tf

from tfdml.data.pipeline import training_batches
from tfdml.embeddings.backends import load_embedder
from tfdml.training import checkpoints
from tfdml.training.build.components import calibrate, make_learner
from tfdml.training.build.images import load_splits, make_sampler, make_transforms
from tfdml.training.run_folder import RunFolder
from tfdml.training.settings import Experiment
from tools.numbers import Results, command_line

PARTS = ("projection", "backbone")


def gradients(learner, images, labels):
    """The value and the gradients by part, flat, of each weighted term on one batch."""
    variables = {name: [v for v in learner.parts()[name] if v.trainable] for name in PARTS}
    with tf.GradientTape(persistent=True) as tape:
        representations = learner(images, training=False)
        values = []
        for objective in learner.objectives:
            representations.update(objective.represent(representations, training=True))
            values.append(learner.weight_of(objective) * objective(representations, labels))
    found = []
    for value in values:
        parts = {}
        for name, watched in variables.items():
            slopes = tape.gradient(value, [variable.value for variable in watched], unconnected_gradients="zero")
            parts[name] = np.concatenate([np.ravel(keras.ops.convert_to_numpy(slope)) for slope in slopes] or [[0.0]])
        found.append((float(value), parts))
    return found


def compare_gradients(pairs):
    """Return two columns of a row, from the gradients of a term and of the other, batch by batch."""
    sizes = [(np.linalg.norm(own), np.linalg.norm(other)) for own, other in pairs]
    share = statistics.median(own / other if other else float("nan") for own, other in sizes)
    products = [float(own @ other) for own, other in pairs]
    cosine = statistics.fmean(dot / (a * b) if a * b else 0.0 for dot, (a, b) in zip(products, sizes, strict=True))
    return f"{100 * share:.2g} %", f"{cosine:.2f}"


def measure_terms(arguments, parser, objectives):
    """Return the row of each term: its name, its gradients divided by the largest, and its cosines."""
    run = RunFolder(arguments.run_dir)
    changes = {"objectives": objectives, "data_dir": arguments.data_dir}
    changes = {name: value for name, value in changes.items() if value}
    experiment = Experiment.from_flags(run.load_experiment().as_flags(), run_dir=arguments.run_dir, **changes)
    transform, view = make_transforms(experiment)
    train = load_splits(experiment, experiment.seed).train
    sampler = make_sampler(experiment, train, experiment.seed)
    learner = make_learner(experiment, view, train.num_classes, experiment.steps_per_epoch or 1)
    if objectives:
        if learner.auto_weights is not None:
            parser.error("--objectives: only training measures auto; write numbers")
        # A term that measures before training does so before the trained weights are loaded.
        calibrate(learner, train, view, sampler.batch_size)
        learner.embedder.set_weights(load_embedder(run.embedder).get_weights())
    elif checkpoints.restore_latest(run.checkpoints, learner) is None:
        parser.error(f"there is no checkpoint in {run.checkpoints}")
    batches = training_batches(train, sampler, transform, experiment.seed, num_steps=arguments.batches)
    found = [gradients(learner, images, labels) for images, labels in batches]

    names = [objective.name for objective in learner.objectives]
    sizes = [[np.linalg.norm(terms[number][1]["projection"]) for terms in found] for number in range(len(names))]
    beside = arguments.beside or names[int(np.argmax(np.median(sizes, axis=1)))]
    if beside not in names:
        parser.error(f"--beside must be one of {', '.join(names)}, not {beside!r}")
    for number, objective in enumerate(learner.objectives):
        pairs = {
            part: [(terms[number][1][part], terms[names.index(beside)][1][part]) for terms in found] for part in PARTS
        }
        (share, cosine), (backbone_share, backbone_cosine) = (compare_gradients(pairs[part]) for part in PARTS)
        weight = f"{learner.term_weights()[objective.name]:.4g}"
        yield f"`{weight} * {objective.name}`", share, backbone_share, cosine, backbone_cosine


def main():
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--run_dir", required=True, help="folder of the run")
    parser.add_argument("--objectives", nargs="+", default=[""], help="other terms, as in tfdml train; several sums")
    parser.add_argument("--beside", default="", help="the name of the term that the others are compared with")
    parser.add_argument("--data_dir", default="", help="where the run's data set lies, if it has moved")
    parser.add_argument("--batches", type=int, default=5, help="how many batches")
    arguments = parser.parse_args()
    columns = ("size relative to the base, projection", "backbone", "cosine, projection", "cosine, backbone")
    add = Results(arguments.json).table("table", "term", *columns)
    for objectives in arguments.objectives:
        for row in measure_terms(arguments, parser, objectives):
            add(*row)


if __name__ == "__main__":
    main()
