"""bin/export --gallery: a folder or a data set as a retriever."""

import pytest

from tests.cli.many import run_many
from tests.export.networks import picture
from tfdml.export.retriever import Retriever, items_of_folder


@pytest.fixture
def photos(tmp_path, shop):
    names = ["van/1.jpg", "coupe/b/2.PNG", "coupe/a.jpg", "loose.jpg", ".hidden/3.jpg", "van/.4.jpg", "van/notes.txt"]
    for name, image in zip(names, shop.images, strict=False):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    return tmp_path / "photos"


def test_items_of_a_folder_are_in_order_with_their_classes(photos):
    items = list(items_of_folder(photos))
    assert [item.id for item in items] == ["coupe/a.jpg", "coupe/b/2.PNG", "loose.jpg", "van/1.jpg"]
    assert [item.label for item in items] == [0, 0, -1, 1]
    assert items[1].metadata == {"path": "coupe/b/2.PNG", "class": "coupe"}
    assert items[2].metadata == {"path": "loose.jpg"}
    assert items[0].image == (photos / "coupe" / "a.jpg").read_bytes()


@pytest.mark.slow
def test_the_command(photos, shop, tmp_path):
    (photos / "van" / "broken.jpg").write_bytes(picture(1)[:100])
    (tmp_path / "empty").mkdir()
    good = {"embedder": shop.embedder, "gallery": photos, "out": "out", "gallery_bad_images": "skip"}
    wrong = [
        ({"gallery": "nowhere"}, "there is no such folder"),
        ({"gallery": "empty"}, "holds no image"),
        ({"embedder": ""}, "--run_dir or --embedder"),
        ({"run_dir": "runs/x"}, "--run_dir or --embedder"),
        ({"out": ""}, "--out is missing"),
        ({"formats": "onnx"}, "leave --formats alone"),
        ({"index_recall": 2}, "--index_recall"),
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
    assert "4 items of 2 classes, exact" in output
    # Neither the dry run nor those that were refused have taken a number.
    assert "version: out/1\n" in output
    assert Retriever.load(tmp_path / "out").search(photos / "van" / "1.jpg", 1).ids.tolist() == [["van/1.jpg"]]
