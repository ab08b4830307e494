"""Whole training runs: Recall@1 on classes never seen must rise."""

import pytest

from tfdml.training import Experiment, train


@pytest.mark.slow
def test_on_glyphs(tmp_path):
    experiment = Experiment(
        run_dir=str(tmp_path / "run"),
        dataset_options="images_per_class=10, size=32",
        image_size=28,
        resize=32,
        flip=False,
        backbone="conv4(width=32)",
        batch_norm="train",
        embedding_dim=64,
        # From scratch, pairs take hold within a few hundred steps; proxies of hundreds of classes need more.
        objectives="contrastive",
        classes_per_batch=25,
        images_per_class=4,
        epochs=4,
        steps_per_epoch=60,
        learning_rate=3e-3,
        evaluate_every=0,
        cache="true",
    )
    result = train(experiment).result
    assert result["metrics"]["recall@1"] > result["metrics_before"]["recall@1"] + 0.2


@pytest.mark.slow
def test_on_real_cars_with_imagenet_weights(tmp_path, shared_data):
    experiment = Experiment(
        run_dir=str(tmp_path / "run"),
        dataset="cars196",
        data_dir=str(shared_data / "data" / "cars196"),
        image_size=96,
        resize=112,
        backbone="mobilenetv2(alpha=0.35)",
        weights=str(shared_data / "weights" / "mnv2_035_notop.weights.h5"),
        objectives="am_softmax + jrs",
        sampling="shuffle",
        batch_size=100,
        epochs=2,
        steps_per_epoch=80,
        projection_rate=1e-2,
        objective_rate=1e-2,
        evaluate_every=0,
        report=False,
    )
    result = train(experiment).result
    assert result["metrics"]["recall@1"] > result["metrics_before"]["recall@1"] + 0.05
