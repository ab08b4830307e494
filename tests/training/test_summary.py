"""What a dry run says of an experiment."""

import numpy as np
import pytest

from tests.training import runs
from tfdml.errors import UserError
from tfdml.training import assembly
from tfdml.training.summary import describe


@pytest.fixture
def said(tmp_path, monkeypatch):
    """The lines on a tiny experiment on noise, their blanks as one."""
    monkeypatch.setattr(assembly, "load_splits", lambda *arguments: runs.SPLITS)

    def lines(**changes):
        text = describe(runs.experiment(tmp_path / "run", **changes))
        assert not (tmp_path / "run").exists()
        return [" ".join(line.split()) for line in text.splitlines()]

    return lines


def test_images_and_classes_of_each_split(said):
    lines = said()
    assert lines[:4] == [
        "data glyphs from the library itself",
        "train 32 images of 8 classes",
        "validation 20 images of 5 classes",
        "test 24 images of 6 classes",
    ]


def test_trained_parameters_and_rate_of_each_part(said):
    rates = {"backbone_rate": 0.001, "objective_rate": 0.1}
    lines = said(objectives="am_softmax + jrs", drop_epochs="1", drop_factor=0.5, **rates)
    first = lines.index("trained parameters learning rate")
    tiny = runs.learner(runs.experiment("unused"), 8).parts()
    backbone, projection = (sum(np.size(value) for value in tiny[part]) for part in ("backbone", "projection"))
    assert lines[first + 1 : first + 5] == [
        f"backbone {backbone:,} 0.001",
        f"projection {projection:,} 0.01",
        f"am_softmax {8 * 8:,} 0.1",
        "jrs 0 -",
    ]
    assert "optimiser adam in keras form, times 0.5 after epoch 1" in lines


def test_a_backbone_that_does_not_train_has_no_rate(said):
    assert "backbone 0 -" in said(backbone_rate=0.0)


def test_steps_in_an_epoch_and_in_all(said):
    lines = said(epochs=50, steps_per_epoch=40)
    assert "schedule 40 steps an epoch, 50 epochs: 2,000 steps, 16,000 images, 500.0 times the training images" in lines
    assert "schedule 4 steps an epoch, 3 epochs: 12 steps, 96 images, 3.0 times the training images" in said(
        epochs=3, steps_per_epoch=0
    )


def test_a_batch_by_chunks_and_the_memory_of_a_term(said):
    lines = said(gradient_cache=3, cross_batch_memory=64, xbm_start=2, objectives="contrastive(margin=0.5)")
    assert "batches 8 images (4 classes x 2), in chunks of 3" in lines
    (term,) = [line for line in lines if line.startswith("1 * contrastive")]
    assert "margin=0.5" in term
    assert "size=64, start=2" in term


def test_a_weight_that_will_be_measured(said):
    lines = said(objectives="2 * contrastive + auto(share=0.25) * gor")
    assert "auto(share=0.25, steps=100) * gor representation=embedding" in lines


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"cache": "auto", "epochs": 10, "steps_per_epoch": 100}, "both are kept"),
        ({"cache": "auto", "epochs": 1}, "neither is kept, as the run sees its images hardly more than once"),
        ({"cache": "true", "epochs": 1}, "both are kept"),
        ({"cache": "false"}, "neither is kept"),
    ],
)
def test_the_memory_of_the_cache_and_whether_it_is_on(said, changes, kept):
    (line,) = [line for line in said(**changes) if line.startswith("cache ")]
    assert line.startswith(f"cache --cache={changes['cache']}: training images take about 0.0 MB decoded, evaluation")
    assert line.endswith(f"MB may be used: {kept}")


def test_a_doubt_stands_first(said):
    lines = said(backbone="mobilenetv2(alpha=0.35)", batch_norm="frozen", image_size=32, resize=32)
    assert lines[0].startswith("WARNING: --weights=none with --batch_norm=frozen: mobilenetv2 begins with random")
    assert not any(line.startswith("WARNING") for line in said())


def test_a_start_that_is_not_there_is_found_before_the_images_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(assembly, "load_splits", None)
    with pytest.raises(UserError, match="--start_from=/no/run: there is no such file or folder"):
        describe(runs.experiment(tmp_path / "run", start_from="/no/run"))
