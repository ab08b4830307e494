"""Runs that are watched: what they write, faults that are planted in them, and how they end."""

import itertools
import json
import types

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.training import runs
from tests.training.run.stopping import finished, make_quick
from tests.training.runs import EPOCHS, STEPS, train
from tfdml.errors import UserError
from tfdml.training import RunFolder
from tfdml.training.run.monitor import TrainingMonitor
from tfdml.training.watching import watcher
from tfdml.training.watching.measures import GradientSampler
from tfdml.training.watching.watcher import Halted

OBJECTIVES = "am_softmax + jrs"
TOTAL = EPOCHS * STEPS


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    make_quick(monkeypatch)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    return finished(
        tmp_path_factory.mktemp("runs") / "watched",
        objectives=OBJECTIVES,
        watch_every=2,
    )


def told(folder):
    return json.loads((folder / "watch.json").read_text())


def after_step(monkeypatch, step, change):
    """Change a learner after each step from this one on."""
    ended = TrainingMonitor.on_train_batch_end

    def hook(self, batch, logs=None):
        if self.step + 1 >= step:
            change(self.model)
        ended(self, batch, logs)

    monkeypatch.setattr(TrainingMonitor, "on_train_batch_end", hook)


def test_looks_are_written_for_tensorboard_and_kept(watched):
    found = told(watched)
    assert [sample["step"] for sample in found["samples"]] == [2, 4]
    assert found["alarms"] == []
    sample = found["samples"][-1]
    assert set(sample["gradient_norm"]) == {"backbone", "projection", "objectives"}
    assert sum(sample["gradient_share"].values()) == pytest.approx(1)
    assert (sample["classes"], sample["images"]) == (4, 8)
    events = EventAccumulator(str(watched / "tensorboard"), {"tensors": 0}).Reload()
    tags = {tag for tag in events.Tags()["tensors"] if tag.startswith("watch/")}
    assert tags == {
        "watch/terms/am_softmax",
        "watch/terms/jrs",
        *(f"watch/gradient_norm/{part}" for part in sample["gradient_norm"]),
        "watch/gradient_share/am_softmax",
        "watch/gradient_share/jrs",
        "watch/variance",
        "watch/effective_rank",
        "watch/participation_ratio",
        "watch/d_pos",
        "watch/d_neg",
    }
    (first, last) = events.Tensors("watch/variance")
    assert (first.step, last.step) == (2, 4)
    assert tf.make_ndarray(last.tensor_proto) == pytest.approx(sample["variance"])
    pairs = tf.make_ndarray(events.Tensors("watch/d_pos")[-1].tensor_proto)
    assert pairs[:, 2].sum() == 4  # of 4 classes with 2 images each
    assert (pairs[:, 0] * pairs[:, 2]).sum() / 4 <= sample["d_pos"] <= (pairs[:, 1] * pairs[:, 2]).sum() / 4


def test_the_steps_are_those_of_a_run_that_nobody_watches(watched, tmp_path):
    train(tmp_path / "run", objectives=OBJECTIVES, watch_every=0)
    one, other = (runs.arrays(run / "checkpoints" / f"step-{TOTAL:08d}.npz") for run in (watched, tmp_path / "run"))
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)
    assert runs.records(watched) == runs.records(tmp_path / "run")
    assert not (tmp_path / "run" / "watch.json").exists()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), {"tensors": 0}).Reload()
    assert not [tag for tag in events.Tags()["tensors"] if tag.startswith("watch/")]


def constant(learner):
    kernel, bias = learner.embedder.dense.get_weights()
    learner.embedder.dense.set_weights([0 * kernel, np.ones_like(bias)])


