"""Makes SGD steps on one device and on two logical ones, and writes the weights' updates to a file.

    python -m tests.support.distribution_steps FOLDER CASES ...

CASES are separated by commas, each "what/rows", e.g. "terms/19". A fork makes those of one
argument, since graphs of both devices stay in memory until a process ends, and writes FOLDER/N.npz.
It holds updates under "case|devices|index", the loss that `fit` reports under "case|devices|loss",
that of `evaluate` for those in EVALUATED under "case|devices|evaluated loss", and what objectives
observed under "case|devices|observed name".
"""

import sys

import keras
import numpy as np
import tensorflow as tf

from tests.models.ensembles import ensemble_learner
from tests.models.networks import images, jrd, tiny_embedder, values
from tests.support import processes
from tests.support.mathematics import given_pairs, random_batch
from tfdml import layers, losses, models, objectives
from tfdml.training import averaged, build_optimizer

# Images of one step. Keras cannot begin with a batch of which replicas get unequal parts, so "19"
# means a step on 5 + 5 images and one on 5 + 4, and "11" a last step on 1 + 0.
BATCH = 10
# What else `evaluate` computes is what `fit` does, but for statistics and regularizers.
EVALUATED = ("am", "given", "tuned", "ensemble")

PLAIN = {
    "contrastive": losses.ContrastiveLoss(1.3, "euclidean"),
    "am": losses.AMSoftmaxLoss(),
    "given": losses.MultiSimilarityLoss(positives=given_pairs(19)),
}


