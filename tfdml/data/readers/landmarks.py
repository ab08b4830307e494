"""Retrieval of one object: landmarks, exhibits and things, from lists of what is right for each query.

- Revisited Oxford and Paris (Radenovic et al., 2018)
- Google Landmarks v2, retrieval and recognition (Weyand et al., 2020)
- Met (Ypsilantis et al., 2021)
- ILIAS (Kordopatis-Zilos et al., 2025)

They have a test split of queries and gallery. Met has a training split, too: its gallery.
"""

import collections
import dataclasses
import gzip
import io
import itertools
import json
import os
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdml.data.dataset import ImageDataset, Protocol
from tfdml.data.images import CroppedImages
from tfdml.data.readers import label_files as files
from tfdml.errors import REASON, UserError, check_choice, user_errors
from tfdml.io.files import read_bytes

# Google Landmarks and ILIAS: the READMEs of the publishers. Met: UnED's code has the training images and the queries of
# exhibits. Not checked against the publishers, but as repositories of users state them: Revisited Oxford and Paris
# (README of visloc_retrieval), and the other queries of Met.
NUM_IMAGES = {
    "roxford5k": {"query": 70, "gallery": 4_993},
    "rparis6k": {"query": 70, "gallery": 6_322},
    "gldv2": {"test": 117_577, "index": 761_757, "train": 4_132_914},
    "met": {"test_met": 1_003, "test_other": 10_352, "test_noart": 7_964, "train": 397_121},
    "ilias": {"query": 1_232, "gallery": 4_715},
}
# Which lists of Revisited Oxford and Paris are right, and which are ignored.
_SETTINGS = {
    "/medium": (("easy", "hard"), ("junk",)),
    "/easy": (("easy",), ("junk", "hard")),
    "/hard": (("hard",), ("junk", "easy")),
}
# What a pickle of plain values and NumPy arrays is made of. Nothing else is looked up, so that nothing else can run.
_PLAIN = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("__builtin__", "bytes"): bytes,
    ("_codecs", "encode"): lambda text, encoding: str.encode(text, "latin1"),  # bytes, in old pickles
    **{
        (f"numpy.{core}.{module}", name): reduced[0]
        for core in ("core", "_core")
        for module, name, reduced in (
            ("multiarray", "_reconstruct", np.array([0]).__reduce__()),
            ("multiarray", "scalar", np.float64(0).__reduce__()),
            ("numeric", "_frombuffer", np.array([0]).__reduce_ex__(5)),
        )
    },
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PLAIN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is neither a plain value nor an array")
        return _PLAIN[module, name]


def read_roxford5k(data_dir: str | os.PathLike, split: str = "test", *, check_counts: bool = True) -> ImageDataset:
    """Read Revisited Oxford. A label is one of the names of places in the names of the files.

    Queries are cut to their boxes; gallery images are whole. `evaluate_dataset` reports the three settings of the
    protocol: Medium (easy and hard images are right, junk is ignored), Easy (hard ones are ignored, too) and Hard
    (easy ones are ignored, too). The file `gnd_roxford5k.pkl` is read as plain values: it cannot run code.

    Args:
        data_dir: The folder with `gnd_roxford5k.pkl` and the images in `jpg/`, or the folder that its folder
            `roxford5k` lies in.
        split: `"test"`; there is no other.
        check_counts: Whether there must be 70 queries and 4,993 gallery images; False for a part of the data set.

    Raises:
        UserError: The file or an image is missing, the file is not as it should be, or a number is wrong.

    Example:
        >>> len(read_roxford5k("data/roxford5k").queries)  # doctest: +SKIP
        70
    """
    return _revisited("roxford5k", data_dir, split, check_counts)