@pytest.mark.slow
def test_a_collapse_ends_the_run_that_is_to_end_on_it_and_resuming_goes_on(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    settings = {"watch_every": 1, "stop_on": "collapse,nan", "objectives": OBJECTIVES}
    with monkeypatch.context() as patch:
        after_step(patch, 2, constant)
        with pytest.raises(Halted) as end:
            train(folder, **settings)
    assert end.value.status == 3
    (alarm,) = told(folder)["alarms"]
    assert alarm["line"].startswith("collapse at step 2 (well at step 1): the embeddings of a batch have a variance of")
    assert str(end.value) == (
        f"ended by --stop_on=collapse,nan: {alarm['line']}; the checkpoint of step 2 is saved; go on all the same with "
        f"--run_dir={folder} --resume, or with other flags by --start_from"
    )
    assert (folder / "checkpoints" / "step-00000002.npz").is_file()
    train(folder, resume=True, **settings)
    found = told(folder)
    assert [sample["step"] for sample in found["samples"]] == list(range(1, TOTAL))
    assert found["alarms"][0] == alarm


@pytest.mark.slow
def test_a_huge_rate_is_an_explosion(tmp_path, monkeypatch):
    def huge(learner):
        kernel, bias = learner.embedder.dense.get_weights()
        # The gradient of a direction is as much larger as the vector is shorter.
        learner.embedder.dense.set_weights([kernel * 1e-3, bias * 1e-3])

    after_step(monkeypatch, 5, huge)
    with pytest.raises(Halted, match=r"=explosion: explosion at step 5 \(well at step 4\): the gradient norm of"):
        train(tmp_path / "run", watch_every=1, stop_on="explosion")


@pytest.mark.slow
def test_a_look_that_does_not_fit_the_memory_leaves_the_run_unwatched(tmp_path, monkeypatch, caplog):
    def full(self, images, labels):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    monkeypatch.setattr(GradientSampler, "__call__", full)
    train(tmp_path / "run", watch_every=2)
    assert not (tmp_path / "run" / "watch.json").exists()
    assert [r.message for r in caplog.records if "unwatched" in r.message] == [
        "a look at a batch does not fit the memory beside the training: the run goes on unwatched"
    ]


@pytest.mark.slow
def test_a_proxy_without_a_gradient_is_dead(tmp_path, monkeypatch):
    kept = []

    def keep(learner):
        proxies = learner.objectives[0].class_proxies.proxies
        values = np.array(proxies)
        kept.append(values[3])
        values[3] = kept[0]
        proxies.assign(values)

    after_step(monkeypatch, 1, keep)
    train(tmp_path / "run", watch_every=4, objectives="am_softmax", epochs=3)
    (alarm,) = told(tmp_path / "run")["alarms"]
    assert (alarm["kind"], alarm["step"], alarm["well"]) == ("dead_proxies", 2 * STEPS, STEPS)
    assert alarm["seen"] == "1 proxies (classes 3) got no gradient in an epoch, of the 8 proxies of am_softmax"
    kept.clear()
    with pytest.raises(Halted, match=r"=dead_proxies: dead_proxies at step \d+ .*the checkpoint of step"):
        train(tmp_path / "other", watch_every=4, objectives="am_softmax", epochs=3, stop_on="dead_proxies")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"stop_on": "colapse"},
            "--stop_on=colapse: there is no alarm 'colapse'; name some of collapse, explosion",
        ),
        ({"stop_on": "collapse", "watch_every": 0}, "--stop_on=collapse needs --watch_every, which is 0"),
        ({"watch_every": -1}, "--watch_every=-1: out of range"),
        ({"log_to": "tensorboard:x"}, "--log_to=tensorboard:x: name wandb:PROJECT or mlflow:URI"),
        ({"log_to": "wandb:"}, "--log_to=wandb:: name wandb:PROJECT"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, said):
    with pytest.raises(UserError) as refused:
        runs.experiment("unused", **settings)
    assert said in str(refused.value)


@pytest.mark.slow
def test_a_healthy_run_raises_no_alarm(tmp_path, monkeypatch):
    monkeypatch.undo()
    glyphs = {"dataset": "glyphs", "dataset_options": "images_per_class=10, size=32", "image_size": 28, "resize": 32}
    folder = tmp_path / "run"
    for name, objectives in (("am", "am_softmax"), ("triplet", "triplet")):
        train(
            folder / name,
            **glyphs,
            objectives=objectives,
            embedding_dim=32,
            backbone="conv4(width=8)",
            classes_per_batch=10,
            images_per_class=4,
            epochs=4,
            steps_per_epoch=30,
            evaluate_every=0,
            learning_rate=0.003,
            watch_every=3,
            stop_on="collapse,explosion,dead_proxies",
        )
        found = told(folder / name)
        assert found["alarms"] == []
        assert len(found["samples"]) == 39


def test_a_resumed_run_records_no_sample_or_alarm_twice(tmp_path, monkeypatch):
    embeddings = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")

    def sampler(images, labels):
        collapsed = images[0, 0, 0, 0] == 4
        found = np.ones_like(embeddings) if collapsed else embeddings
        return types.SimpleNamespace(embeddings=found, terms={"t": 1.0}, norms={"backbone": 1.0}, gram=np.ones((1, 1)))

    def batches(first, every):
        for step in itertools.count(first):
            yield np.full((4, 2, 2, 3), step, "uint8"), np.arange(4) % 2

    monkeypatch.setattr(watcher, "GradientSampler", lambda *arguments: sampler)
    folder, learner = RunFolder(tmp_path), types.SimpleNamespace(objectives=[])
    writer = tf.summary.create_noop_writer()

    def watch():
        return watcher.Watcher(learner, folder, 1, batches, lambda step: np.arange(4), runs.SPLITS.train)

    before, after = watch(), watch()
    for step in (1, 2, 3, 4):
        before.look(step, writer)
    # Killed after step 4, the run resumes from the checkpoint of step 3.
    after.resume(3)
    for step in (3, 4, 5):
        after.look(step, writer)
    assert [sample["step"] for sample in told(tmp_path)["samples"]] == [1, 2, 3, 4, 5]
    assert [(alarm["kind"], alarm["step"]) for alarm in told(tmp_path)["alarms"]] == [("collapse", 4)]


