"""The flags that choose a batch's composition, and what they say where the data cannot give it."""

import dataclasses

import pytest

from tests.sampling_workers import made
from tfdml.data import sampling
from tfdml.errors import UserError
from tfdml.training.building import make_sampler
from tfdml.training.experiment import Experiment


def experiment(**settings):
    return Experiment(**{"run_dir": "none", "classes_per_batch": 4, "images_per_class": 2, "batch_size": 8, **settings})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, lambda d: sampling.ClassBalancedSampler(d.labels, 4, 2, 7)),
        ({"short_classes": "drop"}, lambda d: sampling.ClassBalancedSampler(d.labels, 4, 2, 7, "drop")),
        ({"sampling": "shuffle"}, lambda d: sampling.ShuffleSampler(len(d), 8, 7)),
        ({"sampling": "whole_classes"}, lambda d: sampling.WholeClassSampler(d.labels, 8, 7)),
        (
            {"sampling": "hierarchical", "super_classes_per_batch": 2, "super_class_weights": "uniform"},
            lambda d: sampling.HierarchicalSampler(d.labels, d.super_labels, 4, 2, 2, 7, "uniform"),
        ),
        (
            {
                "sampling": "hierarchical",
                "classes_per_batch": 3,
                "short_classes": "drop",
                "short_super_classes": "drop",
            },
            lambda d: sampling.HierarchicalSampler(
                d.labels, d.super_labels, 3, 2, 1, 7, "proportional", "drop", "drop"
            ),
        ),
    ],
)
def test_the_sampler_of_the_flags(settings, expected):
    data = made()
    run = experiment(seed=7, **settings)
    assert Experiment.from_flags(run.as_flags()) == run
    for step in range(20):
        assert make_sampler(run.data, data, run.seed).batch(step).tolist() == expected(data).batch(step).tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling": "classes"}, "--sampling=classes: must be one of class_balanced, shuffle, whole_classes, hierarc"),
        ({"super_classes_per_batch": 0}, "--super_classes_per_batch=0: out of range"),
        ({"super_class_weights": "even"}, "--super_class_weights=even: must be one of proportional, uniform"),
        ({"short_super_classes": "keep"}, "--short_super_classes=keep: must be one of merge, drop"),
        (
            {"sampling": "hierarchical", "super_classes_per_batch": 3},
            "=4` is no multiple of `super_classes_per_batch=3`",
        ),
        (
            {"sampling": "hierarchical", "super_classes_per_batch": 4},
            "`super_classes_per_batch=4`, but the data has 3 su",
        ),
        ({"sampling": "whole_classes", "batch_size": 37}, "`batch_size=37`, but the data has 36 images"),
        (
            {"sampling": "whole_classes", "batch_size": 9},
            "9 images cannot be shared out evenly over 2 replicas: make `b",
        ),
        ({"classes_per_batch": 3, "images_per_class": 3}, "9 images cannot be shared out evenly over 2 replicas: make"),
    ],
)
def test_flags_say_what_is_wrong(settings, message):
    with pytest.raises(UserError, match=message):
        make_sampler(experiment(**settings).data, made(), seed=0, replicas=2)


def test_hierarchical_batches_need_super_classes():
    data = dataclasses.replace(made(), super_labels=None)
    with pytest.raises(UserError, match="hierarchical sampling needs super-classes, and made has none"):
        make_sampler(experiment(sampling="hierarchical").data, data, seed=0)