def read_rparis6k(data_dir: str | os.PathLike, split: str = "test", *, check_counts: bool = True) -> ImageDataset:
    """Read Revisited Paris; see `read_roxford5k`.

    Args:
        data_dir: The folder with `gnd_rparis6k.pkl` and `jpg/`, or the folder that its folder `rparis6k` lies in.
        split: `"test"`; there is no other.
        check_counts: Whether there must be 70 queries and 6,322 gallery images; False for a part of the data set.

    Raises:
        UserError: As `read_roxford5k`.

    Example:
        >>> len(read_rparis6k("data/rparis6k").queries)  # doctest: +SKIP
        70
    """
    return _revisited("rparis6k", data_dir, split, check_counts)


def _revisited(name: str, data_dir: str | os.PathLike, split: str, check_counts: bool) -> ImageDataset:
    files.require_test(name, split)
    root = files.official_root(name, data_dir, name, f"gnd_{name}.pkl")
    path = os.path.join(root, f"gnd_{name}.pkl")
    # Whatever pickle and NumPy raise on a damaged file.
    with user_errors(Exception, f"{name}: {path} is not as it should be ({REASON}); download it again"):
        truth = _PlainUnpickler(io.BytesIO(read_bytes(path)), encoding="latin1").load()
        queries, gallery = list(map(str, truth["qimlist"])), list(map(str, truth["imlist"]))
        keys = ("easy", "hard", "junk")
        lists = [{key: np.asarray(query[key], np.int64).ravel() for key in keys} for query in truth["gnd"]]
        boxes = [tuple(map(round, np.ravel(query["bbx"]).tolist())) for query in truth["gnd"]]
        if [len(box) for box in boxes] != [4] * len(queries):
            raise ValueError("it has not one box of four numbers per query")
        if not all(((rows >= 0) & (rows < len(gallery))).all() for query in lists for rows in query.values()):
            raise ValueError("it lists other images than it has")
    for part, images in (("query", queries), ("gallery", gallery)):
        files.check_count(check_counts, name, f"{part} images", NUM_IMAGES[name][part], len(images), path)

    def united(keys: Sequence[str]) -> list[np.ndarray]:
        return [np.concatenate([one[key] for key in keys]) for one in lists]

    settings = {setting: (united(right), united(ignored)) for setting, (right, ignored) in _SETTINGS.items()}
    protocol = Protocol.of_lists(("map_trapezoidal", "mp@1", "mp@5", "mp@10"), settings, len(gallery))
    class_names, labels = np.unique([image.rsplit("_", 1)[0] for image in (*queries, *gallery)], return_inverse=True)
    paths = [os.path.join(root, "jpg", f"{image}.jpg") for image in (*queries, *gallery)]
    dataset = _searched(name, paths, labels, len(queries), protocol, dict(enumerate(map(str, class_names))))
    return dataclasses.replace(dataset, images=CroppedImages(tuple(paths), dict(enumerate(boxes))))


