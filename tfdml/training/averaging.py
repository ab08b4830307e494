"""The average of the weights along training, which is measured and kept in their place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from keras import ops

from tfdml.training.part_rates import part_optimizers


@contextlib.contextmanager
def averaged(learner) -> Iterator[None]:
    """A block in which the learner has the averages of its weights, where its optimiser keeps them.

    With a share m, after step t from 0 a weight w has the average a:

        a_0 = w_0,    a_t = m_t a_(t-1) + (1 - m_t) w_t,    m_t = min(m, (1 + t) / (10 + t))

    Polyak and Juditsky, 1992; the shorter memory of the first steps as in TensorFlow's `ExponentialMovingAverage`. What
    is not trained, such as the statistics of BatchNorm, is as training left it.

    Args:
        learner: Compiled with an optimiser of `build_optimizer`.

    Example:
        >>> learner.compile(build_optimizer("adam", learner, 1e-3, ema=0.999))
        >>> history = learner.fit(batches, steps_per_epoch=2, verbose=0)
        >>> with averaged(learner):
        ...     learner.embedder.save("embedder.keras")
    """
    pairs = [pair for part in part_optimizers(learner.optimizer) for pair in part.with_averages()]
    trained = [ops.convert_to_numpy(variable) for variable, _ in pairs]
    for variable, average in pairs:
        variable.assign(average)
    try:
        yield
    finally:
        for (variable, _), value in zip(pairs, trained, strict=True):
            variable.assign(value)
