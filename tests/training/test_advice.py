"""What is said before a run that hardly anybody means."""

import pytest

from tfdml.models import Embedder
from tfdml.training.advice import doubts
from tfdml.training.settings import ModelSettings


@pytest.fixture(scope="module")
def mobilenet():
    return Embedder("mobilenetv2", embedding_dim=4, image_size=32)


@pytest.mark.parametrize("batch_norm", ["frozen", "statistics"])
def test_random_weights_behind_frozen_statistics_are_doubted(mobilenet, batch_norm):
    (line,) = doubts(ModelSettings(backbone="mobilenetv2", batch_norm=batch_norm), mobilenet)
    assert line.startswith(f"WARNING: --weights=none with --batch_norm={batch_norm}: mobilenetv2 begins with random")
    assert "--weights=imagenet;" in line
    assert "--batch_norm=train" in line
    assert "\n" not in line


def test_weights_that_are_published_as_a_checkpoint_are_to_be_converted():
    embedder = Embedder("googlenet_bn", embedding_dim=4, image_size=64)
    (line,) = doubts(ModelSettings(backbone="googlenet_bn"), embedder)
    assert "--weights=FILE that python -m tools.convert_weights writes" in line


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_norm": "train"},
        {"weights": "imagenet"},
        {"weights": "mobilenet.weights.h5"},
        {"start_from": "runs/old"},
    ],
)
def test_what_is_meant_is_not(mobilenet, settings):
    assert doubts(ModelSettings(**{"backbone": "mobilenetv2", **settings}), mobilenet) == []


def test_a_network_without_published_weights_or_without_batch_norm_is_not():
    conv4 = Embedder("conv4", embedding_dim=4, image_size=32)
    assert doubts(ModelSettings(backbone="conv4(width=64)"), conv4) == []
    googlenet = Embedder("googlenet", embedding_dim=4, image_size=64)
    assert doubts(ModelSettings(backbone="googlenet"), googlenet) == []
