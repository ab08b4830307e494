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


def test_an_experiment_has_the_settings_of_the_stages_and_its_flag_file_makes_it_again():
    assert names(Experiment) == [name for stage in STAGES for name in names(stage)]
    assert all(meanings(Experiment)[name].endswith(".") for name in names(Experiment))
    experiment = Experiment(run_dir="a b", objectives="am_softmax + 0.4 * jrs", learning_rate=3e-5, imports="keras")
    assert Experiment.from_flags(experiment.as_flags()) == experiment
    assert "--import=keras\n" in experiment.as_flags()


@pytest.mark.parametrize(
    ("stage", "given", "says"),
    [
        (DataSettings, {"image_size": 300}, "--resize=256 is smaller than --image_size=300"),
        (DataSettings, {"sampling": "neighbors(often=2)"}, "there is no option 'often', only every, anchor_classes"),
        (DataSettings, {"augmentation": "random_resized_crop(min_scale=0)"}, "min_scale must be above 0 and at most 1"),
        (DataSettings, {"holdout_sampling": "random(part=-1)"}, "--holdout_sampling: part must be"),
        (OptimizationSettings, {"optimizer": "adamm"}, "--optimizer=adamm: must be one of adam, adamw, sgd, rmsprop"),
        (OptimizationSettings, {"epochs": 4, "warm_up_epochs": 4.0}, "--warm_up_epochs=4 leaves none of --epochs=4"),
        (EvaluationSettings, {"ks": "2", "selection": "test", "selection_metric": "recall@1"}, "add 1 to --ks=2"),
        (EvaluationSettings, {"selection_metric": "map@q"}, "--selection_metric=map@q: unknown metric 'map@q'"),
        (RunSettings, {}, "--run_dir is missing"),
        (RunSettings, {"log_to": "sql://me:secret@host/runs"}, "--log_to=sql://host/runs has a user or password"),
        (Experiment, {"run_dir": "a", "selection": "validation"}, "--selection=validation needs held-out classes"),
    ],
)
def test_each_stage_refuses_its_own_mistakes_and_so_does_the_experiment(stage, given, says):
    for kind, settings in ((stage, given), (Experiment, given if stage is RunSettings else {"run_dir": "a", **given})):
        with pytest.raises(UserError) as caught:
            kind(**settings)
        assert says in str(caught.value)


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
    assert with_recipe("none", {"seed": 1}) == {"seed": 1}
    assert "schedule" not in with_recipe("finetune", {"drop_epochs": "8"})


def test_an_execution_has_the_most_steps_that_divide_an_epoch():
    for asked, expected in ((16, 12), (5, 4), (1, 1)):
        assert OptimizationSettings(steps_per_execution=asked).execution_steps(12) == expected


def test_few_images_make_longer_epochs():
    settings = OptimizationSettings(epochs=12, min_steps=481)
    assert (settings.epoch_steps(11), settings.epoch_steps(200)) == (41, 200)
    assert OptimizationSettings(epochs=0, min_steps=100).epoch_steps(7) == 100
    assert OptimizationSettings(steps_per_epoch=5).epoch_steps(7) == 5
