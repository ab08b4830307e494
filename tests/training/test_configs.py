"""Every flag file of `configs` and row of `papers.txt` builds, has what its paper prints, and takes
a step."""

import dataclasses
import gc
import re

import keras
import numpy as np
import pytest

from tests.support.experiments import ROOT, experiment_of, terms_of
from tests.training.runs import learner as learner_of
from tfdml import data
from tfdml.data.pipeline import training_batches
from tfdml.flags import read_flag_files
from tfdml.objectives.terms import build_objectives
from tfdml.options import flag_text
from tfdml.training.run_data import make_sampler, make_transforms

CONFIGS = sorted(
    path for path in (ROOT / "configs").rglob("*.flags") if path.parent.name != "recipes"
)
SIZE = 64


def config_name(path):
    """`small/cars_jrd` for configs/small/cars_jrd.flags."""
    return path.relative_to(ROOT / "configs").with_suffix("").as_posix()


def written_in(path, **changes):
    """The experiment of a flag file."""
    return experiment_of(f"--flagfile={path.relative_to(ROOT)}", **changes)


@pytest.fixture(scope="module")
def characters():
    """Tiny images of enough classes for every batch composition."""
    return data.load("glyphs", images_per_class=10, size=SIZE).contiguous()


HONEST = [path for path in CONFIGS if path.parent.name == "small" or path.stem == "quickstart"]


def test_flag_files_take_nothing_from_a_recipe_and_small_runs_hold_classes_out():
    for path in CONFIGS:
        flags = read_flag_files([f"--flagfile={path}"])
        assert "--recipe=none" in flags, path
        if path in HONEST:
            assert {
                "--holdout_classes=0.1",
                "--holdout_sampling=stratified",
                "--selection=validation",
            } <= set(flags)


def test_the_objectives_of_every_flag_file_have_the_arguments_that_it_names():
    for text in {str(written_in(path, run_dir="unused").objectives) for path in CONFIGS}:
        assert build_objectives(text, 5)


# What the papers print: Recall@1 in percent, settings, and the factor and arguments of each term.
JRD = {
    "learning_rate": 1e-4,
    "embedding_dim": 512,
    "drop_factor": 0.1,
    "batch_norm": "frozen",
    "sampling": "shuffle",
}
JRD_SHORT = {**JRD, "objective_rate": 1e-2, "epochs": 50, "drop_epochs": "20,40"}
ECAML = {
    "learning_rate": 1e-5,
    "projection_rate": 1e-4,
    "weight_decay": 2e-4,
    "embedding_dim": 512,
    "image_size": 227,
}
ECAML |= {"classes_per_batch": 64, "images_per_class": 2, "steps_per_epoch": 500}
ECAML_CARS = {**ECAML, "epochs": 20}
HORDE = {"image_size": 256, "resize": 256, "embedding_dim": 512}
HORDE_SMALL = {**HORDE, "classes_per_batch": 5, "images_per_class": 8}
HORDE_LARGE = {**HORDE, "classes_per_batch": 40, "images_per_class": 2}
FIVE = {"horde": (1, {"orders": 5, "dim": 8192})}
FOUR = {"horde": (1, {"orders": 4, "dim": 8192})}
DMLDA = {"embedding_dim": 128, "steps_per_epoch": 500, "epochs": 60, "optimizer": "adam"}
DMLDA_SMALL = {**DMLDA, "classes_per_batch": 10, "images_per_class": 10}
DMLDA_LARGE = {**DMLDA, "sampling": "whole_classes", "batch_size": 100, "learning_rate": 3e-5}
DENSITY = {"contrastive": (1, {"margin": 1}), "density": (10, {"eta": 0.5, "initial_target": 0.5})}
RANKMI = {"learning_rate": 1e-3, "backbone_rate": 1e-5, "weight_decay": 1e-4, "embedding_dim": 128}
RANKMI_SMALL = {**RANKMI, "classes_per_batch": 24, "images_per_class": 5}
RANKMI_LARGE = {**RANKMI, "classes_per_batch": 60, "images_per_class": 2}
MARGIN = {"rank_mi": (1, {"margin": 0.2, "statistics_steps": 1, "weight_decay": 1e-4})}
TRIPLET = {"triplet": (0.0079365, {"margin": 0.1}), "ecaml": (0.02, {})}
BOUNDARIES = {"learned_margin": (1, {"alpha": 0.2, "beta": 1.2})}
DATA_SETS = ("cub", "cars", "sop", "inshop")
SQUARED = {"triplet": (1, {"margin": 0.1, "distance": "sqeuclidean"})}


