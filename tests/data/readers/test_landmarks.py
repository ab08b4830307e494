"""Revisited Oxford and Paris, Google Landmarks, Met and ILIAS from small trees in their layouts."""

import gzip
import json
import os
import pickle

import numpy as np
import pytest
from PIL import Image

from tests.data.trees import pictures, table
from tfdml.data import catalog
from tfdml.data.dataset import check
from tfdml.errors import UserError

GALLERY = ["all_souls_000013", "all_souls_000026", "hertford_000001", "oxford_000005"]
TRUTH = {
    "imlist": GALLERY,
    "qimlist": ["all_souls_000001", "hertford_000027"],
    "gnd": [
        {"bbx": [3.0, 5.0, 13.4, 25.6], "easy": np.array([0]), "hard": [1], "junk": []},
        {"bbx": [0, 0, 8, 8], "easy": [], "hard": np.array([], np.int64), "junk": [np.int64(2), 3]},
    ],
}


def write_revisited(root, truth=TRUTH, name="roxford5k", **options):
    pictures(root / "jpg", [f"{image}.jpg" for image in GALLERY + TRUTH["qimlist"]])
    with open(root / f"gnd_{name}.pkl", "wb") as file:
        pickle.dump(truth, file, **options)
    return root


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_revisited_oxford_of_every_pickle_protocol(tmp_path, protocol):
    write_revisited(tmp_path, protocol=protocol)
    test = catalog.load("roxford5k", tmp_path, "test", check_counts=False)
    assert test.is_query.tolist() == [True, True, False, False, False, False]
    places = [test.class_names[label] for label in test.labels]
    assert places == ["all_souls", "hertford", "all_souls", "all_souls", "hertford", "oxford"]
    assert test.protocol.ids.tolist() == [4, 5, 0, 1, 2, 3]
    lists = {
        setting: [[side[query].tolist() for query in (4, 5)] for side in sides]
        for setting, sides in test.protocol.lists.items()
    }
    assert lists == {
        "/medium": [[[0, 1], []], [[], [2, 3]]],
        "/easy": [[[0], []], [[1], [2, 3]]],
        "/hard": [[[1], []], [[0], [2, 3]]],
    }


def test_queries_are_cut_as_pillow_cuts_them_and_the_gallery_is_whole(tmp_path):
    write_revisited(tmp_path)
    test = catalog.load("roxford5k", tmp_path, "test", check_counts=False)
    for row, query in enumerate(TRUTH["gnd"]):
        with Image.open(tmp_path / "jpg" / f"{TRUTH['qimlist'][row]}.jpg") as image:
            np.testing.assert_array_equal(test.images.picture(row), np.asarray(image.crop(query["bbx"])))
    for row, name in enumerate(GALLERY, 2):
        assert test.images.encoded(row) == (tmp_path / "jpg" / f"{name}.jpg").read_bytes()
    with Image.open(tmp_path / "jpg" / f"{GALLERY[3]}.jpg") as image:
        np.testing.assert_array_equal(test.gallery.images.picture(3), np.asarray(image))


def test_a_box_outside_its_image_is_named_with_the_file(tmp_path):
    write_revisited(tmp_path, {**TRUTH, "gnd": [TRUTH["gnd"][0], {**TRUTH["gnd"][1], "bbx": [50, 0, 60, 8]}]})
    test = catalog.load("roxford5k", tmp_path, "test", check_counts=False)
    with pytest.raises(
        UserError, match=r"hertford_000027\.jpg: its box \(50, 0, 60, 8\) is .*outside .* 40 x 32 pixels"
    ):
        check(test)


def test_rparis6k_has_its_own_file_and_counts(tmp_path):
    write_revisited(tmp_path, name="rparis6k")
    assert len(catalog.load("rparis6k", tmp_path, "query", check_counts=False)) == 2
    with pytest.raises(UserError, match=r"rparis6k: expected 70 query images in .*gnd_rparis6k\.pkl, found 2"):
        catalog.load("rparis6k", tmp_path, "test")
    with pytest.raises(UserError, match=r"roxford5k: found no gnd_roxford5k\.pkl"):
        catalog.load("roxford5k", tmp_path, "test")
    with pytest.raises(UserError, match="rparis6k has no training split"):
        catalog.load("rparis6k", tmp_path, "train")


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("place", ["itself", "inside an array"])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path, place):
    harmful = Harmful(str(tmp_path / "harmed"))
    truth = harmful if place == "itself" else {**TRUTH, "imlist": np.array([harmful], object)}
    write_revisited(tmp_path, truth)
    with pytest.raises(UserError, match=r"gnd_roxford5k\.pkl is not as it should be .*names (posix|nt)\.mkdir"):
        catalog.load("roxford5k", tmp_path, "test", check_counts=False)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    "truth",
    [
        b"no pickle",
        {"imlist": []},
        {**TRUTH, "gnd": TRUTH["gnd"][:1]},
        {**TRUTH, "imlist": GALLERY[:2]},
        {**TRUTH, "gnd": [{**TRUTH["gnd"][0], "bbx": [0, 0, 8]}] * 2},
        {**TRUTH, "gnd": [{**TRUTH["gnd"][0], "bbx": [0, 0, float("nan"), 8]}] * 2},
    ],
)
def test_a_damaged_ground_truth_is_named(tmp_path, truth):
    write_revisited(tmp_path, truth)
    if isinstance(truth, bytes):
        (tmp_path / "gnd_roxford5k.pkl").write_bytes(truth)
    with pytest.raises(UserError, match=r"gnd_roxford5k\.pkl is not as it should be .*; download it again"):
        catalog.load("roxford5k", tmp_path, "test", check_counts=False)


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
    test = catalog.load("gldv2", write_gldv2(tmp_path), "test", check_counts=False)
    assert test.is_query.tolist() == [True, True, False, False, False]
    assert test.labels.tolist() == [0, 1, 0, 0, 1]
    assert {query: rows.tolist() for query, rows in test.protocol.lists[""][0].items()} == {3: [1, 0], 4: [2]}
    assert len(catalog.load("gldv2", tmp_path, "query", check_counts=False, usage="Public")) == 1
    with pytest.raises(UserError, match=r"gldv2: expected 761,757 index images in .*index\.csv, found 3"):
        catalog.load("gldv2", tmp_path, "test")
    table(tmp_path / "metadata" / "index.csv", ["id", "aaa0", "abc0"])
    with pytest.raises(UserError, match=r"retrieval_solution_v2\.1\.csv lists 'aab0', which is not in .*index\.csv"):
        catalog.load("gldv2", tmp_path, "test", check_counts=False)


