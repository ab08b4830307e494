"""A preview shows the first batch of the run and leaves nothing else behind."""

import numpy as np
import pytest
from PIL import Image

from tfdml.data.contact_sheets import contact_sheet, whole_images
from tfdml.data.pipeline import training_batches
from tfdml.errors import UserError
from tfdml.training import building
from tfdml.training.preview import write_preview
from tfdml.training.settings import DataSettings


def chosen(**settings):
    tiny = {"dataset_options": "images_per_class=3, size=32", "image_size": 80, "resize": 80, "flip": False}
    return DataSettings(**{**tiny, "classes_per_batch": 4, "images_per_class": 2, **settings})


def test_the_first_batch_is_drawn_and_nothing_else_written(tmp_path):
    settings = chosen(augmentation="multi_resolution", policy="cutout")
    said = write_preview(settings, 0, str(tmp_path / "batch.png"))
    assert "8 views of 80 x 80 px from glyphs" in said
    assert [path.name for path in tmp_path.iterdir()] == ["batch.png"]

    train = building.load_splits(settings, seed=0).train
    sampler, (transform, _) = building.make_sampler(settings, train, seed=0), building.make_transforms(settings)
    images, labels = next(training_batches(train, sampler, transform, seed=0).as_numpy_iterator())
    expected = contact_sheet(images, labels, train.class_names, whole_images(train, sampler.batch(0)))
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "batch.png")), np.asarray(expected))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("batch.jpg", "name a PNG file"),
        ("no/such/batch.png", "there is no folder"),
        ("folder.png", "cannot be written"),
    ],
)
def test_files_that_cannot_be_written(tmp_path, path, message):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UserError, match=f"--preview=.*: {message}|--preview=.* {message}"):
        write_preview(chosen(), 0, str(tmp_path / path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder.png"]


def test_wrong_policies_are_refused(tmp_path):
    with pytest.raises(UserError, match="`policy`: there is no policy 'blurr'"):
        write_preview(chosen(policy="0.5 * blurr"), 0, str(tmp_path / "a.png"))
    with pytest.raises(UserError, match=r"--policy='blur \+': it cannot be read"):
        chosen(policy="blur +")