def _jrd(margin, alpha):
    return {"am_softmax": (1, {"scale": 20, "margin": margin}), "jrs": (alpha, {})}


PRINTED = {
    "cub_jrd": (67.9, {**JRD_SHORT, "batch_size": 100}, _jrd(0.1, 1)),
    "cars_jrd": (84.7, {**JRD_SHORT, "batch_size": 50}, _jrd(0.05, 1)),
    "sop_jrd": (
        79.2,
        {**JRD, "batch_size": 120, "objective_rate": 0.1, "epochs": 80},
        _jrd(0.1, 0.4),
    ),
    "inshop_jrd": (
        None,
        {**JRD, "batch_size": 120, "objective_rate": 0.1, "epochs": 80},
        _jrd(0.1, 0.4),
    ),
    "cub_ecaml": (55.7, {**ECAML, "epochs": 10}, {"ecaml": (0.13, {})}),
    "cars_ecaml": (84.5, ECAML_CARS, {"ecaml": (0.13, {})}),
    "sop_ecaml": (71.3, {**ECAML, "epochs": 40}, {"ecaml": (0.013, {})}),
    "inshop_ecaml": (83.8, {**ECAML, "epochs": 40}, {"ecaml": (0.013, {})}),
    "cars_ecaml_triplet": (81.0, ECAML_CARS, TRIPLET),
    "cars_ecaml_npair": (80.4, ECAML_CARS, {"ecaml": (0.3, {})}),
    # The authors' code has batches of 65 classes here.
    "cars_ecaml_triplet_authors": (
        81.0,
        {**ECAML_CARS, "classes_per_batch": 65},
        {**SQUARED, "ecaml": (0.02, {})},
    ),
    "cub_horde": (58.3, HORDE_SMALL, FIVE),
    "cars_horde": (81.5, HORDE_SMALL, FIVE),
    "sop_horde": (72.6, HORDE_LARGE, FOUR),
    "inshop_horde": (84.4, HORDE_LARGE, FOUR),
    "cub_horde_bn_inception": (66.3, HORDE_SMALL, FIVE),
    "cars_horde_bn_inception": (83.9, HORDE_SMALL, FIVE),
    "sop_horde_bn_inception": (80.1, HORDE_LARGE, FOUR),
    "inshop_horde_bn_inception": (90.4, HORDE_LARGE, FOUR),
    "cub_abe_horde": (62.7, HORDE_SMALL, FIVE),
    "cars_abe_horde": (86.4, HORDE_SMALL, FIVE),
    "cub_dmlda": (55.64, {**DMLDA_SMALL, "learning_rate": 1e-5}, DENSITY),
    "cars_dmlda": (77.62, {**DMLDA_SMALL, "learning_rate": 5e-4}, DENSITY),
    "sop_dmlda": (70.56, DMLDA_LARGE, DENSITY),
    "inshop_dmlda": (None, DMLDA_LARGE, DENSITY),
    "cub_rankmi": (66.7, RANKMI_SMALL, MARGIN),
    "cars_rankmi": (83.3, RANKMI_SMALL, MARGIN),
    "sop_rankmi": (74.3, RANKMI_LARGE, MARGIN),
    "inshop_rankmi": (None, RANKMI_LARGE, MARGIN),
    "baselines/cub_triplet": (49.5, {}, SQUARED),
    "baselines/cars_triplet": (68.3, {}, SQUARED),
    "baselines/sop_triplet": (57.9, {}, SQUARED),
    "baselines/inshop_triplet": (64.4, {}, SQUARED),
    **{f"baselines/{name}_margin": (None, {}, BOUNDARIES) for name in DATA_SETS},
    "small/cars_am_softmax": (None, {}, {"am_softmax": _jrd(0.1, 1)["am_softmax"]}),
    "small/cars_jrd": (None, {}, _jrd(0.1, 1)),
}


@pytest.mark.parametrize("name", PRINTED)
def test_a_paper_is_followed_where_it_states_a_number(name):
    recall, settings, terms = PRINTED[name]
    path = ROOT / "configs" / f"{name}.flags"
    written = written_in(path, run_dir="unused")
    for setting, value in settings.items():
        assert flag_text(getattr(written, setting)) == flag_text(value), setting
    found = {call.name: (factor, call.arguments) for factor, call in written.objectives}
    for term, (factor, arguments) in terms.items():
        assert found[term][0] == factor, term
        assert {key: found[term][1].get(key) for key in arguments} == arguments, term
    if recall is not None:
        assert f"Recall@1 {recall}" in " ".join(path.read_text().replace("#", "").split())


