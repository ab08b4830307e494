"""Every method and its base, on small networks: the same steps on each backend.

    KERAS_BACKEND=jax python -m tests.training.method_steps FILE.npz

takes the first weights from FILE.npz, where `first_weights` has put them, and leaves there what the
steps gave.
"""

import sys

import keras
import numpy as np

from tests.models.ensembles import tiny_ensemble
from tests.models.networks import SIZE, colored_batch, tiny_embedder, values
from tfdml import losses, objectives
from tfdml.models import MetricLearner
from tfdml.training.optimizers import build_optimizer

STEPS = 10


def _horde(**options):
    return objectives.HighOrderMomentLoss(
        losses.BinomialDevianceLoss(), orders=3, dim=16, embedding_dim=4, **options
    )


def _heads():
    return [
        objectives.HeadwiseLoss(losses.ContrastiveLoss(0.5, "cosine")),
        objectives.HeadDivergence(margin=0.2),
    ]


def _am_softmax():
    return objectives.ProxyLoss(losses.AMSoftmaxLoss(10.0, 0.1), 3)


def _n_pair():
    return objectives.MetricLoss(losses.NPairLoss(), "projection")


def _density():
    return objectives.DensityAdaptivity(3, reference_density=[1.0, 2.0, 0.5], weight=10.0)


LEARNERS = {
    "am_softmax": lambda: (tiny_embedder(batch_norm="train"), [_am_softmax()]),
    "jrd": lambda: (
        tiny_embedder(batch_norm="train"),
        [_am_softmax(), objectives.JointRepresentationSimilarity()],
    ),
    "binomial": lambda: (tiny_embedder(), [losses.BinomialDevianceLoss()]),
    "horde": lambda: (tiny_embedder(), [losses.BinomialDevianceLoss(), _horde()]),
    "abe": lambda: (tiny_ensemble(), _heads()),
    "horde on abe": lambda: (tiny_ensemble(), [*_heads(), _horde(reduce_to=8)]),
    "n_pair": lambda: (tiny_embedder(), [_n_pair()]),
    "ecaml": lambda: (tiny_embedder(), [_n_pair(), objectives.EnergyConfusion(weight=0.3)]),
    "triplet": lambda: (tiny_embedder(), [losses.TripletLoss(1.5)]),
    "dml_da": lambda: (tiny_embedder(), [losses.TripletLoss(1.5), _density()]),
    # All negatives: what is drawn comes from each backend's own generator.
    "rank_mi": lambda: (
        tiny_embedder(),
        [objectives.RankMI(0.5, hidden=8, depth=1, negatives="all")],
    ),
}


def make(name):
    """A learner whose optimizer has what a run's has: rates of parts, decay, momentum and
    clipping."""
    keras.utils.set_random_seed(3)
    learner = MetricLearner(*LEARNERS[name]())
    learner.build((None, SIZE, SIZE, 3))
    rates = {"projection": 0.05, "objectives": 0.02}
    optimizer = build_optimizer(
        "sgd", learner, 0.02, rates, weight_decay=1e-4, momentum=0.9, clip_norm=0.5
    )
    learner.compile(optimizer, run_eagerly=keras.backend.backend() == "tensorflow")
    return learner


def first_weights():
    """Those of every learner, by "name|first|index"."""
    return {
        f"{name}|first|{i}": value
        for name in LEARNERS
        for i, value in enumerate(values(make(name).variables))
    }


class _Logs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append([float(logs[name]) for name in sorted(logs)])


def steps(name, given):
    """What ten steps report and where the weights end, by "name|..."."""
    learner = make(name)
    for i, variable in enumerate(learner.variables):
        variable.assign(given[f"{name}|first|{i}"])
    batches = [colored_batch(seed) for seed in range(STEPS)]
    x, y = np.concatenate([x for _, x in batches]), np.concatenate([y for y, _ in batches])
    logs = _Logs()
    learner.fit(x, y, batch_size=len(batches[0][0]), shuffle=False, verbose=0, callbacks=[logs])
    last = {
        f"{name}|last|{i}": value for i, value in enumerate(values(learner.trainable_variables))
    }
    return {f"{name}|logs": np.array(logs.steps), **last}


def main(path):
    given = dict(np.load(path))
    found = {}
    for name in LEARNERS:
        found.update(steps(name, given))
    np.savez(path, **found)


if __name__ == "__main__":
    main(sys.argv[1])
