"""What a run is made of, and what is refused before the images are read."""

import dataclasses

import pytest

from tests.training import runs
from tfdml.errors import UserError
from tfdml.training.build import components
from tfdml.training.build.components import build_components


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("backbone", "resnet5", "unknown backbone 'resnet5'; known: bn_inception, conv4"),
        ("backbone", "conv4(hight=3)", "backbone 'conv4' has no option 'hight'"),
        ("weights", "/no/such.weights.h5", "`weights`: there is no file /no/such.weights.h5"),
        ("weights", "imagenet", "there are no ImageNet weights for 'conv4'"),
        ("objectives", "am_softmaxx + jrs", "there is no 'am_softmaxx'; known: am_softmax"),
        ("objectives", "am_softmax(margn=0.1)", "am_softmax: no argument 'margn'; it has"),
        ("objectives", "am_softmax + jrs(kernels=laplacian)", "there is no kernel or loss 'laplacian'"),
        ("policy", "0.5 * blurr", "`policy`: there is no policy 'blurr'"),
        ("optimizer", "adamm", "--optimizer=adamm: must be one of adam"),
    ],
)
def test_what_does_not_exist_is_found_before_the_images_are_read(flag, value, says, tmp_path, monkeypatch):
    def read(*arguments):
        raise AssertionError("the images were read")

    monkeypatch.setattr(components, "load_splits", read)
    with pytest.raises(UserError) as caught:
        build_components(runs.experiment(tmp_path / "run", **{flag: value}))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def _noise(monkeypatch):
    monkeypatch.setattr(components, "load_splits", lambda *arguments: runs.SPLITS)


@pytest.mark.usefixtures("_noise")
def test_the_parts_are_those_of_the_settings(tmp_path):
    parts = build_components(
        runs.experiment(tmp_path / "run", steps_per_epoch=0, cache="true", objectives="am_softmax")
    )
    assert parts.splits is runs.SPLITS
    assert (parts.sampler.batch_size, parts.steps_per_epoch) == (8, 4)
    assert (
        parts.train_view.image_size
        == parts.evaluation_view.image_size
        == parts.learner.embedder.image_size
        == runs.SIZE
    )
    assert [term.name for term in parts.learner.objectives] == ["am_softmax"]
    assert parts.learner.objectives[0].class_proxies.num_classes == 8
    assert (parts.cache.training, parts.cache.evaluation) == (True, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_noise")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"images_per_class": 1}, "--images_per_class=1: contrastive learns from pairs"),
        ({"moment_embedder": True}, "--moment_embedder needs one horde"),
        ({"evaluate_orders": "epochs"}, "--evaluate_orders=epochs needs one horde"),
        ({"ks": "1,100"}, "--ks=1,100"),
        ({"classes_per_batch": 9}, "the data has 8 classes"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(changes, says, tmp_path):
    with pytest.raises(UserError) as caught:
        build_components(runs.experiment(tmp_path / "run", **changes))
    assert says in str(caught.value)


def test_one_held_out_class_selects_nothing(tmp_path, monkeypatch):
    one = dataclasses.replace(runs.SPLITS, validation=runs.noise("train", 1, 1, images_per_class=12))
    monkeypatch.setattr(components, "load_splits", lambda *arguments: one)
    with pytest.raises(
        UserError, match=r"--holdout_classes=0\.1 holds out one class, in which every neighbour is a hit"
    ):
        build_components(runs.experiment(tmp_path / "run", selection="validation", holdout_classes=0.1))
