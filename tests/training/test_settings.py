"""The settings of each stage: which fields they hold, what they refuse, and that they are those of the experiment."""

import dataclasses

import pytest

from tests.experiments import ROOT
from tfdml.errors import UserError
from tfdml.training.settings import (
    RECIPES,
    DataSettings,
    EvaluationSettings,
    Experiment,
    ModelSettings,
    OptimizationSettings,
    RunSettings,
    meanings,
    recipe_for,
    with_recipe,
)

STAGES = (DataSettings, ModelSettings, OptimizationSettings, EvaluationSettings, RunSettings)


def names(settings):
    return [field.name for field in dataclasses.fields(settings)]


def test_every_setting_of_an_experiment_belongs_to_one_stage_and_they_follow_one_another():
    assert names(Experiment) == [name for stage in STAGES for name in names(stage)]
    assert len(set(names(Experiment))) == len(names(Experiment))
    for field in dataclasses.fields(Experiment):
        assert meanings(Experiment)[field.name].endswith("."), field.name


def test_the_flag_file_makes_the_same_experiment():
    experiment = Experiment(run_dir="a b", objectives="am_softmax + 0.4 * jrs", learning_rate=3e-5, flip=False)
    assert Experiment.from_flags(experiment.as_flags()) == experiment
    assert experiment.as_flags().startswith("--dataset=glyphs\n")


@pytest.mark.parametrize(
    ("stage", "given", "says"),
    [
        (DataSettings, {"image_size": 0}, "--image_size=0: out of range. Height and width"),
        (DataSettings, {"image_size": 300}, "--resize=256 is smaller than --image_size=300"),
        (DataSettings, {"sampling": "neighbors(often=2)"}, "there is no option 'often', only every, anchor_classes"),
        (DataSettings, {"augmentation": "random_resized_crop(min_scale=0)"}, "min_scale must be above 0 and at most 1"),
        (DataSettings, {"holdout_sampling": "random(part=-1)"}, "--holdout_sampling: part must be"),
        (OptimizationSettings, {"optimizer": "adamm"}, "--optimizer=adamm: must be one of adam, adamw, sgd, rmsprop"),
        (OptimizationSettings, {"epochs": 4, "warm_up_epochs": 4.0}, "--warm_up_epochs=4 leaves none of --epochs=4"),
        (EvaluationSettings, {"ks": "2", "selection": "test", "selection_metric": "recall@1"}, "add 1 to --ks=2"),
        (EvaluationSettings, {"selection_metric": "map@q"}, "--selection_metric=map@q: unknown metric 'map@q'"),
        (RunSettings, {}, "--run_dir is missing"),
    ],
)
def test_each_stage_refuses_its_own_mistakes_and_so_does_the_experiment(stage, given, says):
    for kind, settings in ((stage, given), (Experiment, given if stage is RunSettings else {"run_dir": "a", **given})):
        with pytest.raises(UserError) as caught:
            kind(**settings)
        assert says in str(caught.value)


def test_a_password_in_a_setting_is_refused_and_not_shown():
    message = "^--log_to=mlflow:postgresql://host/runs has a user or password"
    with pytest.raises(UserError, match=message):
        RunSettings(log_to="mlflow:postgresql://me:secret@host/runs")


def test_what_two_stages_must_agree_on_is_refused_by_the_experiment():
    assert EvaluationSettings(selection="validation", selection_metric="map@5").selection == "validation"
    with pytest.raises(UserError, match="--selection=validation needs held-out classes"):
        Experiment(run_dir="a", selection="validation")
    assert Experiment(run_dir="a", selection="validation", holdout_classes=0.2).holdout_classes == 0.2


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_fills_in_what_is_not_given(recipe):
    file = ROOT / f"configs/recipes/{recipe}.flags"
    written = file.read_text(encoding="utf-8") + "--recipe=none\n"
    found = with_recipe(recipe, {})
    assert Experiment.of_recipe(recipe, run_dir="a") == Experiment(run_dir="a", **found)
    assert Experiment.from_flags(f"--recipe={recipe}", run_dir="a") == Experiment(run_dir="a", **found)
    assert Experiment.from_flags(written, run_dir="a") == Experiment(run_dir="a", **found)
    del found["min_steps"], found["epochs"]
    assert with_recipe(recipe, {"learning_rate": 0.5, "epochs": 3}) == {**found, "learning_rate": 0.5, "epochs": 3}


@pytest.mark.parametrize(
    ("given", "recipe"),
    [
        ({}, "scratch"),
        ({"weights": "imagenet"}, "finetune"),
        ({"backbone": "hub:dinov2_small"}, "finetune"),
        ({"start_from": "runs/old"}, "finetune"),
        ({"weights": "imagenet", "backbone_rate": 0.0}, "frozen"),
        ({"features": "vectors.npz"}, "frozen"),
    ],
)
def test_the_recipe_follows_from_what_trains(given, recipe):
    assert recipe_for(given) == recipe
    assert with_recipe("auto", given) == with_recipe(recipe, given)


def test_what_a_recipe_sets_in_vain_is_left_out():
    assert "backbone_rate" in with_recipe("auto", {"backbone_rate": 0.0})
    assert "backbone_rate" not in with_recipe("frozen", {"features": "vectors.npz"})
    assert with_recipe("none", {"seed": 1}) == {"seed": 1}
    assert "schedule" not in with_recipe("finetune", {"drop_epochs": "8"})


def test_few_images_make_longer_epochs():
    settings = OptimizationSettings(epochs=12, min_steps=481)
    assert (settings.epoch_steps(11), settings.epoch_steps(200)) == (41, 200)
    assert OptimizationSettings(epochs=0, min_steps=100).epoch_steps(7) == 100
    assert OptimizationSettings(steps_per_epoch=5).epoch_steps(7) == 5
