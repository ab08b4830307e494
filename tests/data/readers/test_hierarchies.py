"""iNaturalist 2018, DyML and GPR1200 from small trees in their layouts."""

import json

import numpy as np
import pytest

from tests.data.trees import pictures, table
from tfdml.data import catalog
from tfdml.errors import UserError
from tfdml.evaluation import Relevance

RANKS = ("genus", "family", "order", "class", "phylum", "kingdom")


def write_inaturalist(root):
    rows = [
        f"train_val2018/{kind}/{species}/{i}.jpg"
        for kind, species in (("Aves", 3), ("Aves", 12), ("Fungi", 5))
        for i in (0, 1)
    ]
    table(root / "Inat_dataset_splits" / "Inaturalist_test_set1.txt", rows)
    pictures(root, rows)
    taxa = {3: "Parus Paridae", 12: "Corvus Corvidae", 5: "Parus Amanitaceae"}
    categories = [
        {"id": species, "name": "x", **dict(zip(RANKS, [*taxa[species].split(), *([kind] * 4)], strict=True))}
        for species, kind in ((3, "Animalia"), (12, "Animalia"), (5, "Fungi"))
    ]
    (root / "train2018.json").write_text(json.dumps({"categories": categories}))
    return root


def test_inaturalist_of_smooth_ap(tmp_path):
    test = catalog.load("inaturalist2018", write_inaturalist(tmp_path), "test", check_counts=False)
    assert test.labels.tolist() == [3, 3, 12, 12, 5, 5]
    assert test.super_labels.tolist() == [0, 0, 0, 0, 1, 1]
    assert test.class_names == {3: "Aves 3", 12: "Aves 12", 5: "Fungi 5"}
    assert (test.protocol.metrics, test.protocol.ks) == (("recall",), (1, 4, 16, 32))
    with pytest.raises(UserError, match=r"expected 136,093 test images in .*Inaturalist_test_set1\.txt, found 6"):
        catalog.load("inaturalist2018", tmp_path, "test")
    table(tmp_path / "Inat_dataset_splits" / "Inaturalist_test_set1.txt", ["Aves/3/0.jpg", "Aves/x/0.jpg"])
    with pytest.raises(UserError, match="line 2: path must be train_val2018/KIND/CATEGORY/FILE, it is"):
        catalog.load("inaturalist2018", tmp_path, "test", check_counts=False)


def test_the_ranks_of_inaturalist_are_a_hierarchy(tmp_path):
    test = catalog.load("inaturalist2018", write_inaturalist(tmp_path), "test", check_counts=False, taxonomy=True)
    levels = test.protocol.levels
    assert levels.shape == (6, 7)
    assert levels[0, 1] != levels[4, 1]  # a genus of one name in two families
    assert (levels[0, 3:] == levels[2, 3:]).all()
    assert Relevance.levels(levels).matches.tolist() == [4] * 4 + [2] * 2
    assert "h_ap" in test.protocol.metrics
    np.testing.assert_array_equal(test.take([5, 0]).protocol.levels, levels[[5, 0]])
    (tmp_path / "train2018.json").write_text('{"categories": []}')
    with pytest.raises(UserError, match=r"train2018\.json is not as it should be"):
        catalog.load("inaturalist2018", tmp_path, "test", check_counts=False, taxonomy=True)


@pytest.mark.parametrize(
    "end", ["", "\n"], ids=["as published, the header runs into the first row", "a line end after it"]
)
def test_dyml_tables_with_and_without_the_line_end_of_their_header(tmp_path, end):
    (tmp_path / "train").mkdir()
    rows = "0.jpg, 1, 4, 9\n1.jpg, 1, 5, 7\n"
    (tmp_path / "train" / "label.csv").write_text(f"fname, coarse_id, middle_id, fine_id{end}{rows}")
    pictures(tmp_path / "train" / "imgs", ["0.jpg", "1.jpg"])
    for name in ("dyml_animal", "dyml_vehicle", "dyml_product"):
        train = catalog.load(name, tmp_path)
        assert (train.labels.tolist(), train.super_labels.tolist()) == ([9, 7], [4, 5])
        assert [path[-5:] for path in train.images.paths] == ["0.jpg", "1.jpg"]
    for role, label in (("query", 3), ("gallery", 8)):
        folder = tmp_path / "bmk_middle"
        pictures(folder / role, ["0.jpg", "7.jpg"])
        (folder / f"{role}.csv").write_text(f"fname, labels{end}0.jpg, 3\n7.jpg, {label}")
    test = catalog.load("dyml_animal", tmp_path, "test", level="middle")
    assert (test.labels.tolist(), test.is_query.tolist()) == ([3, 3, 3, 8], [True, True, False, False])
    with pytest.raises(UserError, match=r"bmk_fine.query\.csv is missing"):
        catalog.load("dyml_animal", tmp_path, "test")
    with pytest.raises(UserError, match="unknown level of dyml_vehicle 'all'; one of fine, middle, coarse"):
        catalog.load("dyml_vehicle", tmp_path, "test", level="all")


def test_dyml_product_has_three_levels_in_one_test_set(tmp_path):
    folder = tmp_path / "mini-bmk_all_in_one"
    table(
        folder / "label.csv", ["fname, coarse_id, middle_id, fine_id0.jpg, 1, 4, 9", "1.jpg, 1, 4, 7", "2.jpg, 2, 5, 8"]
    )
    pictures(folder / "imgs", ["0.jpg", "1.jpg", "2.jpg"])
    test = catalog.load("dyml_product", tmp_path, "test")
    assert test.protocol.levels.tolist() == [[9, 4, 1], [7, 4, 1], [8, 5, 2]]
    assert test.is_query is None
    for text in ("fname, fine_id\n0.jpg, 1\n", "fname, coarse_id, middle_id, fine_id\n0.jpg, 1\n", "nothing"):
        (folder / "label.csv").write_text(text)
        with pytest.raises(UserError, match=r"label\.csv.*expected (the columns fname|4 columns)"):
            catalog.load("dyml_product", tmp_path, "test")


def test_gpr1200_is_in_the_order_of_its_classes(tmp_path):
    pictures(tmp_path / "images", ["10_b.jpg", "9_c.JPG", "9_a.jpg", "200_a.jpg"])
    test = catalog.load("gpr1200", tmp_path, "test", check_counts=False)
    assert (test.labels.tolist(), test.super_labels.tolist()) == ([9, 9, 10, 200], [0, 0, 0, 1])
    assert test.protocol.finds_itself
    with pytest.raises(UserError, match="gpr1200: expected 12,000 images"):
        catalog.load("gpr1200", tmp_path, "test")
    with pytest.raises(UserError, match="gpr1200 has no training split"):
        catalog.load("gpr1200", tmp_path)
    pictures(tmp_path / "images", ["cat.jpg"])
    with pytest.raises(UserError, match=r"holds 'cat\.jpg'; expected 0_\.\.\.\.jpg"):
        catalog.load("gpr1200", tmp_path, "test", check_counts=False)
