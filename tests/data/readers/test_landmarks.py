"""Google Landmarks, Met and ILIAS from small trees in their layouts."""

import gzip
import json

import pytest

from tests.data.trees import pictures, table
from tfdml.data import catalogue
from tfdml.errors import UserError


def write_gldv2(root):
    gallery, queries, train = ["aaa0", "aab0", "abc0"], ["bbb0", "bbc0", "bcd0", "bce0"], ["ccc0", "ccd0", "cde0"]
    for folder, images in (("index", gallery), ("test", queries), ("train", train)):
        pictures(root / folder, ["/".join([*image[:3], f"{image}.jpg"]) for image in images])
    table(root / "metadata" / "index.csv", ["id", *gallery])
    table(
        root / "metadata" / "train.csv",
        ["id,url,landmark_id", *(f'{i},"http://x/a,b",{n}' for n, i in enumerate(train, 7))],
    )
    table(root / "test.csv", ["id", *queries])
    rows = ["id,images,Usage", "bbb0,aab0 aaa0,Private", "bbc0,None,Ignored", "bcd0,abc0,Public", "bce0,abc0,Private"]
    table(root / "ground_truth" / "retrieval_solution_v2.1.csv", rows)
    rows = ["id,landmarks,Usage", "bbb0,9 7,Private", "bbc0,,Private", "bcd0,,Public", "bce0,8,Private"]
    table(root / "ground_truth" / "recognition_solution_v2.1.csv", rows)
    return root


def test_google_landmarks_retrieval(tmp_path):
    test = catalogue.load("gldv2", write_gldv2(tmp_path), "test", check_counts=False)
    assert test.is_query.tolist() == [True, True, False, False, False]
    assert test.labels.tolist() == [0, 1, 0, 0, 1]
    assert {query: rows.tolist() for query, rows in test.protocol.lists[""][0].items()} == {3: [1, 0], 4: [2]}
    assert len(catalogue.load("gldv2", tmp_path, "query", check_counts=False, usage="Public")) == 1
    with pytest.raises(UserError, match=r"gldv2: expected 761,757 index images in .*index\.csv, found 3"):
        catalogue.load("gldv2", tmp_path, "test")
    table(tmp_path / "metadata" / "index.csv", ["id", "aaa0", "abc0"])
    with pytest.raises(UserError, match=r"retrieval_solution_v2\.1\.csv lists 'aab0', which is not in .*index\.csv"):
        catalogue.load("gldv2", tmp_path, "test", check_counts=False)


def test_google_landmarks_recognition(tmp_path):
    test = catalogue.load("gldv2", write_gldv2(tmp_path), "test", check_counts=False, task="recognition")
    assert test.labels.tolist() == [9, -1, 8, 7, 8, 9]
    right = {query: sorted(rows.tolist()) for query, rows in test.protocol.lists[""][0].items()}
    assert right == {3: [0, 2], 4: [], 5: [1]}
    assert test.protocol.metrics == ("gap", "gap_known", "recall@1")
    with pytest.raises(UserError, match="task is retrieval or recognition"):
        catalogue.load("gldv2", tmp_path, "test", task="both")


@pytest.mark.parametrize("rows", [["name", "aaa0"], ["id", "aaa0,4"], ["id"], ["id", "aaa0", "aaa0"]])
def test_a_table_of_other_columns_or_with_an_image_twice_is_refused(tmp_path, rows):
    table(write_gldv2(tmp_path) / "metadata" / "index.csv", rows)
    with pytest.raises(UserError, match=r"gldv2: .*index\.csv, ((row .: )?expected rows of id|lines 2 and 3)"):
        catalogue.load("gldv2", tmp_path, "test", check_counts=False)


def test_met(tmp_path):
    gallery = [{"path": "MET/7/0.jpg", "id": 7}, {"path": "MET/8/0.jpg", "id": 8}]
    queries = [{"path": "test_met/0.jpg", "MET_id": 7}, {"path": "test_other/0.jpg"}, {"path": "test_noart/0.jpg"}]
    (tmp_path / "ground_truth").mkdir()
    for name, rows in (("MET_database", gallery), ("testset", queries)):
        (tmp_path / "ground_truth" / f"{name}.json").write_text(json.dumps(rows))
    pictures(tmp_path / "images", [row["path"] for row in gallery + queries])
    test = catalogue.load("met", tmp_path, "test", check_counts=False)
    assert (test.labels.tolist(), test.is_query.tolist()) == ([7, -1, -1, 7, 8], [True] * 3 + [False] * 2)
    assert catalogue.load("met", tmp_path, "train", check_counts=False).labels.tolist() == [7, 8]
    with pytest.raises(UserError, match=r"expected 397,121 training images"):
        catalogue.load("met", tmp_path)
    (tmp_path / "ground_truth" / "MET_database.json").write_text('[{"path": "a.jpg"}]')
    with pytest.raises(UserError, match=r"MET_database\.json is not as it should be \(.'id'.\)"):
        catalogue.load("met", tmp_path)


def test_ilias(tmp_path):
    queries, positives = ["bold_000/query/Q000_00.jpg", "cup_001/query/Q001_00.jpg"], ["bold_000/pos/P000_00.jpg"]
    pictures(tmp_path / "ilias_core", queries + positives)
    table(tmp_path / "image_ids" / "image_query_ids.txt", [f"{name},1" for name in queries])
    table(tmp_path / "image_ids" / "positive_ids.txt", [f"{name},0.2,3" for name in positives])
    with gzip.open(tmp_path / "image_ids" / "distractor_ids.txt.gz", "wt") as file:
        file.write("000000/a\n000000/b\n")
    pictures(tmp_path / "yfcc100m", ["000000/a.jpg"])
    test = catalogue.load("ilias", tmp_path, "test", check_counts=False)
    assert (test.labels.tolist(), test.is_query.tolist()) == ([0, 1, 0], [True, True, False])
    assert test.class_names == {0: "bold_000", 1: "cup_001"}
    more = catalogue.load("ilias", tmp_path, "gallery", check_counts=False, distractors=1)
    assert (more.labels.tolist(), more.class_names) == ([0, -1], {0: "bold_000", -1: "distractor"})
    with pytest.raises(UserError, match="ilias: expected 1,232 query images"):
        catalogue.load("ilias", tmp_path, "test")
