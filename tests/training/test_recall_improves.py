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
        # From scratch, pairs take hold within a few hundred steps; proxies of hundreds of classes
        # need more.
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
