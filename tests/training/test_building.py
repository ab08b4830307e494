"""Which training classes an experiment sees, and which it keeps to judge itself by."""

import dataclasses

import numpy as np
import pytest

from tfdml import data
from tfdml.errors import UserError
from tfdml.training import Experiment, RunFolder
from tfdml.training.building import load_splits, split_training_classes


def experiment(**changes):
    settings = Experiment(run_dir="runs/any", dataset="glyphs", image_size=28, resize=32, backbone="conv4", flip=False)
    return dataclasses.replace(settings, **changes)


def test_held_out_and_seen_classes_make_up_the_training_classes():
    train = data.load("glyphs", split="train", images_per_class=2, size=16)
    seen, held_out = split_training_classes(experiment(holdout_classes=0.2, seed=3), train)
    assert len(held_out.classes) == round(0.2 * len(train.classes))
    assert sorted([*seen.classes, *held_out.classes]) == sorted(train.classes)
    again, _ = split_training_classes(experiment(holdout_classes=0.2, seed=3), train)
    other, _ = split_training_classes(experiment(holdout_classes=0.2, seed=4), train)
    np.testing.assert_array_equal(again.classes, seen.classes)
    assert set(other.classes) != set(seen.classes)


def test_without_a_share_every_class_is_seen_and_with_all_of_it_none():
    train = data.load("glyphs", split="train", images_per_class=2, size=16)
    assert split_training_classes(experiment(), train) == (train, None)
    with pytest.raises(UserError, match=r"--holdout_classes=0\.999 leaves no class"):
        split_training_classes(experiment(holdout_classes=0.999), train)


def test_generalisation_counts_no_held_out_class_as_seen(tmp_path):
    from absl import flags
    from absl.testing import flagsaver

    from tfdml.cli import measuring

    settings = experiment(run_dir=str(tmp_path / "run"), holdout_classes=0.2)
    RunFolder(settings.run_dir).create(settings, [])
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["test"])
    train = data.load("glyphs", split="train")
    with flagsaver.flagsaver(model=settings.run_dir):
        seen = measuring._trained_on(train, "glyphs")
        assert measuring._trained_on(train, "folder") is train
    assert set(seen.classes) < set(train.classes)
    assert len(seen) == len(load_splits(settings).train)
