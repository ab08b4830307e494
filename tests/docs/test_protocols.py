"""The scripts of the page on published protocols write lists that are measured by the rules of
their benchmarks."""

import csv
import json

import numpy as np
import pytest

from tests.data.trees import pictures, table
from tests.docs.pages import ROOT, blocks
from tfdml.data.readers.own_images import read_list
from tfdml.evaluation import evaluate_dataset


def _written(folder, data_dir, monkeypatch):
    """Run the script of the page that reads `data_dir`; return that folder."""
    (block,) = [
        block for block in blocks(ROOT / "docs" / "protocols.md") if f'"{data_dir}"' in block.code
    ]
    monkeypatch.chdir(folder)
    exec(compile(block.code, "protocols.md", "exec"), {})  # the page is ours
    return folder / data_dir


def test_market_1501(tmp_path, monkeypatch):
    root = tmp_path / "data" / "Market-1501-v15.09.15"
    names = [
        "bounding_box_train/0002_c1s1_000451_03.jpg",
        "bounding_box_train/0002_c3s1_000551_01.jpg",
    ]
    names += ["query/0005_c2s1_000101_00.jpg", "query/0007_c1s1_000101_00.jpg"]
    gallery = [
        "0005_c2s1_000126_01",
        "0005_c4s1_000126_01",
        "0007_c3s1_000126_01",
        "-1_c2s1_1_00",
        "0000_c1s1_1_01",
    ]
    pictures(root, [*names, *(f"bounding_box_test/{name}.jpg" for name in gallery)])
    path = _written(tmp_path, "data/Market-1501-v15.09.15", monkeypatch) / "market.csv"
    train, test = read_list(path), read_list(path, "test")
    assert (train.labels.tolist(), train.groups.tolist()) == ([2, 2], [1, 3])
    order = [name.rsplit("/", 1)[1] for name in test.names]
    assert order == ["0005_c2s1_000101_00.jpg", "0007_c1s1_000101_00.jpg", "0000_c1s1_1_01.jpg"] + [
        f"{name}.jpg" for name in gallery[:3]
    ]
    # The first query is nearest to a picture of its own camera, which is ignored, then to a
    # distractor.
    points = np.array([[0.0], [10.0], [0.2], [0.1], [0.3], [10.1]])
    metrics = evaluate_dataset(points, test, metrics=["recall@1", "map", "minp"])
    assert (metrics["num_queries"], metrics["num_gallery"]) == (2, 4)
    assert (metrics["recall@1"], metrics["map"], metrics["minp"]) == (0.5, 0.75, 0.75)


def test_google_landmarks(tmp_path, monkeypatch):
    root = tmp_path / "data" / "google-landmark"
    index, asked = ["abc1", "abd2", "bcd3", "bcd4"], ["xyz1", "xyz2", "xyz3"]
    paths = {image: "/".join([*image[:3], f"{image}.jpg"]) for image in (*index, *asked)}
    pictures(root, [f"index/{paths[i]}" for i in index] + [f"test/{paths[i]}" for i in asked])
    table(root / "index.csv", ["id", *index])
    solution = [
        "id,images,Usage",
        "xyz1,abc1 bcd3,Private",
        "xyz2,abd2,Public",
        "xyz3,bcd3,Private",
    ]
    table(root / "retrieval_solution_v2.1.csv", solution)
    _written(tmp_path, "data/google-landmark", monkeypatch)
    test = read_list(root / "list.csv", "test", pairs="pairs.csv")
    points = np.array([[0.0], [9.0], [1.0], [0.5], [2.0], [8.0]])
    metrics = evaluate_dataset(points, test, metrics=["map@4"])
    # abc1 and bcd3 have the ranks 2 and 3 of the first query; bcd3 has the rank 2 of the other.
    assert metrics["map@4"] == pytest.approx(np.mean([(1 / 2 + 2 / 3) / 2, 1 / 2]))
    assert (metrics["num_queries"], metrics["num_gallery"]) == (2, 4)


def test_inaturalist(tmp_path, monkeypatch):
    root = tmp_path / "data" / "inaturalist"
    ranks = ("genus", "family", "order", "class", "phylum", "kingdom")
    # The second and the third have a genus of the same name in two families.
    lineages = [
        "Quercus Fagaceae Fagales",
        "Pieris Ericaceae Ericales",
        "Pieris Pieridae Lepidoptera",
    ]
    categories = [
        {"id": row, **dict(zip(ranks, [*lineage.split(), "c", "p", "k"], strict=True))}
        for row, lineage in enumerate(lineages)
    ]
    (root / "Inat_dataset_splits").mkdir(parents=True)
    (root / "train2018.json").write_text(json.dumps({"categories": categories}))
    names = {
        "train": ["train_val2018/Plantae/0/a.jpg"],
        "test": [f"train_val2018/Plantae/{i}/b.jpg" for i in (1, 2)],
    }
    for split, paths in names.items():
        pictures(root, paths)
        table(root / "Inat_dataset_splits" / f"Inaturalist_{split}_set1.txt", paths)
    _written(tmp_path, "data/inaturalist", monkeypatch)
    with open(root / "list.csv", newline="") as file:
        assert [row["path"] for row in csv.DictReader(file)] == [*names["train"], *names["test"]]
    train, test = (read_list(root / "list.csv", split, levels=True) for split in ("train", "test"))
    levels = np.concatenate([train.protocol.levels, test.protocol.levels])
    assert levels.shape == (3, 7)
    assert [len({*column}) for column in levels.T.tolist()] == [3, 3, 3, 3, 1, 1, 1]