@pytest.mark.parametrize("step", [0, 3])
def test_a_divergence_names_the_batch_and_the_one_before(step, tmp_path):
    folder, names = RunFolder(tmp_path), runs.SPLITS.train.images
    folder.checkpoints.mkdir()
    (folder.checkpoints / "step-00000000.npz").touch()

    def indices(number):
        return np.arange(number, number + 8)

    learner = types.SimpleNamespace(objectives=[])
    look = watcher.Watcher(learner, folder, 1, None, indices, runs.SPLITS.train)
    look.diverged(step + 1, "loss is not finite", {"loss": "nan"})
    about = json.loads(folder.diverged.read_text())
    assert (about["step"], about["what"], about["terms"]) == (step + 1, "loss is not finite", {"loss": "nan"})
    assert about["images"] == [names.name(i) for i in range(step, step + 8)]
    assert about["last_good"].endswith("step-00000000.npz")
    assert about.get("before", {}).get("indices") == (list(range(2, 10)) if step else None)
    (alarm,) = told(tmp_path)["alarms"]
    assert (alarm["kind"], alarm["step"], alarm["well"]) == ("nan", step + 1, 0)


def sample(step, variance=0.5, rank=20.0, classes=25, norm=1.0, **norms):
    return {
        "step": step,
        "variance": variance,
        "effective_rank": rank,
        "classes": classes,
        "gradient_norm": {"backbone": norm, **norms},
    }


def along(*samples):
    """The alarms of a run that looks at these."""
    seen, found = [], []
    for one in samples:
        found += watcher.new_alarms(one, seen)
        seen.append(one)
    return [(alarm["kind"], alarm["step"], alarm["well"]) for alarm in found]


@pytest.mark.parametrize(
    ("change", "raised"),
    [
        ({"variance": 0.0501}, False),
        ({"variance": 0.0499}, True),
        ({"rank": 5.01}, False),
        ({"rank": 4.99}, True),
        # Of 5 classes, each at a point, 4 directions are left.
        ({"rank": 1.01, "classes": 5}, False),
        ({"rank": 1.0, "classes": 6}, True),
        ({"rank": 1.0, "classes": 2}, False),
    ],
)
def test_collapse_is_measured_by_the_best_so_far(change, raised):
    best, later = sample(100), sample(200, variance=0.3, rank=12.0)
    assert along(best, later, sample(300, **change)) == ([("collapse", 300, 200)] if raised else [])


def test_a_point_is_a_collapse_at_the_first_look():
    (found,) = watcher.new_alarms(sample(100, variance=1e-8, rank=1.0), [])
    assert found["line"] == (
        "collapse at step 100 (at the first look): the embeddings of a batch have a variance of 1.0e-08: they are one "
        "point; lower --learning_rate, add a --clip_norm, or change --objectives (a larger margin, another mining)"
    )


@pytest.mark.parametrize(("norms", "raised"), [((1, 2, 3, 19), False), ((1, 2, 3, 21), True), ((1, 2, 99), False)])
def test_explosion_is_ten_times_the_running_median(norms, raised):
    samples = [sample(step, norm=norm) for step, norm in enumerate(norms)]
    assert along(*samples) == ([("explosion", len(norms) - 1, len(norms) - 2)] if raised else [])


def test_a_loss_that_is_often_0_does_not_explode():
    assert along(*[sample(step, norm=norm) for step, norm in enumerate([1.0, 0, 0, 0, 0, 0.5, 0, 0, 0.9])]) == []
    assert along(*[sample(step, norm=norm) for step, norm in enumerate([1.0, 0, 0, 0, 0, 1.1])]) == [
        ("explosion", 5, 4)
    ]


def test_only_the_last_twenty_count_and_the_part_is_named():
    large = [sample(step, norm=100.0, projection=1.0) for step in range(10)]
    small = [sample(step, norm=1.0, projection=1.0) for step in range(10, 30)]
    (found,) = watcher.new_alarms(sample(30, norm=11.0, projection=10.0), [{**s, "alarms": []} for s in large + small])
    assert found["seen"] == "the gradient norm of the backbone is 11, 1 in the median of 20"


def test_what_lasts_is_told_once_and_again_when_it_returns():
    good, bad = {"variance": 0.5}, {"variance": 0.01}
    states = [good, bad, bad, good, bad]
    found = along(*[sample(100 * step, **state) for step, state in enumerate(states)])
    assert found == [("collapse", 100, 0), ("collapse", 400, 300)]
