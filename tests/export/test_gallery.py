"""Items and galleries: what they are, where they come from, what cannot be one; tfdml export --gallery."""

import numpy as np
import pytest
import tensorflow as tf

from tests.cli.many import run_many
from tests.export.conftest import one_line
from tests.export.networks import picture
from tfdml.errors import UserError
from tfdml.export import Gallery, GalleryItem, Retriever
from tfdml.export.gallery import embedded, items_of_folder


@pytest.mark.parametrize("label", [2**70, -(2**63) - 1, 1.5, "3", None])
def test_a_label_that_does_not_fit_is_refused(label):
    one_line(lambda: GalleryItem("a", b"x", label=label), "gallery item a: its label must be an integer of 64 bits")


def test_labels_of_64_bits_and_of_numpy_fit():
    assert [GalleryItem("a", b"x", label=label).label for label in (2**63 - 1, np.int32(7))] == [2**63 - 1, 7]


def test_metadata_nested_without_end_is_refused():
    deep: dict = {}
    for _ in range(10_000):
        deep = {"a": deep}
    one_line(lambda: GalleryItem("a", b"x", metadata=deep), "its metadata cannot be written as JSON")


@pytest.mark.slow
def test_images_that_cannot_be_read_are_skipped_or_counted(shop, tmp_path):
    (tmp_path / "good.jpg").write_bytes(picture(1))
    (tmp_path / "dangling.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    (tmp_path / "sub.jpg").mkdir()
    (tmp_path / "link.jpg").symlink_to("sub.jpg")
    items = {item.id: item for item in items_of_folder(tmp_path)}
    bad = {name: item.fault for name, item in items.items() if item.fault}
    assert bad.pop("loop.jpg").startswith("unreadable")
    assert bad == {"dangling.jpg": "missing"}
    embed_each = tf.saved_model.load(str(shop.embedder / "1")).signatures["embed_each"]
    told: list[str] = []
    assert embedded(items_of_folder(tmp_path), embed_each, skip_bad=True, report=told.append).ids == ("good.jpg",)
    assert "bad image dangling.jpg: missing" in told
    one_line(
        lambda: embedded(items_of_folder(tmp_path), embed_each),
        "3 of 4 gallery images cannot be embedded, the first is dangling.jpg: missing",
    )


def test_items_and_galleries_that_cannot_be():
    for make, says in (
        (lambda: GalleryItem("", b"x"), "not empty"),
        (lambda: GalleryItem(7, b"x"), "must be a text"),
        (lambda: GalleryItem("\udc80", b"x"), "not UTF-8"),
        (lambda: GalleryItem("a"), "one of the two"),
        (lambda: GalleryItem("a", b"x", np.ones(3)), "one of the two"),
        (lambda: GalleryItem("a", b"x", metadata={"a": object()}), "as JSON"),
        (lambda: GalleryItem("a", b"x", metadata={"a": float("nan")}), "as JSON"),
        (lambda: Gallery(np.zeros((0, 2)), (), np.zeros(0), ()), "empty"),
        (lambda: Gallery(np.array([[1.0, 0], [0, 0]]), ("a", "b"), np.zeros(2), ("{}",) * 2), "item b: .* length 0"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says):
            make()


@pytest.fixture
def photos(tmp_path, shop):
    names = ["van/1.jpg", "coupe/b/2.PNG", "coupe/a.jpg", "loose.jpg", ".hidden/3.jpg", "van/.4.jpg", "van/notes.txt"]
    for name, image in zip(names, shop.images, strict=False):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" if name.endswith(".txt") else image)
    return tmp_path / "photos"


def test_items_of_a_folder_are_in_order_with_their_classes(photos):
    items = list(items_of_folder(photos))
    assert [item.id for item in items] == ["coupe/a.jpg", "coupe/b/2.PNG", "loose.jpg", "van/1.jpg"]
    assert [item.label for item in items] == [0, 0, -1, 1]
    assert items[1].metadata == {"path": "coupe/b/2.PNG", "class": "coupe"}
    assert items[2].metadata == {"path": "loose.jpg"}
    assert items[0].image == (photos / "coupe" / "a.jpg").read_bytes()


def test_splits_are_no_classes_and_all_else_is_counted(photos, caplog):
    for part in ("train", "Val"):
        (photos / "splits" / part / "van").mkdir(parents=True)
        (photos / "splits" / part / "van" / "1").write_bytes((photos / "van" / "1.jpg").read_bytes())
        (photos / "splits" / part / "van" / "1.heic").write_bytes(b"\0\0\0\x18ftypheic")
    with caplog.at_level("WARNING", logger="absl"):
        items = list(items_of_folder(photos / "splits"))
    assert [(item.id, item.metadata["class"]) for item in items] == [("Val/van/1", "van"), ("train/van/1", "van")]
    assert "left out 2 HEIC" in caplog.text


@pytest.mark.slow
def test_the_command(photos, shop, tmp_path):
    (photos / "van" / "broken.jpg").write_bytes(picture(1)[:100])
    (tmp_path / "empty").mkdir()
    good = {"embedder": shop.embedder, "gallery": photos, "out": "out", "gallery_bad_images": "skip"}
    wrong = [
        ({"gallery": "empty"}, "holds no image"),
        ({"run_dir": "runs/x"}, "--run_dir or --embedder"),
        ({"formats": "onnx"}, "leave --formats alone"),
        ({"embedder": "empty"}, "no exported version"),
        ({"gallery_bad_images": "error"}, "1 of 5 gallery images cannot be embedded, the first is van/broken.jpg"),
    ]
    lines = [good | {"dry_run": "true"}, *(good | values for values, _ in wrong), good]
    dry, *refused, built = run_many(
        "export", tmp_path, [[f"--{name}={value}" for name, value in line.items()] for line in lines]
    )
    assert dry[0] == 0, dry
    assert "would build a retriever" in dry[1]
    for (status, _, error), (values, says) in zip(refused, wrong, strict=True):
        assert status == 2, values
        assert says in error
        # The JPEG library writes lines of its own to the error stream.
        assert len([line for line in error.splitlines() if line.startswith("export: ")]) == 1
    status, output, error = built
    assert status == 0, error
    assert "bad image van/broken.jpg" in output
    assert "4 items of 2 classes" in output
    # Neither the dry run nor those that were refused have taken a number.
    assert "version: out/1\n" in output
    assert Retriever.load(tmp_path / "out").search(photos / "van" / "1.jpg", 1).ids.tolist() == [["van/1.jpg"]]
