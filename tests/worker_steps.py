"""Makes SGD steps in one process and by several workers, and writes the weights' updates to files.

    python -m tests.worker_steps FOLDER COUNT=CASES ...

COUNT is a number of workers; a case is a learner of `tests.distribution_steps`, or "all", "ensemble" and "rank_mi":
every objective at once; or "cached": a step by chunks. Worker i of N writes FOLDER/N-i.npz, with updates under
"case|index", and what `fit` reports under "case|fit name".
"""

import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

from tests import distribution_steps, worker_processes
from tests.mathematics import random_batch
from tests.models.networks import images, values
from tests.training import method_steps
from tfdml import losses, models
from tfdml.workarounds import multi_worker_strategy

BATCH, STEPS = 12, 2


READABLE = {"pooled", "projection", "embedding", "detached_projection", "detached_embedding"}


def _all():
    learners = distribution_steps.LEARNERS
    names = [name for name in learners if not any(word in name for word in ("sum", "rank"))]
    found = {}
    for objective in (term for name in names for term in learners[name]().objectives):
        if "class" not in objective.provides and set(objective.reads) <= READABLE | set(objective.provides):
            config = {**objective.get_config(), "name": f"o{len(found)}", "weight": 0.1 * objective.weight}
            found[config["name"]] = type(objective).from_config(config)
    return distribution_steps.learner([*found.values(), *distribution_steps.jrd()])


def _ensemble():
    embedder, terms = method_steps.LEARNERS["horde on abe"]()
    model = models.MetricLearner(embedder, terms)
    model.compile(optimizer=keras.optimizers.SGD(0.3))
    model.build((None, 12, 12, 3))
    return model


def _rank_mi():
    return distribution_steps.learner([distribution_steps.rank_mi(1), losses.ContrastiveLoss(1.3, "euclidean")])


def _cached():
    return distribution_steps.cached(losses.ContrastiveLoss(1.3, "euclidean"))


MORE = {"all": _all, "ensemble": _ensemble, "rank_mi": _rank_mi, "cached": _cached}


def step(case, strategy, index, count):
    keras.utils.set_random_seed(3)
    labels, _ = random_batch(1, BATCH * STEPS, 3, 8, unit=False)
    x = images(1, BATCH * STEPS, "uint8")
    share = BATCH // count

    def rows(_=None):
        steps = tf.data.Dataset.from_tensor_slices((x, labels)).batch(BATCH)
        return steps.map(lambda a, b: (a[index * share : (index + 1) * share], b[index * share : (index + 1) * share]))

    given = rows() if count == 1 else strategy.distribute_datasets_from_function(rows)
    with strategy.scope():
        model = (MORE.get(case) or distribution_steps.LEARNERS[case])()
    before = values(model.trainable_variables)
    logs = model.fit(given, steps_per_epoch=STEPS, verbose=0).history
    found = {f"{case}|fit {name}": np.array(value[-1]) for name, value in logs.items()}
    changes = [new - old for new, old in zip(values(model.trainable_variables), before, strict=True)]
    return found | {f"{case}|{i}": change for i, change in enumerate(changes)}


def work(folder, count, index, cases):
    several = multi_worker_strategy() if count > 1 else tf.distribute.get_strategy()
    found = {}
    for case in cases:
        found |= step(case, several, index, count)
    np.savez(pathlib.Path(folder) / f"{count}-{index}.npz", **found)


def main(folder, *parts):
    for count, _, cases in (part.partition("=") for part in parts):
        count, cases = int(count), cases.split(",")
        configs = worker_processes.tf_configs(count)
        children = [
            worker_processes.fork(work, folder, count, i, cases, config=config) for i, config in enumerate(configs)
        ]
        statuses = worker_processes.wait(children)
        if any(statuses):
            sys.exit(f"{count} workers ended with {statuses}")


if __name__ == "__main__":
    main(*sys.argv[1:])
