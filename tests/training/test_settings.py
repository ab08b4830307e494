"""The settings of each stage: which fields they hold, what they refuse, and that they are those of the experiment."""

import dataclasses

import pytest

from tfdml.errors import UserError
from tfdml.training.settings import (
    DataSettings,
    EvaluationSettings,
    Experiment,
    ModelSettings,
    OptimizationSettings,
    RunSettings,
    meanings,
)

STAGES = (DataSettings, ModelSettings, OptimizationSettings, EvaluationSettings, RunSettings)


def names(settings):
    return [field.name for field in dataclasses.fields(settings)]


def test_every_setting_of_an_experiment_belongs_to_one_stage_and_they_follow_one_another():
    assert names(Experiment) == [name for stage in STAGES for name in names(stage)]
    assert len(set(names(Experiment))) == len(names(Experiment))
    for field in dataclasses.fields(Experiment):
        assert meanings(Experiment)[field.name].endswith("."), field.name


def test_an_experiment_is_the_settings_of_every_stage():
    experiment = Experiment(run_dir="a", image_size=28, resize=32)
    for stage in STAGES:
        assert isinstance(experiment, stage)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(experiment, names(stage)[0], "other")


def test_the_flag_file_makes_the_same_experiment():
    experiment = Experiment(run_dir="a b", objectives="am_softmax + 0.4 * jrs", learning_rate=3e-5, flip=False)
    assert Experiment.from_flags(experiment.as_flags()) == experiment
    assert experiment.as_flags().startswith("--dataset=glyphs\n")


@pytest.mark.parametrize(
    ("stage", "given", "says"),
    [
        (DataSettings, {"image_size": 0}, "--image_size=0: out of range. Height and width"),
        (DataSettings, {"image_size": 300}, "--resize=256 is smaller than --image_size=300"),
        (DataSettings, {"dataset_options": "size"}, "--dataset_options='size'"),
        (DataSettings, {"policy": "blur +"}, "--policy='blur +': it cannot be read"),
        (ModelSettings, {"dropout": 1.0}, "--dropout=1.0: out of range"),
        (ModelSettings, {"embedding_dim": 10, "ensemble_heads": 3}, "no multiple of --ensemble_heads"),
        (ModelSettings, {"backbone": ""}, "--backbone='': it cannot be read"),
        (OptimizationSettings, {"optimizer": "adamm"}, "--optimizer=adamm: must be one of adam, adamw, sgd, rmsprop"),
        (OptimizationSettings, {"drop_epochs": "5,3"}, "--drop_epochs=5,3: the epochs must ascend"),
        (OptimizationSettings, {"epochs": True}, "--epochs must be an integer"),
        (EvaluationSettings, {"ks": "0"}, "--ks=0: write integers of 1"),
        (EvaluationSettings, {"ks": "2", "selection": "test", "selection_metric": "recall@1"}, "add 1 to --ks=2"),
        (EvaluationSettings, {"moment_embedder": True, "selection": "test"}, "use --selection=last"),
        (RunSettings, {}, "--run_dir is missing"),
        (RunSettings, {"run_dir": "a", "seed": -1}, "--seed=-1: out of range"),
    ],
)
def test_each_stage_refuses_its_own_mistakes_and_so_does_the_experiment(stage, given, says):
    for kind, settings in ((stage, given), (Experiment, given if stage is RunSettings else {"run_dir": "a", **given})):
        with pytest.raises(UserError) as caught:
            kind(**settings)
        assert says in str(caught.value)


def test_what_two_stages_must_agree_on_is_refused_by_the_experiment():
    assert EvaluationSettings(selection="validation").selection == "validation"
    with pytest.raises(UserError, match="--selection=validation needs held-out classes"):
        Experiment(run_dir="a", selection="validation")
    assert Experiment(run_dir="a", selection="validation", holdout_classes=0.2).holdout_classes == 0.2
