"""The exported SavedModel gives the embedder's vectors, of encoded and of decoded images, in every view."""

import concurrent.futures
import errno
import os
import stat
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.export.conftest import CALIBRATION
from tests.export.networks import difference, picture, small_embedder
from tfdml.data.transforms import EvaluationTransform
from tfdml.errors import UserError
from tfdml.export import export_saved_model
from tfdml.export.saved_model import new_version, version_numbers
from tfdml.models import Embedder


@pytest.fixture(scope="module")
def embedder():
    return small_embedder()


def pictures():
    exif = Image.Exif()
    exif[0x0112] = 6
    return [
        picture(0, 60, 90),
        picture(1, 200, 40),
        picture(2, 33, 33, mode="L"),
        picture(3, 50, 70, mode="CMYK"),
        picture(4, 50, 70, exif=exif.tobytes()),
        picture(5, 48, 64, "PNG", "RGBA"),
        picture(6, 20, 20, "PNG"),
    ]


@pytest.fixture(scope="module")
def version(embedder, tmp_path_factory):
    return export_saved_model(embedder, tmp_path_factory.mktemp("models") / "model")


def test_it_gives_the_embedders_vectors_of_every_kind_of_image(embedder, version):
    assert difference(embedder, version, pictures()) <= 1e-5


def test_it_is_the_first_version_and_whole(version):
    assert version.name == "1"
    assert (version / "saved_model.pb").is_file()
    assert [entry.name for entry in version.parent.iterdir()] == ["1"]


def test_images_of_any_size_through_the_second_signature(embedder, version):
    served = tf.saved_model.load(version)
    images = np.random.default_rng(1).integers(0, 255, (3, 70, 50, 3)).astype(np.uint8)
    vectors = served.signatures["embed_images"](images=tf.constant(images))["embedding"]
    expected = embedder(EvaluationTransform.of(embedder)(tf.constant(images)))
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "color"), [("squash", (0, 0, 0)), ("pad", (0, 0, 0)), ("pad", (255, 255, 255))])
def test_every_form_of_the_evaluation_view_is_in_the_export(mode, color, tmp_path):
    shaped = Embedder("conv4", embedding_dim=8, image_size=28, resize=32, resize_mode=mode, pad_color=color)
    shaped.build((None, 28, 28, 3))
    path = export_saved_model(shaped, tmp_path)
    assert EvaluationTransform.of(shaped) == EvaluationTransform(32, 28, mode, color)
    assert difference(shaped, path, [picture(0, 40, 90), picture(1, 70, 30), picture(2, 20, 20)]) < 1e-5


def write(versions, content):
    with new_version(versions) as version:
        assert version.folder.parent == versions
        assert version.folder.name.startswith(".")
        (version.folder / "below").mkdir()
        (version.folder / "below" / "file").write_text(content)
        folder = os.stat(version.folder).st_ino
    assert os.stat(version.path).st_ino == folder  # renamed into place, which is atomic
    return version.path


def test_versions_count_up_and_old_ones_stay(tmp_path):
    versions = tmp_path / "models" / "cars"
    assert [write(versions, text).name for text in ("one", "two")] == ["1", "2"]
    assert [(versions / name / "below" / "file").read_text() for name in "12"] == ["one", "two"]
    assert version_numbers(versions) == [1, 2]


def test_the_next_number_is_one_more_than_the_highest(tmp_path):
    for name in ("3", "10", "notes", ".partial-x", "7a"):
        (tmp_path / name).mkdir()
    assert write(tmp_path, "new").name == "11"
    assert (tmp_path / ".partial-x").is_dir()  # it may be another process's


def test_a_failure_leaves_nothing_not_even_the_folders_that_were_made_for_it(tmp_path):
    with pytest.raises(ZeroDivisionError), new_version(tmp_path / "a" / "b") as version:
        (version.folder / "half").write_text(str(1 // 0))
    assert not list(tmp_path.iterdir())
    (tmp_path / "1").mkdir()
    with pytest.raises(UserError), new_version(tmp_path):
        raise UserError("refused")
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]


def test_exporters_at_once_get_numbers_of_their_own(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda number: write(tmp_path, str(number)), range(24)))
    assert sorted(int(path.name) for path in paths) == list(range(1, 25))
    assert [(path / "below" / "file").read_text() for path in paths] == [str(number) for number in range(24)]
    assert len(list(tmp_path.iterdir())) == 24


def test_another_user_may_read_a_version(tmp_path):
    mode = stat.S_IMODE(write(tmp_path, "x").stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    assert mode == 0o777 & ~mask


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match="file"), new_version(tmp_path / "file" / "below"):
        pytest.fail("there is no such place")
    assert version_numbers(tmp_path / "file") == []


def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path):
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    (tmp_path / f".partial-{killed.pid}-x" / "variables").mkdir(parents=True)
    (tmp_path / f".partial-{os.getppid()}-x").mkdir()
    write(tmp_path, "new")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [f".partial-{os.getppid()}-x", "1"]


def test_a_folder_that_cannot_be_reached_is_refused_and_none_is_made_in_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="`folder=nothing://a/cars`: only local"), new_version("nothing://a/cars"):
        pytest.fail("there is no such place")
    assert not list(tmp_path.iterdir())


FULL = r"cannot be written: the disk is full; .*free some space and run the same command again$"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        tf.errors.ResourceExhaustedError(None, None, "variables.index; No space left on device"),
    ],
)
def test_a_full_disk_is_told_in_one_line_and_leaves_nothing(error, tmp_path):
    with pytest.raises(UserError, match=FULL), new_version(tmp_path / "cars"):
        raise error
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_really_full(small_disk):
    disk = small_disk(2**17)
    (disk / "1").mkdir()
    with pytest.raises(UserError, match=FULL) as caught, new_version(disk) as version:
        tf.saved_model.save(tf.train.Checkpoint(v=tf.Variable(tf.zeros((2**16,)))), str(version.folder))
    assert "\n" not in str(caught.value)
    assert os.listdir(disk) == ["1"]


def test_same_decides_as_the_calibration(shop):
    served = tf.saved_model.load(str(shop.embedder / "1")).signatures
    same = served["same"]
    first, second = list(shop.images[:6]), list(shop.images[6:])
    second[0] = first[0]
    found = same(image_bytes=tf.constant(first), other_image_bytes=tf.constant(second))
    distances = found["distances"].numpy()
    ours = [served["serving_default"](image_bytes=tf.constant(images))["embedding"] for images in (first, second)]
    np.testing.assert_allclose(distances, np.linalg.norm(np.subtract(*ours), axis=1), atol=1e-6)
    np.testing.assert_array_equal(found["same"], CALIBRATION.same(distances))
    assert 0 < np.count_nonzero(found["same"]) < 6
    np.testing.assert_allclose(found["probabilities"], CALIBRATION.probability(distances), atol=1e-6)
    bad = same(
        image_bytes=tf.constant([first[0], b"", first[1]]), other_image_bytes=tf.constant([b"text", first[0], first[1]])
    )
    assert bad["error"].numpy()[1:].tolist() == [b"image_bytes: no bytes", b""]
    assert bad["error"].numpy()[0].startswith(b"other_image_bytes: not a JPEG")
    assert bad["same"].numpy().tolist() == [False, False, True]
    with pytest.raises(tf.errors.InvalidArgumentError, match="there are 2 images, and 1 others"):
        same(image_bytes=tf.constant(first[:2]), other_image_bytes=tf.constant(first[:1]))
