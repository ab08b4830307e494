"""Under which conditions RankMI beats the margin loss: on the frozen features of a backbone, with a trained projection.

    tfdml embed --model=frozen.keras --dataset=cars196 --data_dir=CARS196 --split=train --out=features/train
    tfdml embed --model=frozen.keras --dataset=cars196 --data_dir=CARS196 --split=test --out=features/test
    python -m benchmarks.rankmi_conditions --train=features/train --test=features/test

frozen.keras is an embedder without a projection of its own, of MobileNetV2 1.0 at 224 px in docs/small_runs.md:

    embedder = tfdml.models.Embedder("mobilenetv2", embedding_dim=0, image_size=224)
    embedder.build((None, 224, 224, 3))
    embedder.built = True
    tfdml.backbones.load_weights(embedder.backbone, "mnv2_100.weights.h5")
    embedder.save("frozen.keras")

Both train a linear projection of the same features from the same weights on the same batches, for the same number of
its updates; between two of them RankMI trains its statistics network k times, on batches of its own. Prints Recall@1
and MAP@R on the test classes, and the difference with its interval over classes, condition by condition. The last
epoch counts: nothing is chosen.
"""

import dataclasses

import keras
import numpy as np

from benchmarks.learners import FeatureEmbedder
from tfdml.data.sampling import ClassBalancedSampler
from tfdml.evaluation import paired_differences, read_embeddings, retrieval_per_query
from tfdml.losses import MarginLoss
from tfdml.models import AlternatingOptimizer, MetricLearner
from tfdml.objectives import LearnedMargin, MetricLoss, RankMI
from tools.numbers import Results, command_line

METRICS = ("recall@1", "map@r")


@dataclasses.dataclass(frozen=True)
class Condition:
    """How both are trained.

    Args:
        name: As printed.
        classes: Classes of a batch.
        images: Images of each.
        margin: RankMI's.
        negatives: RankMI's: `"distance_weighted"` (the paper's) or `"all"`.
        statistics_steps: k.
        statistics_rate: The learning rate of the statistics network.
        warm: The share of the updates that the margin loss makes before RankMI takes over. The margin loss that it is
            compared with makes all updates.
        learned: Compare with a margin loss whose boundary is learned.
    """

    name: str
    classes: int = 24
    images: int = 5
    margin: float = 0.2
    negatives: str = "distance_weighted"
    statistics_steps: int = 1
    statistics_rate: float = 1e-3
    warm: float = 0.0
    learned: bool = False


CONDITIONS = (
    Condition("the paper's: 24 x 5, margin 0.2, k = 1, distance-weighted negatives"),
    Condition("compared with a margin loss whose boundary is learned", learned=True),
    Condition("all negatives within the margin", negatives="all"),
    Condition("margin 0.1", margin=0.1),
    Condition("margin 0.4", margin=0.4),
    Condition("no margin: all pairs", margin=2.0, negatives="all"),
    Condition("batches of 60 x 2", classes=60, images=2),
    Condition("batches of 60 x 2, all negatives", classes=60, images=2, negatives="all"),
    Condition("k = 5", statistics_steps=5),
    Condition("statistics at a tenth of the rate", statistics_rate=1e-4),
    Condition("warm start by the margin loss, half the updates", warm=0.5),
    Condition("warm start, all negatives", warm=0.5, negatives="all"),
)


def batches(x, labels, sampler, first, count):
    """`count` batches from the step `first` on, for `fit`."""
    for step in range(first, first + count):
        rows = sampler.batch(step)
        yield x[rows], labels[rows]


def fit(embedder, objective, sampler, data, updates, options, first=0, k=0, statistics_rate=1e-3):
    """Train the projection for `updates` updates, and k times as many steps of the statistics."""
    learner = MetricLearner(embedder, objective)
    optimizer = keras.optimizers.Adam(options.rate, weight_decay=1e-4)
    if k:
        optimizer = AlternatingOptimizer(optimizer, keras.optimizers.Adam(statistics_rate, weight_decay=1e-4))
    learner.compile(optimizer)
    steps = updates * (1 + k)
    learner.fit(batches(*data, sampler, first, steps), steps_per_epoch=steps, epochs=1, verbose=0)


def measure(embedder, x, labels):
    """Each metric by test image."""
    return retrieval_per_query(embedder.predict(x, batch_size=2048, verbose=0), labels, metrics=METRICS)


def compare(condition, seed, train, test, options):
    """The metrics by test image of the margin loss and of RankMI."""
    sampler = ClassBalancedSampler(train[1], condition.classes, condition.images, seed=seed)
    found, warm = [], round(condition.warm * options.updates)
    for rank_mi in (False, True):
        keras.utils.set_random_seed(seed)
        embedder = FeatureEmbedder(train[0].shape[1:], options.embedding_dim)
        base = LearnedMargin(len(np.unique(train[1]))) if condition.learned else MetricLoss(MarginLoss())
        first = warm if rank_mi else options.updates
        if first:
            fit(embedder, base, sampler, train, first, options)
        if rank_mi:
            k = condition.statistics_steps
            objective = RankMI(condition.margin, statistics_steps=k, negatives=condition.negatives)
            rest = options.updates - warm
            fit(embedder, objective, sampler, train, rest, options, first, k, condition.statistics_rate)
        found.append(measure(embedder, *test))
    return found


def main():
    """Print a row for each condition."""
    parser = command_line(__doc__)
    parser.add_argument("--train", required=True, help="embeddings of the training classes, as tfdml embed writes them")
    parser.add_argument("--test", required=True, help="those of the test classes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=600, help="of the projection")
    parser.add_argument("--rate", type=float, default=1e-3, help="the learning rate of the projection")
    parser.add_argument("--embedding_dim", type=int, default=128)
    parser.add_argument("--only", nargs="*", default=[], help="names of conditions, or parts of them")
    options = parser.parse_args()

    def stored(path):
        found = read_embeddings(path)
        x = np.array(found.embeddings, "float32")
        # As long as the square root of their dimension, which is what pooled features are about.
        x *= np.sqrt(x.shape[1]) / np.linalg.norm(x, axis=1, keepdims=True)
        return x[:, None, None, :], np.unique(found.labels, return_inverse=True)[1]

    train, test = stored(options.train), stored(options.test)
    plain = retrieval_per_query(test[0][:, 0, 0], test[1], metrics=METRICS)
    words = ", ".join(f"{name} {100 * values.mean():.1f}" for name, values in plain.items())
    print(f"{len(train[1]):,} and {len(test[1]):,} images, {train[0].shape[-1]} features; untrained: {words}\n")
    columns = ("condition", "margin loss", "RankMI", "difference", "95 % over classes", "in MAP@R")
    add = Results(options.json).table("table", *columns)
    for condition in CONDITIONS:
        if options.only and not any(part in condition.name for part in options.only):
            continue
        runs = [compare(condition, seed, train, test, options) for seed in range(options.seeds)]
        base, own = ([run[side] for run in runs] for side in (0, 1))
        gain = paired_differences(own, base, test[1])
        recall, precision = gain["recall@1"], gain["map@r"]
        means = [" / ".join(f"{100 * run['recall@1'].mean():.1f}" for run in side) for side in (base, own)]
        words = [f"{100 * found.low:+.1f} to {100 * found.high:+.1f}" for found in (recall, precision)]
        gains = f"{100 * recall.mean:+.1f}", words[0], f"{100 * precision.mean:+.1f} ({words[1]})"
        add(condition.name, *means, *gains)


if __name__ == "__main__":
    main()
