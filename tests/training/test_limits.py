"""What is refused before a run begins."""

import keras
import pytest
import tensorflow as tf

from tests.training import runs
from tfdml import losses, objectives
from tfdml.data.transforms import TrainTransform
from tfdml.errors import UserError
from tfdml.models import Embedder
from tfdml.training import limits
from tfdml.training.settings import DataSettings

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
        limits.check_pairs(DataSettings(**flags), [PROXIES, term])


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
    limits.check_pairs(DataSettings(**flags), [term])


def test_a_memory_that_never_starts_is_refused():
    terms = [objectives.CrossBatchMemory(losses.ContrastiveLoss(), size=8, start=100, name="xbm")]
    limits.check_starts(terms, 101)
    limits.check_starts(terms, 0)
    with pytest.raises(UserError, match=r"xbm: the memory starts after 100 steps .* and the run has 100: start earl"):
        limits.check_starts(terms, 100)


def test_the_memory_of_a_step_by_hand():
    embedder = Embedder("conv4", embedding_dim=4, image_size=32)
    view = TrainTransform(resize=32, image_size=32)
    # Each block's convolution and batch norm, of 64 channels, at 32, 16, 8 and 4 px a side.
    activations = 2 * 64 * (32**2 + 16**2 + 8**2 + 4**2)
    images = 3 * 32**2
    resized = 4 * 3 * 32**2
    assert limits.step_memory(embedder, view, 6) == resized + 6 * (images * 5 + activations * 4)
    assert limits.step_memory(embedder, view, 6, chunk=64) == limits.step_memory(embedder, view, 6)
    # All images, and the work on two of them.
    assert limits.step_memory(embedder, view, 6, chunk=2) == resized + 6 * images + 2 * (images * 4 + activations * 4)
    large = TrainTransform("multi_resolution", image_size=32, resolutions=(0.8, 100.0))
    assert limits.step_memory(embedder, large, 6) > 4 * 3 * 3200**2
    half = Embedder("conv4", embedding_dim=4, image_size=32, dtype="mixed_bfloat16")
    assert limits.step_memory(half, view, 6) == resized + 6 * (images * 5 + activations * 2)
    embedder.freeze_backbone()
    assert limits.step_memory(embedder, view, 6) == resized + 6 * (images * 5 + 2 * 64 * 32**2 * 4)


def build(optimizer, units, inputs, times=1, averages=False):
    with limits.weights_within_memory(optimizer, averages):
        for _ in range(times):
            keras.layers.Dense(units).build((None, inputs))


def test_weights_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr(limits, "free_memory", lambda: 1e6)
    build("adam", 100, 600)  # 240 kB, and as much for the gradient and each of two moments
    with pytest.raises(UserError, match=r"a weight \(kernel\) has the shape \(1000, 10000000000\); lower --embedding"):
        build("adam", 10**10, 1000)
    with pytest.raises(UserError, match=r"and 0\.0 GB are free"):
        build("adam", 100, 600, times=2)
    build("sgd", 100, 800)


def test_averages_take_memory_too(monkeypatch):
    """Five times a weight of 240 kB for adam with its gradient, moments and average, and four times without."""
    monkeypatch.setattr(limits, "free_memory", lambda: 1.1e6)
    build("adam", 100, 600)
    with pytest.raises(UserError, match=r"training the network would take more than 0\.0 GB"):
        build("adam", 100, 600, averages=True)
    small = {"backbone": "conv4(width=2)", "embedding_dim": 600, "optimizer": "adam"}
    # The projection has 2 x 600 weights and 600 biases; the network and the proxies-free loss have a few more.
    monkeypatch.setattr(limits, "free_memory", lambda: 4.5 * 4 * 1800)
    runs.learner(runs.experiment("run", **small), num_classes=4)
    with pytest.raises(UserError, match="training the network would take more"):
        runs.learner(runs.experiment("run", ema=0.9, **small), num_classes=4)


def test_a_weight_may_begin_as_a_number(monkeypatch):
    monkeypatch.setattr(limits, "free_memory", lambda: 100.0)
    with limits.weights_within_memory("adam"):
        assert float(tf.Variable(1.5)) == 1.5


def test_on_a_gpu_the_images_have_to_fit_the_host(monkeypatch):
    embedder, view = Embedder("conv4", embedding_dim=4, image_size=32), TrainTransform(resize=32, image_size=32)
    host = 4 * 3 * 32**2 + 6 * 3 * 32**2
    assert limits.images_memory(view, 6) == host
    asked = []
    monkeypatch.setattr(limits, "require_memory", lambda size, *words: asked.append(size))
    for on_gpu in (False, True):
        monkeypatch.setattr(limits.distribution, "on_gpu", lambda on_gpu=on_gpu: on_gpu)
        limits.check_memory(embedder, view, 6)
    assert asked == [limits.step_memory(embedder, view, 6), host]
