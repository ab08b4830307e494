"""What --cache means for a run."""

import numpy as np
import pytest

from tfdml.data.dataset import ImageDataset
from tfdml.data.images import ArrayImages, EncodedImages
from tfdml.data.transforms import TrainTransform
from tfdml.errors import UserError
from tfdml.training import cache_plan as memory
from tfdml.training.cache_plan import CachePlan, plan_cache
from tfdml.training.experiment import Experiment
from tfdml.training.settings import DataSettings

NEVER, ALWAYS = CachePlan(False, False), CachePlan(True, True)


def dataset(count, side):
    images = ArrayImages(np.zeros((count, side, side, 3), np.uint8), ("",) * count)
    return ImageDataset("made", "train", images, np.zeros(count), {0: ""})


def plan(spare, monkeypatch, drawn=1000, **settings):
    monkeypatch.setattr(memory, "memory_to_spare", lambda limit: spare)
    chosen = DataSettings(image_size=16, resize=20, **settings)
    transform = TrainTransform("random_crop", 20, 16)
    return plan_cache(chosen, dataset(100, 40), [dataset(30, 40)], transform, drawn)


def test_auto_keeps_what_fits(monkeypatch):
    training, views = 100 * 20 * 20 * 3, 30 * 16 * 16 * 3
    assert plan(training + views, monkeypatch) == ALWAYS
    assert plan(training + views - 1, monkeypatch) == CachePlan(True, False)
    assert plan(training - 1, monkeypatch) == NEVER


def test_a_run_that_sees_its_images_hardly_once_keeps_none(monkeypatch):
    assert plan(1e9, monkeypatch, drawn=199) == NEVER
    assert plan(1e9, monkeypatch, drawn=200) == ALWAYS


@pytest.mark.parametrize(("given", "expected"), [("true", ALWAYS), (True, ALWAYS), ("false", NEVER), (False, NEVER)])
def test_true_and_false_are_obeyed(monkeypatch, given, expected):
    assert plan(0, monkeypatch, drawn=0, cache=given) == expected


def test_flag_files_from_when_it_was_a_switch():
    for text in ("true", "false"):
        experiment = Experiment.from_flags(f"--cache={text}\n--run_dir=a\n")
        assert experiment.cache == text
        assert f"--cache={text}\n" in experiment.as_flags()
    assert "--cache=auto\n" in Experiment(run_dir="a").as_flags()
    with pytest.raises(UserError, match="--cache=maybe: must be one of auto, true, false"):
        Experiment(run_dir="a", cache="maybe")


def test_images_that_cannot_be_read_take_no_memory(monkeypatch):
    monkeypatch.setattr(memory, "memory_to_spare", lambda limit: 1e9)
    data = ImageDataset("made", "train", EncodedImages((b"?",), ("a",)), np.zeros(1), {0: ""})
    assert plan_cache(DataSettings(), data, [], TrainTransform(), 100) == ALWAYS
