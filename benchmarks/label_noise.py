"""Training with wrong labels: Recall@1 on unseen classes, with a share of the training labels exchanged.

    python -m benchmarks.label_noise --data_dir=OMNIGLOT --noise 0 0.3 --seeds=3

Of each training image of configs/small/omniglot_contrastive.flags, the label is with probability `noise` that of
another class, drawn evenly (symmetric noise). All training classes are trained on, and the last epoch counts: a choice
of it would see labels that a user with wrong labels does not have. The classes measured on keep their own labels.
"""

import dataclasses
import pathlib

import numpy as np

from tfdml.data.pipeline import training_batches
from tfdml.training.build.components import make_learner
from tfdml.training.build.images import load_splits, make_sampler, make_transforms
from tfdml.training.run.monitor import Evaluator
from tfdml.training.settings import Experiment
from tools.numbers import Results, command_line

FLAGS = pathlib.Path(__file__).resolve().parents[1] / "configs" / "small" / "omniglot_contrastive.flags"
PAIRS = "contrastive(margin=1, distance=sqeuclidean, reduction=sum)"
CLASSES = "scale=20, margin=0.1"


def rows(noise):
    """Return the objectives; PRISM and the selection receive the share of wrong labels, as in their papers."""
    share = noise or 0.1
    prism = f"prism(loss={PAIRS}, noise_rate={share}, size=8192, start=100"
    return {
        "contrastive": PAIRS,
        "contrastive, memory (XBM)": f"xbm(loss={PAIRS}, size=8192, start=100)",
        "contrastive, PRISM (`pairs=batch`)": f"{prism}, pairs=batch)",
        "contrastive, memory, PRISM (`pairs=memory`)": f"{prism})",
        "AMSoftmax": f"am_softmax({CLASSES})",
        "AMSoftmax, `label_smoothing=0.1`": f"am_softmax({CLASSES}, label_smoothing=0.1)",
        "AMSoftmax, `drop_highest`": f"am_softmax({CLASSES}, drop_highest={share})",
        "sub-center ArcFace, scale 20, margin 0.1": "sub_center_arc_face(scale=20, margin=0.1)",
    }


def exchange_labels(labels, noise, seed):
    """Replace each label by that of another class with probability `noise`."""
    generator = np.random.default_rng([seed, 1])
    classes, index = np.unique(labels, return_inverse=True)
    others = (index + generator.integers(1, len(classes), len(index))) % len(classes)
    return classes[np.where(generator.random(len(index)) < noise, others, index)]


def recall(data_dir, objectives, noise, seed):
    """Return Recall@1 of the unseen classes after the last epoch, in percent."""
    changes = {"data_dir": data_dir, "objectives": objectives, "seed": seed, "holdout_classes": 0.0}
    changes |= {"epochs": 6, "drop_epochs": "4"}
    experiment = Experiment.from_flags(FLAGS.read_text(), run_dir="unused", selection="last", **changes)
    data, optimization = experiment, experiment
    splits = load_splits(data, seed)
    clean = splits.train
    train = dataclasses.replace(clean, labels=exchange_labels(clean.labels, noise, seed))
    sampler, (transform, view) = make_sampler(data, train, seed), make_transforms(data)
    steps = optimization.steps_per_epoch or sampler.steps_per_epoch
    learner = make_learner(experiment, view, train.num_classes, steps)
    batches = training_batches(train, sampler, transform, seed, num_steps=steps * optimization.epochs)
    learner.fit(batches, steps_per_epoch=steps, epochs=optimization.epochs, verbose=0)
    evaluator = Evaluator(experiment, optimization.epochs, splits, view)
    return 100 * evaluator.measure(evaluator.embed(learner.embedder, "test"), "test", ("recall",))["recall@1"]


def main():
    """Train, and print a row of each."""
    parser = command_line(__doc__)
    parser.add_argument("--data_dir", required=True, help="Omniglot's folder")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 0.3], help="shares of wrong labels")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", nargs="*", default=[], help="their names; by default all")
    arguments = parser.parse_args()
    unknown = set(arguments.rows) - set(rows(0.0))
    if unknown:
        parser.error(f"--rows: unknown {sorted(unknown)}; there are {', '.join(rows(0.0))}")
    columns = [f"{100 * noise:.0f} % of the labels exchanged" if noise else "labels right" for noise in arguments.noise]
    row = Results(arguments.json).table("table", "objective", *columns)
    for name in arguments.rows or rows(0.0):
        cells = []
        for noise in arguments.noise:
            recalls = [recall(arguments.data_dir, rows(noise)[name], noise, seed) for seed in range(arguments.seeds)]
            cells.append(" / ".join(f"{value:.1f}" for value in recalls))
        row(name, *cells)


if __name__ == "__main__":
    main()
