"""What is refused before a run begins."""

import keras
import pytest

from tfdml import losses, objectives
from tfdml.errors import UserError
from tfdml.models import Embedder
from tfdml.training import Experiment, limits


def experiment(**changes):
    return Experiment(run_dir="unused", **{"image_size": 32, "resize": 32, "backbone": "conv4(width=8)", **changes})


def test_the_size_of_a_batch():
    assert limits.batch_size(experiment(classes_per_batch=3, images_per_class=4)) == 12
    assert limits.batch_size(experiment(sampling="whole_classes", batch_size=7)) == 7


PAIRS = objectives.MetricLoss(losses.ContrastiveLoss(), name="contrastive")
PROXIES = objectives.ProxyLoss(losses.AMSoftmaxLoss(), 3)
HORDE = objectives.HighOrderMomentLoss(losses.ContrastiveLoss(), orders=2, dim=4)
HORDE_OF_PROXIES = objectives.HighOrderMomentLoss(losses.AMSoftmaxLoss(), orders=2, dim=4, num_classes=3)


@pytest.mark.parametrize(
    ("term", "flags", "says"),
    [
        (PAIRS, {"images_per_class": 1}, "--images_per_class=1: contrastive learns from pairs of images of one class"),
        (PAIRS, {"classes_per_batch": 1}, "--classes_per_batch=1: contrastive learns from pairs of images of diff"),
        (PAIRS, {"classes_per_batch": 1, "images_per_class": 1}, "no batch would hold one"),
        (PAIRS, {"sampling": "shuffle", "batch_size": 1}, "--batch_size=1: contrastive"),
        (HORDE, {"images_per_class": 1}, "--images_per_class=1"),
        (objectives.DensityAdaptivity(3), {"images_per_class": 1}, "--images_per_class=1"),
        (objectives.GlobalOrthogonal(), {"classes_per_batch": 1}, "--classes_per_batch=1"),
        (objectives.RankMI(), {"classes_per_batch": 1}, "--classes_per_batch=1"),
    ],
)
def test_batches_without_the_pairs_that_a_term_learns_from_are_refused(term, flags, says):
    with pytest.raises(UserError, match=says):
        limits.check_pairs(experiment(**flags), [PROXIES, term])


@pytest.mark.parametrize(
    ("term", "flags"),
    [
        (PAIRS, {"classes_per_batch": 2, "images_per_class": 2}),
        (PAIRS, {"sampling": "shuffle", "batch_size": 2, "images_per_class": 1}),
        (PROXIES, {"classes_per_batch": 1, "images_per_class": 1}),
        (HORDE_OF_PROXIES, {"images_per_class": 1}),
        (objectives.GlobalOrthogonal(), {"images_per_class": 1}),
        (objectives.DensityAdaptivity(3), {"classes_per_batch": 1}),
    ],
)
def test_batches_that_hold_them_are_not(term, flags):
    limits.check_pairs(experiment(**flags), [term])


def test_the_memory_of_a_step_by_hand():
    embedder = Embedder("conv4", embedding_dim=4, image_size=32)
    settings = experiment(classes_per_batch=3, images_per_class=2, batch_norm="train")
    # Each block's convolution and batch norm, of 64 channels, at 32, 16, 8 and 4 px a side.
    activations = 2 * 64 * (32**2 + 16**2 + 8**2 + 4**2)
    images = 3 * 32**2
    resized = 4 * 3 * 32**2
    assert limits.step_memory(settings, embedder) == resized + 6 * (images * 5 + activations * 4)
    frozen = experiment(classes_per_batch=3, images_per_class=2, backbone_rate=0.0)
    assert limits.step_memory(frozen, embedder) == resized + 6 * (images * 5 + 2 * 64 * 32**2 * 4)
    large = experiment(classes_per_batch=3, images_per_class=2, augmentation="multi_resolution", max_resolution=100.0)
    assert limits.step_memory(large, embedder) > 4 * 3 * 3200**2


def build(settings, units, inputs, times=1):
    with limits.weights_within_memory(settings):
        for _ in range(times):
            keras.layers.Dense(units).build((None, inputs))


def test_weights_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr(limits, "free_memory", lambda: 1e6)
    build(experiment(), 100, 600)  # 240 kB, and as much for the gradient and each of two moments
    with pytest.raises(UserError, match=r"a weight \(kernel\) has the shape \(1000, 10000000000\); lower --embedding"):
        build(experiment(), 10**10, 1000)
    with pytest.raises(UserError, match=r"and 0\.0 GB are free"):
        build(experiment(), 100, 600, times=2)
    build(experiment(optimizer="sgd"), 100, 800)
