"""Retrievers that are damaged or made to do harm, and items that cannot be: refused in one line."""

import json
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf

from tests.export.networks import picture
from tfdml.errors import UserError
from tfdml.export.retriever import MAX_NEIGHBOURS, GalleryItem, Retriever, UnreadableItem, items_of_folder
from tfdml.export.retriever.items import embedded

pytestmark = pytest.mark.slow


@pytest.fixture
def version(shop, tmp_path):
    shutil.copytree(shop.retriever, tmp_path / "versions")
    return tmp_path / "versions" / "1"


def one_line(look, says):
    with pytest.raises(UserError, match=says) as error:
        look()
    assert "\n" not in str(error.value)


def change(path, **values):
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "gone"}))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        *(({key: "gone"}, f"has no key {key}") for key in ("items", "embedding_dim", "exact_limit", "recall_wanted")),
        ({"items": "12"}, "must be an integer"),
        ({"items": 13, "files": {}}, "states 13 items"),
        ({"kind": ["exact"]}, "is not of a retriever"),
        ({"kind": "indexed"}, "an object is expected, not null"),
        ({"kind": "indexed", "index": {"cells_searched": 0}}, "searches 0 cells"),
        ({"kind": "indexed", "index": {"cells_searched": 1}}, r"gallery\.faiss cannot be read"),
        ({"files": {"../../etc/passwd": {"sha256": ""}}}, "names a file outside its folder"),
        ({"files": []}, "an object is expected"),
    ],
)
def test_a_malformed_manifest_is_refused(values, says, version):
    change(version / "retriever.json", **values)
    one_line(lambda: Retriever.load(version), says)


def test_deep_json_is_refused(version):
    (version / "retriever.json").write_text("[" * 100_000)
    one_line(lambda: Retriever.load(version), "nested more than")


@pytest.mark.parametrize("name", ["saved_model.pb", "variables/variables.data-00000-of-00001"])
def test_a_flipped_bit_is_seen(name, version):
    data = bytearray((version / name).read_bytes())
    data[len(data) // 2] ^= 1
    (version / name).write_bytes(data)
    one_line(lambda: Retriever.load(version), r"is damaged: its SHA-256 is not that in .*retriever\.json")


def test_another_model_in_its_place_is_refused(version, shop):
    shutil.rmtree(version / "variables")
    shutil.copytree(shop.embedder / "1", version, dirs_exist_ok=True)
    change(version / "retriever.json", files={})
    one_line(lambda: Retriever.load(version), "cannot be loaded as a retriever's SavedModel")


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


def test_the_limit_of_neighbours_holds_for_small_galleries(shop):
    retriever = Retriever.load(shop.retriever)
    assert retriever.search(shop.images[0], MAX_NEIGHBOURS).ids.shape == (1, 12)
    one_line(lambda: retriever.search(shop.images[0], MAX_NEIGHBOURS + 1), "k=10001: must be a number from 1 to 10000")
    search = retriever._version.loaded.signatures["search_embedding"]
    with pytest.raises(tf.errors.InvalidArgumentError, match="k is 10001, more than the limit of 10000"):
        search(embedding=tf.constant(shop.embeddings[:1]), k=tf.constant(MAX_NEIGHBOURS + 1))


def test_images_that_cannot_be_read_are_skipped_or_counted(shop, tmp_path):
    (tmp_path / "good.jpg").write_bytes(picture(1))
    (tmp_path / "dangling.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    (tmp_path / "sub.jpg").mkdir()
    (tmp_path / "link.jpg").symlink_to("sub.jpg")
    os.mkfifo(tmp_path / "fifo.jpg")
    items = {item.id: item for item in items_of_folder(tmp_path)}
    bad = {name: item.reason for name, item in items.items() if isinstance(item, UnreadableItem)}
    assert bad.pop("loop.jpg").startswith("unreadable")
    assert bad == {"dangling.jpg": "missing", "fifo.jpg": "unreadable (a FIFO, not a regular file)"}
    embed_each = tf.saved_model.load(str(shop.embedder / "1")).signatures["embed_each"]
    told: list[str] = []
    assert embedded(items_of_folder(tmp_path), embed_each, skip_bad=True, report=told.append).ids == ("good.jpg",)
    assert "bad image dangling.jpg: missing" in told
    one_line(
        lambda: embedded(items_of_folder(tmp_path), embed_each),
        "3 of 4 gallery images cannot be embedded, the first is dangling.jpg: missing",
    )