def read_gldv2(
    data_dir: str | os.PathLike,
    split: str = "test",
    *,
    check_counts: bool = True,
    task: str = "retrieval",
    usage: str = "Private",
) -> ImageDataset:
    """Read Google Landmarks v2, with the ground truth of version 2.1.

    Retrieval: queries are the test images of `retrieval_solution_v2.1.csv` that are of the usage and not ignored, the
    gallery is the index; measured by mAP@100. A label is the place of the query among the queries, and that of an index
    image the query that it is right for, else -1; what is right is what the solution lists.

    Recognition: queries are the test images of `recognition_solution_v2.1.csv`, of which most show no landmark, and the
    gallery is the training set; measured by GAP. A label is the landmark, -1 for none.

    Args:
        data_dir: The folder with `index/`, `test/` and `train/`, each with images as `a/b/c/abc....jpg`, and with the
            tables, in `metadata/`, `ground_truth/` or right inside.
        split: `"test"`; there is no other.
        check_counts: Whether the tables must have their 761,757, 4,132,914 and 117,577 images; False for a part.
        task: `"retrieval"` or `"recognition"`.
        usage: `"Private"` or `"Public"`, the two halves of the queries.

    Raises:
        UserError: As `read_roxford5k`, or a table lists images that there are not.

    Example:
        >>> read_gldv2("data/google-landmark", task="recognition").name  # doctest: +SKIP
        'gldv2'
    """
    files.require_test("gldv2", split)
    check_choice("task of gldv2", task, ("retrieval", "recognition"))
    check_choice("usage of gldv2", usage, ("Private", "Public"))
    retrieval = task == "retrieval"
    solution = _table(data_dir, f"{task}_solution_v2.1.csv", ("id", "images" if retrieval else "landmarks", "Usage"))
    rows = [row for row in zip(*solution.columns.values(), strict=True) if row[2] == usage]
    queries, answers = [row[0] for row in rows], [row[1].split() for row in rows]
    part = "index" if retrieval else "train"
    table = _table(data_dir, f"{part}.csv", ("id",) if retrieval else ("id", "url", "landmark_id"))
    gallery = table.columns["id"]
    if check_counts:
        tests = _table(data_dir, "test.csv", ("id",))
        for name, one in ((part, table), ("test", tests)):
            files.check_count(True, "gldv2", f"{name} images", NUM_IMAGES["gldv2"][name], len(one.lines), one.path)
    # Rows of the gallery by what the solution names: an image, or a landmark.
    named = gallery if retrieval else table.columns["landmark_id"]
    wanted, rows_of = {name for names in answers for name in names}, collections.defaultdict(list)
    for row, name in enumerate(named):
        if name in wanted:
            rows_of[name].append(row)
    lacking = sorted(wanted - rows_of.keys()) if retrieval else []
    if lacking:
        raise UserError(f"gldv2: {solution.path} lists {files.quoted(lacking[0])}, which is not in {table.path}")
    right = [np.array([row for name in names for row in rows_of[name]], np.int64) for names in answers]
    if retrieval:
        labels = np.full(len(gallery), -1)
        for query, found in enumerate(right):
            labels[found] = query
        asked = list(range(len(queries)))
    else:
        labels = table.integers("landmark_id")
        asked = [int(names[0]) if names else -1 for names in answers]
    metrics = ("map@100",) if retrieval else ("gap", "gap_known", "recall@1")
    protocol = Protocol.of_lists(metrics, {"": (right, [()] * len(right))}, len(gallery))
    images = [("test", image) for image in queries] + [(part, image) for image in gallery]
    paths = [os.path.join(data_dir, folder, *image[:3], f"{image}.jpg") for folder, image in images]
    return _searched("gldv2", paths, np.concatenate([asked, labels]), len(queries), protocol)


def read_met(data_dir: str | os.PathLike, split: str = "train", *, check_counts: bool = True) -> ImageDataset:
    """Read Met. A label is the number of the exhibit; -1 are the queries that show none.

    The test split's gallery is the training set. Measured by GAP over all queries and over those of exhibits, and by
    accuracy, which is Recall@1.

    Args:
        data_dir: The folder with `ground_truth/` and `images/`.
        split: `"train"` or `"test"`.
        check_counts: Whether there must be 397,121 training images, and 1,003 queries of exhibits, 10,352 of other art
            and 7,964 of no art; False for a part of the data set.

    Raises:
        UserError: As `read_roxford5k`.

    Example:
        >>> (read_met("data/met", "test").queries.labels >= 0).sum()  # doctest: +SKIP
        1003
    """
    root = files.official_root("met", data_dir, "ground_truth", "testset.json")
    parts: dict[str, list[tuple[str, int]]] = {"query": [], "gallery": []}
    for part, file, key in (("query", "testset", "MET_id"), ("gallery", "MET_database", "id")):
        path = os.path.join(root, f"{file}.json")
        kinds = (ValueError, KeyError, TypeError, AttributeError)
        with user_errors(kinds, f"met: {path} is not as it should be ({REASON}); download it again"):
            found = json.loads(files.read_text("met", path))
            parts[part] = [(str(one["path"]), int(one.get(key, -1) if part == "query" else one[key])) for one in found]
    counts = NUM_IMAGES["met"]
    files.check_count(check_counts, "met", "training images", counts["train"], len(parts["gallery"]), root)
    for folder in ("test_met", "test_other", "test_noart"):
        count = sum(folder in path.split("/") for path, _ in parts["query"])
        files.check_count(check_counts, "met", f"queries of {folder}", counts[folder], count, root)
    rows = parts["gallery"] if split == "train" else parts["query"] + parts["gallery"]
    paths = [os.path.join(os.path.dirname(root), "images", path) for path, _ in rows]
    labels = np.array([label for _, label in rows])
    if split == "train":
        return files.images_in_files("met", split, paths, labels)
    return _searched("met", paths, labels, len(parts["query"]), Protocol(("gap", "gap_known", "recall@1")))


