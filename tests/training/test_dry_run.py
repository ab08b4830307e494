"""What a run would do, in words; a few steps of it; and its first batch as a picture."""

import types

import keras
import numpy as np
import pytest
from PIL import Image

from tests.training import runs
from tfdml.data.pipeline import training_batches
from tfdml.errors import UserError
from tfdml.training import build
from tfdml.training import dry_run as probing
from tfdml.training.build import build_components
from tfdml.training.dry_run import Probe, describe, probe, probe_lines, write_preview
from tfdml.training.images import load_splits, make_sampler, make_transforms
from tfdml.training.settings import DataSettings


@pytest.fixture
def said(tmp_path, monkeypatch):
    """The lines on a tiny experiment on noise, their blanks as one."""
    monkeypatch.setattr(build, "load_splits", lambda *arguments: runs.SPLITS)

    def lines(**changes):
        text = describe(runs.experiment(tmp_path / "run", **changes))
        assert not (tmp_path / "run").exists()
        return [" ".join(line.split()) for line in text.splitlines()]

    return lines


def test_images_and_classes_of_each_split(said):
    lines = said()
    assert lines[:4] == [
        "data glyphs",
        "train 32 images of 8 classes",
        "validation 20 images of 5 classes",
        "test 24 images of 6 classes",
    ]


def test_trained_parameters_and_rate_of_each_part(said):
    rates = {"backbone_rate": 0.001, "objective_rate": 0.1}
    lines = said(objectives="am_softmax + jrs", **rates)
    first = lines.index("trained parameters learning rate")
    tiny = runs.learner(runs.experiment("unused"), 8).parts()
    backbone, projection = (sum(np.size(value) for value in tiny[part]) for part in ("backbone", "projection"))
    assert lines[first + 1 : first + 5] == [
        f"backbone {backbone:,} 0.001",
        f"projection {projection:,} 0.01",
        f"am_softmax {8 * 8:,} 0.1",
        "jrs 0 -",
    ]


def test_a_backbone_that_does_not_train_has_no_rate(said):
    assert "backbone 0 -" in said(backbone_rate=0.0)


def test_steps_in_an_epoch_and_in_all(said):
    lines = said(epochs=50, steps_per_epoch=40)
    assert "schedule 40 steps an epoch, 50 epochs: 2,000 steps, 16,000 images, 500.0 times the training images" in lines
    assert "schedule 4 steps an epoch, 3 epochs: 12 steps, 96 images, 3.0 times the training images" in said(
        epochs=3, steps_per_epoch=0
    )


def test_a_batch_and_the_memory_of_a_term(said):
    lines = said(objectives="xbm(loss=contrastive(margin=0.5), size=64, start=2)")
    assert "batches 8 images" in lines
    (term,) = [line for line in lines if line.startswith("CrossBatchMemory(name='xbm'")]
    assert "margin=0.5" in term
    assert "size=64, start=2" in term


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


@pytest.mark.slow
def test_a_doubt_stands_first(said):
    lines = said(backbone="mobilenetv2(alpha=0.35)", batch_norm="frozen", image_size=32, resize=32)
    assert lines[0].startswith("WARNING: batch_norm='frozen' keeps the BatchNorm statistics of mobilenetv2")
    assert not any(line.startswith("WARNING") for line in said())


def test_a_start_that_is_not_there_is_found_before_the_images_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "load_splits", None)
    with pytest.raises(UserError, match="--start_from=/no/run: there is no such file or folder"):
        describe(runs.experiment(tmp_path / "run", start_from="/no/run"))


def test_the_numbers_of_the_run_follow_from_those_of_the_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "load_splits", lambda *arguments: runs.SPLITS)
    parts = build_components(runs.experiment(tmp_path / "run"))
    experiment = runs.experiment(tmp_path / "run", epochs=900, evaluate_every=300)
    assert parts.steps_per_epoch == runs.STEPS
    rate, hours, _ = probe_lines(experiment, parts, Probe(step=0.5, input=0.1, model=0.4))
    assert "16 images a second" in rate
    assert rate.endswith("a step takes 500 ms, the model alone 400, its images alone 100; the model is the bottleneck")
    assert f"{900 * runs.STEPS * 0.5 / 3600:.2f} hours" in hours
    slow = Probe(step=0.5, input=0.45, model=0.4)
    assert probe_lines(experiment, parts, slow)[0].endswith("the input is the bottleneck")