def plain(loss, classes):
    """A plain Keras model compiled with the loss."""
    stack = [keras.Input((8,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(5)]
    model = keras.Sequential([*stack, layers.CosineProxies(classes)] if classes else stack)
    model.compile(optimizer=keras.optimizers.SGD(0.3), loss=loss)
    return model


def learner(terms, **options):
    model = models.MetricLearner(tiny_embedder(**options), terms)
    model.compile(optimizer=keras.optimizers.SGD(0.3))
    model.build((None, 12, 12, 3))
    return model


def regularized():
    model = models.MetricLearner(tiny_embedder(batch_norm="statistics"), jrd())
    model.embedder.dense.kernel_regularizer = keras.regularizers.L2(0.1)
    model.compile(optimizer=keras.optimizers.SGD(0.3))
    model.build((None, 12, 12, 3))
    return model


def ensemble():
    """A loss for each head, divergence, and HORDE on the heads' maps."""
    model = ensemble_learner(batch_norm="statistics")
    model.compile(optimizer=keras.optimizers.SGD(0.1))
    model.build((None, 12, 12, 3))
    return model


class RelativeSpread(objectives.Objective):
    """The distances of positives over those of negatives."""

    def compute_pairs(self, pairs):
        batch = pairs["embedding"]
        distances = batch.distances("sqeuclidean")
        apart = keras.ops.sum(keras.ops.where(batch.negatives, distances, 0.0))
        return batch.mean(distances, batch.positives) / batch.total(apart)


def cached(terms):
    """A learner that takes 3 images at a time."""
    model = learner(terms)
    model.gradient_cache = 3
    return model


def tuned():
    """With all that the optimizer does for single variables, and rows of proxies that each step
    draws; the averages are what is compared."""
    proxies = objectives.ProxyLoss(losses.AMSoftmaxLoss(), 40, sample=0.3)
    model = models.MetricLearner(
        tiny_embedder(batch_norm="statistics"),
        [proxies, objectives.JointRepresentationSimilarity()],
    )
    model.build((None, 12, 12, 3))
    rates = {"projection": 0.05, "objectives": 0.1}
    model.compile(
        optimizer=build_optimizer(
            "sgd", model, 0.3, rates, weight_decay=0.1, clip_norm=0.2, ema=0.5
        )
    )
    return model


def two_views():
    """Images and vectors in the place of texts, 4 images at a time."""
    terms = [
        objectives.SoftmaxAcrossViews(scale=5.0),
        objectives.SigmoidAcrossViews(scale=2.0, bias=-1.0),
        objectives.AcrossViews(losses.ContrastiveLoss(1.3, "euclidean")),
    ]
    embedder = tiny_embedder()
    text = models.Head(8, embedder.embedding_dim, name="texts")
    model = models.MetricLearner({"image": embedder, "text": text}, terms, gradient_cache=3)
    model.build(model.view_shape)
    model.compile(optimizer=keras.optimizers.SGD(0.3))
    return model


def rank_mi(k, **options):
    """A RankMI whose first step has negatives too, and draws them."""
    return objectives.RankMI(1.5, statistics_steps=k, hidden=8, depth=1, seed=7, **options)


def terms():
    """An objective of each kind without a memory, on the same step."""
    return learner(
        [
            losses.ContrastiveLoss(1.3, "euclidean"),
            objectives.HighOrderMomentLoss(
                losses.ContrastiveLoss(1.3, "euclidean"), 4, 300, reduce_to=4, weight=0.5
            ),
            objectives.DensityAdaptivity(
                3, reference_density=[1.0, 2.0, 0.5], constraint="hard", reduction="sum"
            ),
            objectives.CurricularFace(3, scale=4.0, momentum=0.5, drop_highest=0.3),
            objectives.InstanceLoss(3),
            objectives.LearnedMargin(3, beta=0.6, nu=0.1),
            objectives.EnergyConfusion("log_of_mean", "projection", weight=0.1),
            objectives.EntropySpread(weight=0.1),
            objectives.GlobalOrthogonal(),
            objectives.JointMMD(("pooled", "embedding")),
        ]
    )


def memory():
    """Objectives that see more than a chunk, 3 images at a time."""
    return cached(
        [
            RelativeSpread(),
            objectives.RegularizedSoftTriple(3, 2, scale=5.0),
            objectives.CrossBatchMemory(losses.ContrastiveLoss(1.3, "euclidean"), 12),
            objectives.HighOrderMomentLoss(losses.BinomialDevianceLoss(), 2, 8, weight=0.1),
            objectives.Prism(losses.MultiSimilarityLoss(), 3, noise_rate=0.3, size=12, weight=0.1),
        ]
    )


LEARNERS = {
    "regularized on batch": regularized,
    "tuned": tuned,
    "terms": terms,
    "memory": memory,
    "ensemble": ensemble,
    "rank_mi cached": lambda: cached([rank_mi(1), *jrd()]),
    "rank_mi twice": lambda: learner([rank_mi(2, monotonicity=0.1)]),
    "two views": two_views,
}


def make(what):
    keras.utils.set_random_seed(3)
    if what in LEARNERS:
        return LEARNERS[what]()
    return plain(PLAIN[what], classes=3 if what == "am" else None)


def step(what, rows, strategy):
    """The updates of one epoch, the losses, and what the objectives observed, by name."""
    labels, x = random_batch(1, rows, 3 if rows > 1 else 1, 8, unit=False)
    labels = np.arange(rows) if what.startswith("given") else labels
    if what in LEARNERS:
        x = (
            {"image": images(1, rows, "uint8"), "text": x}
            if what == "two views"
            else images(1, rows, "uint8")
        )
    with strategy.scope():
        model = make(what)
    # Two steps take less than tracing them.
    model.run_eagerly = strategy.num_replicas_in_sync == 1
    before = values(model.trainable_variables)
    found = {}
    if what in EVALUATED:
        found["evaluated loss"] = model.evaluate(
            x, labels, batch_size=BATCH, verbose=0, return_dict=True
        )["loss"]
    if "on batch" in what:
        found["embedding"] = model.predict_on_batch(x)
        found["tested loss"] = model.test_on_batch(x, labels, return_dict=True)["loss"]
        logs = model.train_on_batch(x, labels, return_dict=True)
        reported = {name: [value] for name, value in logs.items()}
    else:
        reported = model.fit(x, labels, batch_size=BATCH, shuffle=False, verbose=0).history
    found["loss"] = reported["loss"][-1]
    observed = {name: reported[name][-1] for name in getattr(model, "observation_trackers", ())}
    observed |= {
        f"{o.name}_t": float(values([o.t])[0])
        for o in getattr(model, "objectives", ())
        if hasattr(o, "t")
    }
    with averaged(model):
        after = values(model.trainable_variables)
    found |= {f"observed {name}": value for name, value in observed.items()}
    found |= {str(i): new - old for i, (new, old) in enumerate(zip(after, before, strict=True))}
    own = [o.network for o in getattr(model, "objectives", ()) if hasattr(o, "network")]
    found |= {
        f"V {i}": value
        for i, value in enumerate(values([v for network in own for v in network.weights]))
    }
    return found


def two_devices():
    """A strategy of two logical devices; before TensorFlow does anything else."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert two.num_replicas_in_sync == 2
    return two


def write(path, cases):
    two, arrays = two_devices(), {}
    # Rewriting graphs takes longer than running them.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    for case in cases.split(","):
        what, rows = case.split("/")
        for devices, strategy in ((1, tf.distribute.get_strategy()), (2, two)):
            found = step(what, int(rows), strategy)
            arrays |= {f"{case}|{devices}|{name}": np.array(value) for name, value in found.items()}
    np.savez(path, **arrays)


def main(folder, *parts):
    for part, cases in enumerate(parts):
        if any(processes.wait([processes.fork(write, f"{folder}/{part}.npz", cases)])):
            sys.exit(f"{cases} failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
