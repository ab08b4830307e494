"""Small trees of real pictures in official layouts: CUB-200-2011, Cars-196, SOP, In-Shop and
Omniglot."""

import pathlib

import numpy as np
import scipy.io
from PIL import Image

from tests.data.preparations import encoded

SIZE = (40, 32)


def write_tree(name, root, train_classes, test_classes=3, images_per_class=2):
    """Write a data set of the catalog, with so many images of each class.

    Args:
        name: `cub200`, `cars196`, `sop`, `inshop` or `omniglot`.
        root: The folder to create.
        train_classes: How many; at most 100 for `cub200`, 98 for `cars196`.
        test_classes: How many.
        images_per_class: At least 2 for `inshop`: the first of a test class is its query.
    """
    root.mkdir()
    first_unseen = {"cub200": 101, "cars196": 99}.get(name, 1 + train_classes)
    classes = [*range(1, 1 + train_classes), *range(first_unseen, first_unseen + test_classes)]
    numbers = [number for number in classes for _ in range(images_per_class)]
    _WRITERS[name](root, numbers, train_classes * images_per_class, images_per_class)
    return root


def touch(root, *names, content=b"x"):
    """Files of the same bytes, with the folders around them."""
    for name in names:
        path = pathlib.Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def annotations(path, names, classes, name_field="fname"):
    """A table of Cars-196 in the official form, a 1 x N struct array. The official classes are
    uint8."""
    boxes = ["bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2"]
    rows = np.ones(
        (1, len(names)), dtype=[(field, object) for field in [*boxes, "class", name_field]]
    )
    for i, (name, number) in enumerate(zip(names, classes, strict=True)):
        rows["class"][0, i], rows[name_field][0, i] = number, name
    path.parent.mkdir(parents=True, exist_ok=True)
    scipy.io.savemat(path, {"annotations": rows})


def pictures(root, names, kind="JPEG"):
    """A few different pictures, under many names."""
    rng = np.random.default_rng(0)
    contents = [
        encoded(Image.fromarray(rng.integers(0, 256, (*SIZE[::-1], 3), np.uint8)), kind)
        for _ in range(7)
    ]
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(contents[i % len(contents)])


def table(path, rows):
    """A text file of lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row}\n" for row in rows))


def _cub(root, numbers, num_train, per_class):
    names = [f"{number:03d}.Bird_{number}/{i}.jpg" for i, number in enumerate(numbers)]
    pictures(root / "images", names)
    table(root / "images.txt", (f"{i + 1} {name}" for i, name in enumerate(names)))
    table(
        root / "image_class_labels.txt", (f"{i + 1} {number}" for i, number in enumerate(numbers))
    )
    table(
        root / "classes.txt",
        (f"{number} {number:03d}.Bird_{number}" for number in sorted(set(numbers))),
    )


def _cars(root, numbers, num_train, per_class):
    half = len(numbers) // 2  # the official parts do not part the classes
    tables = {"cars_train": ("cars_train_annos.mat", numbers[:half])}
    tables["cars_test"] = ("cars_test_annos_withlabels.mat", numbers[half:])
    for folder, (table, classes) in tables.items():
        names = [f"{i + 1:05d}.jpg" for i in range(len(classes))]
        pictures(root / folder, names)
        annotations(root / "devkit" / table, names, np.uint8(classes))


def _sop(root, numbers, num_train, per_class):
    names = [f"chair_final/{number}_{i}.JPG" for i, number in enumerate(numbers)]
    pictures(root, names)
    rows = [
        f"{i + 1} {number} 3 {name}"
        for i, (number, name) in enumerate(zip(numbers, names, strict=True))
    ]
    for split, part in (("train", rows[:num_train]), ("test", rows[num_train:])):
        table(root / f"Ebay_{split}.txt", ["image_id class_id super_class_id path", *part])


def _inshop(root, numbers, num_train, per_class):
    names = [
        f"img/MEN/Denim/id_{number:08d}/{i:02d}_1_front.jpg" for i, number in enumerate(numbers)
    ]
    pictures(root, names)
    status = ["train"] * num_train
    status += ["gallery" if i % per_class else "query" for i in range(len(numbers) - num_train)]
    rows = zip(names, numbers, status, strict=True)
    lines = [f"{name} id_{number:08d} {part}" for name, number, part in rows]
    table(
        root / "Eval" / "list_eval_partition.txt",
        [len(names), "image_name item_id evaluation_status", *lines],
    )


def _omniglot(root, numbers, num_train, per_class):
    folders = [
        "images_background" if i < num_train else "images_evaluation" for i in range(len(numbers))
    ]
    rows = enumerate(zip(folders, numbers, strict=True))
    pictures(
        root,
        [f"{part}/Latin/character{number:04d}/{i:05d}_01.png" for i, (part, number) in rows],
        kind="PNG",
    )


_WRITERS = {
    "cub200": _cub,
    "cars196": _cars,
    "sop": _sop,
    "inshop": _inshop,
    "omniglot": _omniglot,
}