def test_a_run_is_probed_without_a_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "load_splits", lambda *arguments: runs.SPLITS)
    experiment = runs.experiment(tmp_path / "run", cache="true")
    measured = probe(experiment, build_components(experiment), steps=2)
    assert np.isfinite(measured).all()
    assert min(measured) > 0
    assert not (tmp_path / "run").exists()


def test_no_time_of_compiling_is_probed(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(build, "load_splits", lambda *arguments: runs.SPLITS)
    monkeypatch.setattr(probing, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    parts = build_components(runs.experiment(tmp_path / "run", evaluation_batch_size=8))
    fits = []

    def fit(batches, steps_per_epoch, **options):
        # The first steps of a process take 100 seconds longer.
        now[0] += 2.0 * steps_per_epoch + (0.0 if fits else 100.0)
        fits.append(steps_per_epoch)

    monkeypatch.setattr(parts.learner, "fit", fit)
    found = probe(runs.experiment(tmp_path / "run", evaluation_batch_size=8), parts, steps=4)
    assert (found.model, found.step) == pytest.approx((2.0, 2.0))


def test_the_first_batch_of_images_is_not_timed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(probing, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def batches():
        for seconds in (100.0, 2.0, 2.0, 2.0):
            now[0] += seconds
            yield

    assert probing._seconds_per_batch(batches(), 3) == pytest.approx(2.0)


def chosen(**settings):
    tiny = {"dataset_options": "images_per_class=3, size=32", "image_size": 80, "resize": 80, "flip": False}
    return DataSettings(**{**tiny, "classes_per_batch": 4, "images_per_class": 2, **settings})


@pytest.mark.slow
def test_the_first_batch_is_drawn_and_nothing_else_written(tmp_path):
    settings = chosen(augmentation="multi_resolution", policy="erasing")
    said = write_preview(settings, 0, str(tmp_path / "batch.png"))
    assert "8 views of 80 x 80 px from glyphs" in said
    assert [path.name for path in tmp_path.iterdir()] == ["batch.png"]

    train = load_splits(settings, seed=0).train
    sampler, (transform, _) = make_sampler(settings, train, seed=0), make_transforms(settings)
    images, labels = next(training_batches(train, sampler, transform, seed=0).as_numpy_iterator())
    expected = tmp_path / "expected.png"
    keras.visualization.plot_image_gallery(
        images, y_true=labels, label_map=train.class_names, rows=1, cols=8, path=expected, transparent=False
    )
    np.testing.assert_array_equal(*(np.asarray(Image.open(path)) for path in (tmp_path / "batch.png", expected)))


def test_names_are_no_formulas(tmp_path):
    folder = tmp_path / "photos"
    for name in ("$\\frac{$", "長い名前", "c", "d"):
        (folder / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (40, 40), (40 * number, 90, 200)).save(folder / name / f"{number}.png")
    batches = {"classes_per_batch": 2, "images_per_class": 2, "resize": 40, "image_size": 32}
    settings = DataSettings(dataset="folder", data_dir=str(folder), **batches)
    assert "4 views of 32 x 32 px from folder" in write_preview(settings, 0, str(tmp_path / "batch.png"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("batch.jpg", "name a PNG file"),
        ("no/such/batch.png", "cannot be written"),
        ("folder.png", "cannot be written"),
    ],
)
def test_files_that_cannot_be_written(tmp_path, path, message):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UserError, match=f"preview=.*{message}"):
        write_preview(chosen(), 0, str(tmp_path / path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder.png"]


def test_wrong_policies_are_refused(tmp_path):
    with pytest.raises(UserError, match="unknown `policy` 'blurr'"):
        write_preview(chosen(policy="0.5 * blurr"), 0, str(tmp_path / "a.png"))
    with pytest.raises(UserError, match=r"--policy='blur \+': it cannot be read"):
        chosen(policy="blur +")
