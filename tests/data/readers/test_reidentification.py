"""Market-1501, MSMT17, VeRi-776 and VehicleID from small trees in their layouts."""

import numpy as np
import pytest

from tests.data.trees import pictures, table
from tfdml.data import catalog
from tfdml.errors import UserError

MARKET = {
    "bounding_box_train": ["0002_c1s1_000451_03.jpg", "0002_c2s1_000301_01.jpg", "0007_c3s2_000001_01.jpg"],
    "query": ["0001_c1s1_001051_00.jpg", "0003_c2s1_000151_00.jpg"],
    "bounding_box_test": [
        "-1_c1s1_000401_03.jpg",
        "0000_c1s1_000151_01.jpg",
        "0001_c1s1_001051_03.jpg",
        "0001_c4s6_001051_03.jpg",
        "0003_c6s1_000151_02.jpg",
    ],
}


def write(root, folders):
    pictures(root, [f"{folder}/{name}" for folder, names in folders.items() for name in names])
    return root


@pytest.mark.parametrize("inner", ["", "Market-1501-v15.09.15"])
def test_market1501_has_identities_cameras_and_roles_and_no_junk(tmp_path, inner):
    write(tmp_path / inner, MARKET)
    (tmp_path / inner / "bounding_box_test" / "Thumbs.db").write_bytes(b"")
    test = catalog.load("market1501", tmp_path, "test", check_counts=False)
    assert test.labels.tolist() == [1, 3, 0, 1, 1, 3]
    assert test.groups.tolist() == [1, 2, 1, 1, 4, 6]
    assert test.is_query.tolist() == [True, True, False, False, False, False]
    assert test.protocol.metrics == ("recall", "map", "minp")
    train = catalog.load("market1501", tmp_path, "train", check_counts=False)
    assert (train.labels.tolist(), train.is_query, train.protocol) == ([2, 2, 7], None, None)
    assert len(catalog.load("market1501", tmp_path, "query", check_counts=False)) == 2


def test_counts_are_the_published_ones(tmp_path):
    with pytest.raises(UserError, match=r"market1501: expected 12,936 train images in .*, found 3; unpack or download"):
        catalog.load("market1501", write(tmp_path, MARKET))
    with pytest.raises(UserError, match=r"expected 3,368 query images"):
        catalog.load("market1501", tmp_path, "test")


def test_a_name_without_identity_or_camera_is_refused(tmp_path):
    write(tmp_path, {**MARKET, "query": ["person.jpg"]})
    with pytest.raises(UserError, match=r"query.'person\.jpg' has no name as of the official archive"):
        catalog.load("market1501", tmp_path, "test", check_counts=False)


def test_folders_that_lack_are_named(tmp_path):
    with pytest.raises(UserError, match=r"market1501: there is no folder .*bounding_box_train; data_dir must be"):
        catalog.load("market1501", tmp_path)
    write(tmp_path, {"bounding_box_train": MARKET["bounding_box_train"]})
    with pytest.raises(UserError, match=r"market1501: there is no folder .*query"):
        catalog.load("market1501", tmp_path, "test", check_counts=False)


def test_veri776(tmp_path):
    names = {
        "image_train": ["0001_c001_00016450_0.jpg"],
        "image_query": ["0002_c002_00030600_0.jpg"],
        "image_test": ["0002_c014_00031100_1.jpg", "0005_c002_00076720_0.jpg"],
    }
    test = catalog.load("veri776", write(tmp_path, names), "test", check_counts=False)
    assert (test.labels.tolist(), test.groups.tolist()) == ([2, 2, 5], [2, 14, 2])
    with pytest.raises(UserError, match="expected 37,778 train images"):
        catalog.load("veri776", tmp_path)


@pytest.mark.parametrize(
    ("version", "folders"), [("MSMT17_V1", ("train", "test")), ("MSMT17_V2", ("mask_train_v2", "mask_test_v2"))]
)
def test_msmt17_of_both_versions(tmp_path, version, folders):
    root = tmp_path / version
    lists = {
        "train": ["0000/0000_000_01_0303morning_0015_0.jpg 0", "0001/0001_000_05_0303noon_0008_1.jpg 1"],
        "val": ["0001/0001_020_15_0113noon_0008_1.jpg 1"],
        "query": ["0000/0000_000_07_0303morning_0020_0.jpg 0"],
        "gallery": ["0000/0000_001_02_0303morning_0020_1.jpg 0"],
    }
    for part, rows in lists.items():
        table(root / f"list_{part}.txt", rows)
        folder = folders[part in ("query", "gallery")]
        pictures(root, [f"{folder}/{row.split()[0]}" for row in rows])
    train = catalog.load("msmt17", tmp_path, check_counts=False)
    assert train.labels.tolist() == [0, 1]
    assert catalog.load("msmt17", root, check_counts=False, add_validation=True).labels.tolist() == [0, 1, 1]
    test = catalog.load("msmt17", tmp_path, "test", check_counts=False)
    assert (test.labels.tolist(), test.groups.tolist(), test.is_query.tolist()) == ([1041] * 2, [7, 2], [True, False])
    with pytest.raises(UserError, match="expected 32,621 training and validation images"):
        catalog.load("msmt17", tmp_path)
    table(root / "list_query.txt", ["0000/0000.jpg 0"])
    with pytest.raises(UserError, match=r"list_query\.txt, line 1: path must be .*, it is '0000/0000\.jpg'"):
        catalog.load("msmt17", tmp_path, "test", check_counts=False)


def test_vehicleid_draws_one_image_of_each_vehicle_for_the_gallery(tmp_path):
    rows = [f"{100 * vehicle + i:07d} {vehicle}" for vehicle in (5, 6, 9) for i in range(4)]
    table(tmp_path / "train_test_split" / "test_list_800.txt", rows)
    pictures(tmp_path / "image", [f"{row.split()[0]}.jpg" for row in rows])
    splits = [catalog.load("vehicleid", tmp_path, "test", check_counts=False, repeat=i) for i in range(4)]
    for test in splits:
        assert test.labels[~test.is_query].tolist() == [5, 6, 9]
        assert test.protocol.draws == 10
    assert len({tuple(test.is_query) for test in splits}) > 1
    np.testing.assert_array_equal(
        splits[1].is_query, catalog.load("vehicleid", tmp_path, "test", check_counts=False, repeat=1).is_query
    )
    with pytest.raises(UserError, match="expected 800 test vehicles"):
        catalog.load("vehicleid", tmp_path, "test")
    with pytest.raises(UserError, match="test_list is 800, 1600 or 2400; got 7"):
        catalog.load("vehicleid", tmp_path, "test", test_list=7)
