"""What the tests of objectives with a memory share."""

import numpy as np

from tests.mathematics import assert_close, public_classes
from tests.played_replicas import sum_and_gradient
from tfdml import losses, replicas
from tfdml.pairs import Scope, pairs_by_name


def all_losses():
    return {name: cls() for name, cls in public_classes(losses).items() if issubclass(cls, losses.PairLoss)}


REFUSED = {"LiftedStructureLoss", "AngularLoss", "QuadrupletLoss", "VICRegLoss"}


def unit(x):
    x = np.asarray(x, np.float64)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def check_replicas(objective, labels, x, sizes):
    """Replicas of these sizes make the value and the gradient of one device."""

    def share(own_labels, own):
        every, all_labels = {"embedding": replicas.gather(own)}, replicas.gather(own_labels)
        whole = objective.whole_batch
        pairs = pairs_by_name(
            every, all_labels, objective.positives, Scope() if whole else Scope.of_replica(own.shape[0])
        )
        return objective.compute_pairs(pairs) / (replicas.count() if whole else 1)

    expected = sum_and_gradient(share, (labels, x), [sum(sizes)])
    actual = sum_and_gradient(share, (labels, x), sizes)
    assert_close(actual[0], expected[0])
    assert_close(actual[1], expected[1])
