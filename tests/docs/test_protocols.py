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

# The label, role and camera of each image of Market-1501.
MARKET = {
    "bounding_box_train/0002_c1s1_000451_03.jpg": "2,train,1",
    "bounding_box_train/0002_c3s1_000551_01.jpg": "2,train,3",
    "query/0005_c2s1_000101_00.jpg": "5,query,2",
    "query/0007_c1s1_000101_00.jpg": "7,query,1",
    "bounding_box_test/-1_c2s1_1_00.jpg": "-1,junk,2",
    "bounding_box_test/0000_c1s1_1_01.jpg": "0,gallery,1",
    "bounding_box_test/0005_c2s1_000126_01.jpg": "5,gallery,2",
    "bounding_box_test/0005_c4s1_000126_01.jpg": "5,gallery,4",
    "bounding_box_test/0007_c3s1_000126_01.jpg": "7,gallery,3",
}


@pytest.fixture
def write_list(tmp_path, monkeypatch):
    """Run the script of the page that reads a folder of images; returns its list."""
    monkeypatch.chdir(tmp_path)

    def write(root, name="list.csv"):
        found = blocks(ROOT / "docs" / "protocols.md", "python")
        (code,) = (block.code for block in found if f'"{root.relative_to(tmp_path)}"' in block.code)
        exec(compile(code, "protocols.md", "exec"), {})  # the page is ours
        return root / name

    return write


def test_market_1501(write_list, tmp_path):
    root = tmp_path / "data" / "Market-1501-v15.09.15"
    pictures(root, MARKET)
    path = write_list(root, "market.csv")
    assert path.read_text().split()[1:] == [f"{name},{row}" for name, row in MARKET.items()]
    # Of the test images, first the queries. The first is nearest to a picture of its own camera,
    # which is ignored, then to a distractor.
    points = np.array([[0.0], [10.0], [0.2], [0.1], [0.3], [10.1]])
    metrics = evaluate_dataset(points, read_list(path, "test"), metrics=["recall@1", "map", "minp"])
    assert (metrics["num_queries"], metrics["num_gallery"]) == (2, 4)
    assert (metrics["recall@1"], metrics["map"], metrics["minp"]) == (0.5, 0.75, 0.75)


def test_google_landmarks(write_list, tmp_path):
    root = tmp_path / "data" / "google-landmark"
    index, queries = ["abc1", "abd2", "bcd3", "bcd4"], ["xyz1", "xyz2", "xyz3"]
    paths = {name: f"{'/'.join(name[:3])}/{name}.jpg" for name in (*index, *queries)}
    pictures(root, [f"index/{paths[name]}" for name in index])
    pictures(root, [f"test/{paths[name]}" for name in queries])
    table(root / "index.csv", ["id", *index])
    solution = ["xyz1,abc1 bcd3,Private", "xyz2,abd2,Public", "xyz3,bcd3,Private"]
    table(root / "retrieval_solution_v2.1.csv", ["id,images,Usage", *solution])
    test = read_list(write_list(root), "test", pairs="pairs.csv")
    points = np.array([[0.0], [9.0], [1.0], [0.5], [2.0], [8.0]])
    metrics = evaluate_dataset(points, test, metrics=["map@4"])
    # abc1 and bcd3 have the ranks 2 and 3 of the first query; bcd3 has the rank 2 of the other.
    assert metrics["map@4"] == pytest.approx(np.mean([(1 / 2 + 2 / 3) / 2, 1 / 2]))
    assert (metrics["num_queries"], metrics["num_gallery"]) == (2, 4)


def test_inaturalist(write_list, tmp_path):
    root = tmp_path / "data" / "inaturalist"
    ranks = ("genus", "family", "order", "class", "phylum", "kingdom")
    # The second and the third have a genus of the same name in two families.
    lines = ["Quercus Fagaceae Fagales", "Pieris Ericaceae Ericales", "Pieris Pieridae Lepidoptera"]
    lineages = [dict(zip(ranks, [*line.split(), "c", "p", "k"], strict=True)) for line in lines]
    categories = [{"id": row, **lineage} for row, lineage in enumerate(lineages)]
    (root / "Inat_dataset_splits").mkdir(parents=True)
    (root / "train2018.json").write_text(json.dumps({"categories": categories}))
    names = [f"train_val2018/Plantae/{row}/a.jpg" for row in range(3)]
    pictures(root, names)
    table(root / "Inat_dataset_splits" / "Inaturalist_train_set1.txt", names[:1])
    table(root / "Inat_dataset_splits" / "Inaturalist_test_set1.txt", names[1:])
    path = write_list(root)
    with open(path, newline="") as file:
        assert [row["path"] for row in csv.DictReader(file)] == names
    parts = [read_list(path, split, levels=True).protocol.levels for split in ("train", "test")]
    levels = np.concatenate(parts)
    # The class, its genus and so on up to the kingdom.
    assert [len({*column}) for column in levels.T.tolist()] == [3, 3, 3, 3, 1, 1, 1]
