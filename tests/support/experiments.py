"""Experiments of command lines and flag files."""

import functools
import pathlib
import shlex

from tests.training.runs import learner
from tfdml.flags import read_flag_files
from tfdml.objectives.terms import build_objectives
from tfdml.training import Experiment
from tfdml.training.build import check_pairs, has_orders
from tfdml.training.choices import Ensemble

ROOT = pathlib.Path(__file__).parents[2]


def experiment_of(command, **changes):
    """The experiment of `tfdml train`'s flags, as one would write them in a shell in the
    repository's root."""
    words = [
        word.replace("--flagfile=", f"--flagfile={ROOT}/") for word in shlex.split(str(command))
    ]
    return Experiment.from_flags("\n".join(read_flag_files(words)), **changes)


def terms_of(experiment):
    """The terms of an experiment's loss, built and tried with a tiny network in the place of its
    own."""
    text = str(experiment.objectives)
    objectives = text.replace("dim=8192", "dim=64").replace("dim=512", "dim=64")
    return _build(objectives, isinstance(experiment.head, Ensemble), experiment.moment_embedder)


@functools.cache
def _build(objectives, ensemble, moment_embedder):
    if ensemble:
        return build_objectives(objectives, 5)
    network = {
        "backbone": "conv4(width=4)",
        "image_size": 32,
        "resize": 32,
        "embedding_dim": 8,
        "classes_per_batch": 5,
    }
    experiment = Experiment(
        run_dir="unused", objectives=objectives, moment_embedder=moment_embedder, **network
    )
    made = learner(experiment, 5)
    check_pairs(experiment, made.objectives)
    assert has_orders(made) or not moment_embedder
    return made.objectives