def read_ilias(
    data_dir: str | os.PathLike, split: str = "test", *, check_counts: bool = True, distractors: int = 0
) -> ImageDataset:
    """Read ILIAS: image queries and their positives. A label is the place of the object in the order of names.

    Text queries are left out. Distractors, whose label is -1, come in archives of 100,000 images: unpack them into
    `yfcc100m/`, so that the lines of `distractor_ids.txt.gz` name files of it.

    Args:
        data_dir: The folder with `image_ids/` and `ilias_core/`.
        split: `"test"`; there is no other.
        check_counts: Whether there must be 1,232 queries and 4,715 positives; False for a part of the data set.
        distractors: How many of the listed distractors are added to the gallery, from the first on.

    Raises:
        UserError: As `read_roxford5k`.

    Example:
        >>> len(read_ilias("data/ilias").queries)  # doctest: +SKIP
        1232
    """
    files.require_test("ilias", split)
    lists, images = os.path.join(data_dir, "image_ids"), []
    for part, file in (("query", "image_query_ids.txt"), ("gallery", "positive_ids.txt")):
        found = [
            line.split(",")[0] for line in files.read_text("ilias", os.path.join(lists, file)).splitlines() if line
        ]
        images.append(found)
        files.check_count(check_counts, "ilias", f"{part} images", NUM_IMAGES["ilias"][part], len(found), lists)
    others: list[str] = []
    if distractors:
        with gzip.open(os.path.join(lists, "distractor_ids.txt.gz"), "rt", encoding="utf-8") as text:
            others = [f"{line.strip().removesuffix('.jpg')}.jpg" for line in itertools.islice(text, distractors)]
    core = images[0] + images[1]
    class_names, labels = np.unique([image.split("/")[0] for image in core], return_inverse=True)
    names = dict(enumerate(map(str, class_names))) | ({-1: "distractor"} if others else {})
    paths = [os.path.join(data_dir, "ilias_core", image) for image in core]
    paths += [os.path.join(data_dir, "yfcc100m", image) for image in others]
    labels = np.append(labels, [-1] * len(others)).astype(np.int64)
    return _searched("ilias", paths, labels, len(images[0]), Protocol(("map@1000",)), names)


def _searched(
    name: str, paths: list[str], labels: np.ndarray, queries: int, protocol: Protocol, names: Any = None
) -> ImageDataset:
    """Return a test split whose first images are the queries."""
    is_query = np.arange(len(paths)) < queries
    return files.images_in_files(name, "test", paths, labels, names, protocol=protocol, is_query=is_query)


def _table(data_dir: str | os.PathLike, file: str, columns: Sequence[str]) -> files.Table:
    """Return a table with commas, of the folder or of its `metadata/` or `ground_truth/`."""
    path = files.one_of(data_dir, file, os.path.join("metadata", file), os.path.join("ground_truth", file))
    return files.comma_table("gldv2", path, files.read_text("gldv2", path), columns)