def test_google_landmarks_recognition(tmp_path):
    test = catalog.load("gldv2", write_gldv2(tmp_path), "test", check_counts=False, task="recognition")
    assert test.labels.tolist() == [9, -1, 8, 7, 8, 9]
    right = {query: sorted(rows.tolist()) for query, rows in test.protocol.lists[""][0].items()}
    assert right == {3: [0, 2], 4: [], 5: [1]}
    assert test.protocol.metrics == ("gap", "gap_known", "recall@1")
    with pytest.raises(UserError, match="unknown task of gldv2 'both'; one of retrieval, recognition"):
        catalog.load("gldv2", tmp_path, "test", task="both")


@pytest.mark.parametrize("rows", [["name", "aaa0"], ["id", "aaa0,4"], ["id"], ["id", "aaa0", "aaa0"]])
def test_a_table_of_other_columns_or_with_an_image_twice_is_refused(tmp_path, rows):
    table(write_gldv2(tmp_path) / "metadata" / "index.csv", rows)
    with pytest.raises(
        UserError, match=r"gldv2: .*index\.csv, ((row 2|header): expected the columns id|lines 2 and 3)"
    ):
        catalog.load("gldv2", tmp_path, "test", check_counts=False)


def test_met(tmp_path):
    gallery = [{"path": "MET/7/0.jpg", "id": 7}, {"path": "MET/8/0.jpg", "id": 8}]
    queries = [{"path": "test_met/0.jpg", "MET_id": 7}, {"path": "test_other/0.jpg"}, {"path": "test_noart/0.jpg"}]
    (tmp_path / "ground_truth").mkdir()
    for name, rows in (("MET_database", gallery), ("testset", queries)):
        (tmp_path / "ground_truth" / f"{name}.json").write_text(json.dumps(rows))
    pictures(tmp_path / "images", [row["path"] for row in gallery + queries])
    test = catalog.load("met", tmp_path, "test", check_counts=False)
    assert (test.labels.tolist(), test.is_query.tolist()) == ([7, -1, -1, 7, 8], [True] * 3 + [False] * 2)
    assert catalog.load("met", tmp_path, "train", check_counts=False).labels.tolist() == [7, 8]
    with pytest.raises(UserError, match=r"expected 397,121 training images"):
        catalog.load("met", tmp_path)
    (tmp_path / "ground_truth" / "MET_database.json").write_text('[{"path": "a.jpg"}]')
    with pytest.raises(UserError, match=r"MET_database\.json is not as it should be \('id'\)"):
        catalog.load("met", tmp_path)


def test_ilias(tmp_path):
    queries, positives = ["bold_000/query/Q000_00.jpg", "cup_001/query/Q001_00.jpg"], ["bold_000/pos/P000_00.jpg"]
    pictures(tmp_path / "ilias_core", queries + positives)
    table(tmp_path / "image_ids" / "image_query_ids.txt", [f"{name},1" for name in queries])
    table(tmp_path / "image_ids" / "positive_ids.txt", [f"{name},0.2,3" for name in positives])
    with gzip.open(tmp_path / "image_ids" / "distractor_ids.txt.gz", "wt") as file:
        file.write("000000/a\n000000/b\n")
    pictures(tmp_path / "yfcc100m", ["000000/a.jpg"])
    test = catalog.load("ilias", tmp_path, "test", check_counts=False)
    assert (test.labels.tolist(), test.is_query.tolist()) == ([0, 1, 0], [True, True, False])
    assert test.class_names == {0: "bold_000", 1: "cup_001"}
    more = catalog.load("ilias", tmp_path, "gallery", check_counts=False, distractors=1)
    assert (more.labels.tolist(), more.class_names) == ([0, -1], {0: "bold_000", -1: "distractor"})
    with pytest.raises(UserError, match="ilias: expected 1,232 query images"):
        catalog.load("ilias", tmp_path, "test")