def expanded(row):
    """A row with braces as those that it stands for: the first of each braces, the second of each,
    ..."""
    braces = re.findall(r"\{([^}]*)\}", " ".join(row))
    for values in zip(*(found.split(",") for found in braces), strict=True):
        rest = iter(values)
        yield tuple(re.sub(r"\{[^}]*\}", lambda _, rest=rest: next(rest), text) for text in row)
    if not braces:
        yield row


LINES = (ROOT / "configs" / "papers.txt").read_text().splitlines()
ROWS = [
    row for line in LINES if not line.startswith("#") for row in expanded(tuple(line.split("\t")))
]


@pytest.mark.one_quick_case
@pytest.mark.parametrize(
    ("method", "name", "command"), ROWS, ids=[f"{method} {name}" for method, name, _ in ROWS]
)
def test_a_row_builds(method, name, command):
    # A shell would take parentheses that are not in quotes for its own.
    assert "(" not in re.sub('"[^"]*"', "", command)
    experiment = experiment_of(command, run_dir="unused")
    assert len(terms_of(experiment)) == len(experiment.objectives)


def takes_a_step(experiment, characters):
    """Trains an experiment for two steps, and looks at its projection."""
    named = bool(experiment.text_backbone)
    if named:
        characters = data.load("glyphs", images_per_class=2, size=SIZE, texts=True).contiguous()
    sampler = make_sampler(experiment, characters, experiment.seed)
    transform, _ = make_transforms(experiment)
    # The networks of the experiments before hang in cycles of references.
    keras.backend.clear_session()
    gc.collect()
    train = characters if named else None
    learner = learner_of(experiment, characters.num_classes, steps_per_epoch=10, train=train)
    if named:
        characters = characters.with_tokens(learner.towers["text"].tokenize)
    learner.run_eagerly = True  # quicker than tracing for two steps
    before = [np.asarray(variable) for variable in learner.embedder.parts()["projection"]]
    batches = training_batches(characters, sampler, transform, num_steps=2)
    logs = learner.fit(batches, epochs=1, verbose=0).history
    assert all(np.isfinite(values).all() for values in logs.values()), logs
    after = [np.asarray(variable) for variable in learner.embedder.parts()["projection"]]
    assert any((old != new).any() for old, new in zip(before, after, strict=True))


def of_characters(path, size, **changes):
    """The experiment of a flag file, on characters of a smaller size, an untrained network, and
    moments of fewer dimensions."""
    written = written_in(path, run_dir="unused")
    resize = max(size, size * written.resize // written.image_size)
    # A random network with frozen BatchNorm would answer every image with nearly zero.
    tiny = {
        "dataset": "glyphs",
        "weights": "none",
        "image_size": size,
        "resize": resize,
        "batch_norm": "train",
        "objectives": str(written.objectives).replace("dim=8192", "dim=128"),
    }
    return dataclasses.replace(written, **tiny, **changes)


def first_of_each_step():
    """Flag files with each loss, sampling and optimizer that the experiments name; ensembles are
    tried below."""
    paths, seen = [], set()
    for path in CONFIGS:
        written = written_in(path, run_dir="unused")
        calls = {
            (
                call.name,
                str(
                    {
                        key: value
                        for key, value in call.arguments.items()
                        if not isinstance(value, float)
                    }
                ),
            )
            for _, call in written.objectives
        }
        parts = calls | {str(written.sampling), (written.optimizer, str(written.schedule))}
        if "abe" not in path.stem and not parts <= seen:
            paths.append(path)
            seen |= parts
    return paths


# Two steps do without what a run measures before its first.
@pytest.mark.filterwarnings("ignore:density is not adapted:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("path", first_of_each_step(), ids=config_name)
def test_an_experiment_takes_a_step_on_a_small_network(path, characters):
    """All that it says but its network, each of which
    `test_a_network_of_the_experiments_takes_a_step` tries."""
    takes_a_step(of_characters(path, 32, backbone="conv4(width=16)"), characters)


def first_of_each_network():
    """A flag file for each network that the experiments name, as it is cut and pooled."""
    found = {}
    for path in CONFIGS:
        written = written_in(path, run_dir="unused")
        found.setdefault((written.backbone, written.head, written.pooling), path)
    return list(found.values())


@pytest.mark.filterwarnings("ignore:density is not adapted:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("path", first_of_each_network(), ids=config_name)
def test_a_network_of_the_experiments_takes_a_step(path, characters):
    # A few images show it: whole batches are tried above.
    takes_a_step(
        of_characters(path, SIZE, classes_per_batch=5, images_per_class=2, batch_size=10),
        characters,
    )
