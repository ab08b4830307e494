"""Every flag file of `configs` is an experiment that builds and takes a step."""

import dataclasses
import gc
import pathlib

import keras
import numpy as np
import pytest

from tests.training.runs import learner as learner_of
from tfdml import data
from tfdml.data.pipeline import training_batches
from tfdml.training import Experiment, building

ROOT = pathlib.Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").rglob("*.flags"))
IDEAS = ("jrd", "horde", "ecaml", "rankmi", "dmlda")
PAPERS = [f"{name}_{idea}" for name in ("cub", "cars", "sop", "inshop") for idea in IDEAS]
SIZE = 64


def config_name(path):
    """`small/cars_jrd` for configs/small/cars_jrd.flags."""
    return path.relative_to(ROOT / "configs").with_suffix("").as_posix()


@pytest.fixture(scope="module")
def characters():
    """Tiny images of enough classes for every batch composition."""
    return data.load("glyphs", images_per_class=10, size=SIZE).contiguous()


def test_every_paper_has_its_experiment_on_every_data_set():
    assert set(PAPERS) <= {config_name(path) for path in CONFIGS}


@pytest.mark.parametrize(
    "name", [f"{name}_ecaml" for name in ("cub", "cars", "sop", "inshop")] + ["cars_ecaml_triplet", "cars_ecaml_npair"]
)
def test_energy_confusion_comes_to_the_letter_and_as_its_authors_ran_it(name):
    literal = (ROOT / "configs" / f"{name}.flags").read_text()
    authors = Experiment.from_flags((ROOT / "configs" / f"{name}_authors.flags").read_text(), run_dir="unused")
    assert f"What the authors ran is {name}_authors.flags" in " ".join(literal.replace("#", "").split())
    assert "reduction=sum" in literal
    assert "sum" not in authors.objectives
    assert "ecaml(form=log_of_mean, representation=projection)" in authors.objectives


def test_the_optimisers_form_is_that_of_the_papers_own_code():
    forms = {"jrd": "pytorch", "rankmi": "pytorch", "ecaml": "keras", "dmlda": "keras", "horde": "keras"}
    for path in CONFIGS:
        words = path.stem.split("_")
        (idea,) = [idea for idea in forms if idea in words] or [None]
        if path.parent.name == "configs" and idea and "small" not in words:
            written = Experiment.from_flags(path.read_text(), run_dir="unused")
            assert written.optimizer_form == forms[idea], path


def test_horde_has_the_rows_of_both_its_networks():
    rows = {f"{name}_horde_bn_inception" for name in ("cub", "cars", "sop", "inshop")} | {"cub_abe_horde"}
    assert rows <= {config_name(path) for path in CONFIGS}


def test_every_idea_and_its_base_loss_can_be_tried_at_a_small_scale():
    small = {f"small/cars_{name}" for name in (*IDEAS, "am_softmax", "contrastive", "margin")}
    assert small <= {config_name(path) for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=config_name)
def test_the_header_says_how_to_run_it(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(f"bin/train --flagfile={path.relative_to(ROOT)} " in line for line in header)


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=config_name)
def test_an_experiment_builds_and_takes_a_step(path, characters, tmp_path):
    written = Experiment.from_flags(path.read_text(), run_dir=str(tmp_path))
    resize = max(SIZE, SIZE * written.resize // written.image_size)
    # A random network with frozen BatchNorm would answer every image with nearly zero.
    tiny = {"dataset": "glyphs", "weights": "none", "image_size": SIZE, "resize": resize, "batch_norm": "train"}
    experiment = dataclasses.replace(written, **tiny)
    sampler = building.make_sampler(experiment.data, characters, experiment.seed)
    transform, _ = building.make_transforms(experiment.data)
    # The networks of the experiments before, hundreds of megabytes each, hang in cycles of references.
    keras.backend.clear_session()
    gc.collect()
    learner = learner_of(experiment, characters.num_classes, steps_per_epoch=10)
    learner.run_eagerly = True  # quicker than tracing these networks for two steps
    before = [np.asarray(variable) for variable in learner.embedder.parts()["projection"]]
    # Two steps, so that alternating updates have their turn.
    logs = learner.fit(training_batches(characters, sampler, transform, num_steps=2), epochs=1, verbose=0).history
    assert all(np.isfinite(values).all() for values in logs.values()), logs
    after = [np.asarray(variable) for variable in learner.embedder.parts()["projection"]]
    assert any((old != new).any() for old, new in zip(before, after, strict=True))
