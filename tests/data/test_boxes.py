"""Parts of images in boxes are the pixels of Pillow's `crop`, wherever they are read."""

import io

import fsspec
import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.data.preparations import encoded
from tests.data.test_orientation import exif_segment, tiff, xmp, xmp_segment
from tfdml.cli.evaluation.galleries import _listed
from tfdml.data.dataset import ImageDataset
from tfdml.data.faults import find_faults
from tfdml.data.images import FileImages, OptionalImages, images_checksum
from tfdml.data.pipeline import evaluation_batches, readable_views
from tfdml.data.preparation import prepare
from tfdml.data.readers.own_images import read_list
from tfdml.data.transforms import EvaluationTransform
from tfdml.embeddings.passes import images_of
from tfdml.errors import UserError

# A view that changes no pixel of an image of this size.
WIDTH, HEIGHT = 24, 24
VIEW = EvaluationTransform(24, 24)
BOXES = ((3, 5, 27, 29), (0, 16, 24, 40))


def turned(block=None):
    """The bytes of a JPEG of 40 x 30 pixels as stored, which EXIF shows as 30 x 40."""
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    data = encoded(Image.fromarray(pixels), "JPEG", quality=95)
    return data[:2] + (block or exif_segment(tiff(6))) + data[2:]


def expected(data):
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert image.size == (30, 40)
    return np.stack([np.asarray(image.crop(box).convert("RGB")) for box in BOXES])


def names_of(path, boxes=BOXES):
    return tuple(f"{path}#xywh={x1},{y1},{x2 - x1},{y2 - y1}" for x1, y1, x2, y2 in boxes)


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.jpg"
    path.write_bytes(turned())
    return path


def test_every_reader_crops_what_pillow_crops_of_the_upright_image(photo):
    images = FileImages(names_of(photo))
    views = expected(photo.read_bytes())
    dataset = ImageDataset(images=images, labels=[0, 1])
    np.testing.assert_array_equal(next(iter(evaluation_batches(dataset, VIEW, 2)))[0], views)
    np.testing.assert_array_equal(next(readable_views(images, VIEW, 2))[1], views)
    np.testing.assert_array_equal(images.picture(1), views[1])
    assert images.size(0) == (HEIGHT, WIDTH)
    assert find_faults(images) == find_faults(images, decode=False) == []
    stored = OptionalImages(names_of("photo.jpg"), str(photo.parent))
    np.testing.assert_array_equal(stored.picture(1), views[1])
    assert images_checksum(images.take([0])) != images_checksum(images.take([1]))
    assert images.take([1, 0]).names == images.names[::-1]


@pytest.mark.slow
def test_a_remote_image_is_cropped_alike(photo):
    with fsspec.open("memory://boxes/photo.jpg", "wb") as file:
        file.write(photo.read_bytes())
    remote = ImageDataset(images=FileImages(names_of("memory://boxes/photo.jpg")), labels=[0, 1])
    views = next(iter(evaluation_batches(remote, VIEW, 2)))[0]
    np.testing.assert_array_equal(views, expected(photo.read_bytes()))


def test_a_copy_of_a_list_with_boxes_holds_what_is_in_them(photo):
    rows = "".join(f"{photo},{x1},{x1},{y1},{x2},{y2}\n" for x1, y1, x2, y2 in BOXES)
    source = photo.with_name("list.csv")
    source.write_text(f"path,label,x1,y1,x2,y2\n{rows}")
    names = {f"{photo}#xywh=3,5,24,24", f"{photo}#xywh=0,16,24,24"}
    assert {*images_of(str(source)).names} == {*_listed(str(source))[0]} == names
    splits = {split: read_list(source, split) for split in ("train", "test")}
    copy = photo.with_name("copy")
    assert prepare(splits, copy) == {"train": [], "test": []}
    # Labels 0 and 3 in this order are the test and the train split.
    views = [read_list(copy / "images.csv", split).images.picture(0) for split in ("test", "train")]
    np.testing.assert_array_equal(views, expected(photo.read_bytes()))


@pytest.mark.parametrize("box", [(0, 0, 31, 5), (30, 0, 31, 5), (0, 39, 5, 41), (0, 0, 9999, 9999)])
@pytest.mark.parametrize("decode", [True, False])
def test_boxes_beyond_the_upright_image_are_named(photo, box, decode):
    images = FileImages((names_of(photo, [box])[0], *names_of(photo)))
    (fault,) = find_faults(images, decode=decode)
    text = ",".join(map(str, box))
    assert fault.name == images.name(0)
    assert fault.reason == f"the box {text} reaches beyond the image, of 30 x 40 pixels; correct it"
    with pytest.raises(UserError, match="cannot be read as an image"):
        images.picture(0)
    assert [rows.tolist() for rows, _ in readable_views(images, VIEW, 3)] == [[1, 2]]


def test_boxes_of_what_only_pillow_turns_and_narrow_ones_are_refused(photo):
    assert not find_faults(FileImages(names_of(photo, [(0, 0, 30, 40)])), decode=False)
    photo.write_bytes(turned(xmp_segment(xmp(6))))
    for decode in (True, False):
        assert "and not its box" in find_faults(FileImages(names_of(photo)), decode)[0].reason
    wide = photo.with_name("wide.png")
    Image.new("RGB", (300, 9)).save(wide)
    name = names_of(wide, [(0, 0, 300, 1)])
    assert "too narrow: 300 x 1 pixels" in find_faults(FileImages(name))[0].reason
