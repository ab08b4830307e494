"""How large the gradient of each term of a sum of objectives is beside that of another term, on batches of a run.

    python -m benchmarks.term_gradients --run_dir=runs/cars_dmlda
    python -m benchmarks.term_gradients --run_dir=runs/cars --objectives="contrastive + 10 * density + 0.1 * ecaml"

Tells why a term brings little, or drowns the others, before a day is spent on training with another weight. Embedder
and objectives are as the run's last checkpoint has them; with --objectives the embedder alone is, the terms are new.
Gradients are of the weighted terms, with respect to the projection and to the backbone: their length, their length
beside that of --beside, by default the term whose gradient is the largest at the projection (medians over the batches),
and the mean cosine between the two. A cosine near 0 means that a term asks for something else, one below 0 that it
works against it.
"""

import argparse
import statistics

import keras
import numpy as np
import tensorflow as tf

from tfdml.data.pipeline import training_batches
from tfdml.embeddings.backends import load_embedder
from tfdml.training import checkpoints
from tfdml.training.build import initial_weights
from tfdml.training.build.components import make_learner
from tfdml.training.build.images import load_splits, make_sampler, make_transforms
from tfdml.training.run_folder import RunFolder
from tfdml.training.settings import Experiment

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


def compared(pairs):
    """Three columns of a row, from the gradients of a term and of the one beside it, batch by batch."""
    sizes = [(np.linalg.norm(own), np.linalg.norm(other)) for own, other in pairs]
    share = statistics.median(own / other if other else float("nan") for own, other in sizes)
    products = [float(own @ other) for own, other in pairs]
    cosine = statistics.fmean(dot / (a * b) if a * b else 0.0 for dot, (a, b) in zip(products, sizes, strict=True))
    return f"{statistics.median(own for own, _ in sizes):>12.4g}{share:>16.2%}{cosine:>8.2f}"


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run_dir", required=True, help="folder of the run")
    parser.add_argument("--objectives", default="", help="other terms, as in tfdml train")
    parser.add_argument("--beside", default="", help="the name of the term that the others are compared with")
    parser.add_argument("--data_dir", default="", help="where the run's data set lies, if it has moved")
    parser.add_argument("--batches", type=int, default=5, help="how many batches")
    arguments = parser.parse_args()

    run = RunFolder(arguments.run_dir)
    changes = {name: getattr(arguments, name) for name in ("objectives", "data_dir") if getattr(arguments, name)}
    experiment = Experiment.from_flags(run.load_experiment().as_flags(), run_dir=arguments.run_dir, **changes)
    data, seed = experiment, experiment.seed
    transform, view = make_transforms(data)
    train = load_splits(data, seed).train
    sampler = make_sampler(data, train, seed)
    steps = experiment.steps_per_epoch or 1
    learner = make_learner(experiment, view, train.num_classes, steps)
    if arguments.objectives:
        if learner.auto_weights is not None:
            parser.error("--objectives: only training measures auto; write numbers")
        # What a term measures before training, it measures before the trained weights come.
        initial_weights.calibrate(learner, train, view, sampler.batch_size)
        learner.embedder.set_weights(load_embedder(run.embedder).get_weights())
    elif checkpoints.restore_latest(run.checkpoints, learner) is None:
        parser.error(f"there is no checkpoint in {run.checkpoints}")
    batches = training_batches(train, sampler, transform, seed, num_steps=arguments.batches)
    measured = [gradients(learner, images, labels) for images, labels in batches]

    names = [objective.name for objective in learner.objectives]
    sizes = [[np.linalg.norm(terms[number][1]["projection"]) for terms in measured] for number in range(len(names))]
    beside = arguments.beside or names[int(np.argmax(np.median(sizes, axis=1)))]
    if beside not in names:
        parser.error(f"--beside must be one of {', '.join(names)}, not {beside!r}")
    header = "".join(f"{part:>12}{'of ' + beside:>16}{'cosine':>8}" for part in PARTS)
    print(f"{'term':<14}{'weight':>9}{'value':>11}{header}")
    for number, objective in enumerate(learner.objectives):
        value = statistics.fmean(terms[number][0] for terms in measured)
        row = f"{objective.name:<14}{learner.term_weights()[objective.name]:>9.4g}{value:>11.4g}"
        for part in PARTS:
            row += compared([(terms[number][1][part], terms[names.index(beside)][1][part]) for terms in measured])
        print(row)


if __name__ == "__main__":
    main()
