"""The settings of each stage: which fields they hold, what they refuse, and that they are those of
the experiment."""

import dataclasses

import pytest

from tests.support.experiments import ROOT
from tfdml.data import sampling, transforms
from tfdml.errors import UserError
from tfdml.models import embedder
from tfdml.options import fields_of
from tfdml.training import build, optimizers, run_data
from tfdml.training.choices import Augmentation, Head, Hierarchical, HoldoutSampling, Sampling
from tfdml.training.settings import (
    RECIPES,
    DataSettings,
    EvaluationSettings,
    Experiment,
    ModelSettings,
    OptimizationSettings,
    RunSettings,
    recipe_for,
    with_recipe,
)

STAGES = (DataSettings, ModelSettings, OptimizationSettings, EvaluationSettings, RunSettings)


def names(settings):
    return [field.name for field in dataclasses.fields(settings)]


def test_an_experiment_has_the_settings_of_the_stages_and_its_flag_file_makes_it_again():
    assert names(Experiment) == [name for stage in STAGES for name in names(stage)]
    experiment = Experiment(
        run_dir="a b", objectives="am_softmax + 0.4 * jrs", learning_rate=3e-5, imports="keras"
    )
    assert Experiment.from_flags(experiment.as_flags()) == experiment
    assert "--import=keras\n" in experiment.as_flags()


@pytest.mark.parametrize(
    ("stage", "given", "names"),
    [
        (DataSettings, {"image_size": 300}, "resize=256"),
        (DataSettings, {"sampling": "neighbors(often=2)"}, "'often'"),
        (DataSettings, {"augmentation": "random_resized_crop(min_scale=0)"}, "min_scale"),
        (DataSettings, {"holdout_sampling": "random(part=-1)"}, "holdout_sampling"),
        (ModelSettings, {"head": "whitened(power=2)"}, "power=2: must be at most 1"),
        (ModelSettings, {"head": "whitened(shrinkage=-0.1)"}, "shrinkage=-0.1: must be at least 0"),
        (OptimizationSettings, {"optimizer": "adamm"}, "optimizer"),
        (OptimizationSettings, {"epochs": 4, "warm_up_epochs": 4.0}, "warm_up_epochs"),
        (
            EvaluationSettings,
            {"ks": "2", "selection": "test", "selection_metric": "recall@1"},
            "ks=",
        ),
        (EvaluationSettings, {"selection_metric": "map@q"}, "selection_metric"),
        (RunSettings, {}, "run_dir"),
        (RunSettings, {"log_to": "sql://me:secret@host/runs"}, "log_to=sql://host/runs"),
        (Experiment, {"run_dir": "a", "selection": "validation"}, "selection"),
    ],
)
def test_each_stage_refuses_its_own_mistakes_and_so_does_the_experiment(stage, given, names):
    for kind, settings in (
        (stage, given),
        (Experiment, given if stage is RunSettings else {"run_dir": "a", **given}),
    ):
        with pytest.raises(UserError, match=names):
            kind(**settings)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_fills_in_what_is_not_given(recipe):
    file = ROOT / f"configs/recipes/{recipe}.flags"
    written = file.read_text(encoding="utf-8") + "--recipe=none\n"
    found = with_recipe(recipe, {})
    assert Experiment.of_recipe(recipe, run_dir="a") == Experiment(run_dir="a", **found)
    assert Experiment.from_flags(written, run_dir="a") == Experiment(run_dir="a", **found)
    del found["min_images"], found["epochs"]
    assert with_recipe(recipe, {"learning_rate": 0.5, "epochs": 3}) == {
        **found,
        "learning_rate": 0.5,
        "epochs": 3,
    }


@pytest.mark.parametrize(
    ("given", "recipe"),
    [
        ({}, "scratch"),
        ({"weights": "imagenet"}, "finetune"),
        ({"start_from": "runs/old"}, "finetune"),
        ({"weights": "imagenet", "backbone_rate": 0.0}, "frozen"),
        ({"features": "vectors.npz"}, "frozen"),
    ],
)
def test_the_recipe_follows_from_what_trains(given, recipe):
    assert recipe_for(given) == recipe
    assert with_recipe("auto", given) == with_recipe(recipe, given)


def test_what_a_recipe_sets_in_vain_is_left_out():
    assert "backbone_rate" not in with_recipe("frozen", {"features": "vectors.npz"})
    assert "schedule" not in with_recipe("finetune", {"drop_epochs": "8"})


def test_few_images_make_longer_epochs_and_executions_divide_them():
    for asked, expected in ((16, 12), (5, 4), (1, 1)):
        assert OptimizationSettings(steps_per_execution=asked).execution_steps(12) == expected
    settings = OptimizationSettings(epochs=12, min_images=9601)
    assert [settings.epoch_steps(passed, 20) for passed in (11, 41, 200)] == [41, 41, 200]
    assert settings.epoch_steps(1, 9601) == 1
    assert OptimizationSettings(epochs=0, min_images=100).epoch_steps(7, 2) == 50
    assert OptimizationSettings(steps_per_epoch=5).epoch_steps(7, 2) == 5


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (OptimizationSettings, "optimizer", optimizers._CLASSES),
        (ModelSettings, "pooling", embedder.POOLINGS),
        (ModelSettings, "batch_norm", embedder.BATCH_NORM_MODES),
        (DataSettings, "resize_mode", transforms.MODES),
        (Hierarchical, "weights", sampling.WEIGHTS),
        (Hierarchical, "short_classes", sampling.SHORT_CLASSES),
    ],
)
def test_the_words_of_a_setting_are_those_of_what_it_builds(kind, name, words):
    assert set(fields_of(kind)[name].metadata["rules"].words) == set(words)


def test_the_augmentations_are_those_of_the_transform():
    assert set(Augmentation.choices) == set(transforms.KINDS)


@pytest.mark.parametrize(
    ("family", "build"),
    [
        (Sampling, run_data.build_sampler),
        (HoldoutSampling, run_data.hold_out),
        (Head, build.projection),
    ],
)
def test_every_choice_has_what_builds_it(family, build):
    for name, kind in family.choices.items():
        assert build.dispatch(kind) is not build.dispatch(object), name
