"""The time of a look at a batch and of a training step, in turns, on the first GPU if there is one.

    python -m benchmarks.watching --flagfile=configs/quickstart.flags --run_dir=unused

Takes the flags of a run, and writes nothing. Reported are the median times of a step and of a look (its batch being
read, its gradients and statistics; not the few milliseconds of writing) after the first of each, and what share of the
run that is at --watch_every.
"""

import statistics
import time

from tfdml.cli.train import FLAGS, given_settings
from tools.numbers import Results, command_line

_TIMES = 15


def main():
    """Measure and print."""
    from tfdml.training import Experiment
    from tfdml.training.build.components import build_components
    from tfdml.training.watching import GradientSampler, pair_distances, sampled_batches, spread

    arguments, flags = command_line(__doc__).parse_known_args()
    FLAGS.parse(flags)
    experiment = Experiment(**given_settings(FLAGS))
    parts = build_components(experiment)
    images, labels = next(sampled_batches(experiment.seed, parts, 0, 1))
    looked_at = sampled_batches(experiment.seed, parts, 0, experiment.watch_every)
    sampler = GradientSampler(parts.learner)
    steps, looks = [], []
    for _ in range(_TIMES):
        start = time.perf_counter()
        parts.learner.train_on_batch(images, labels)
        steps.append(time.perf_counter() - start)
        start = time.perf_counter()
        found = sampler(*next(looked_at))
        pair_distances(found.embeddings, labels)
        spread(found.embeddings)
        looks.append(time.perf_counter() - start)
    step, look = (statistics.median(values[1:]) for values in (steps, looks))
    share = look / (step * experiment.watch_every + look)
    columns = ("a step, ms", "a look, ms", "the first look, s", f"of a run at --watch_every={experiment.watch_every}")
    row = Results(arguments.json).table("table", *columns)
    row(f"{1000 * step:,.0f}", f"{1000 * look:,.0f}", f"{looks[0]:.1f}", f"{100 * share:.2f} %")


if __name__ == "__main__":
    main()
