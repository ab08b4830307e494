import dataclasses
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdml.data import catalogue
from tfdml.data.readers import sop as stanford_online_products
from tfdml.errors import UserError

HEADER = "image_id class_id super_class_id path"
TRAIN = ["1 2 1 bicycle_final/222_0.JPG", "2 2 1 bicycle_final/222_1.JPG", "3 1 12 toaster_final/111_0.JPG"]
TEST = ["59552 11319 4 coffee_maker_final/333_0.JPG"]


def _write(root, train=TRAIN, test=TEST):
    root.mkdir(exist_ok=True)
    for name, rows in (("Ebay_train.txt", train), ("Ebay_test.txt", test)):
        (root / name).write_text("".join(line + "\n" for line in [HEADER, *rows]))
        for row in rows:
            file = root / row.split()[-1]
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(b"")
    return root


@pytest.fixture
def products(tmp_path):
    return _write(tmp_path / "Stanford_Online_Products")


def test_official_split_with_its_super_classes(products):
    train = stanford_online_products.read(products, check_counts=False)
    assert train.images.paths == tuple(str(products / row.split()[-1]) for row in TRAIN)
    assert train.labels.tolist() == [1, 1, 0]
    assert train.super_labels.tolist() == [0, 0, 11]
    assert train.class_names == {0: "toaster 1", 1: "bicycle 2"}
    test = stanford_online_products.read(products, "test", check_counts=False)
    assert test.labels.tolist() == [11_318]
    assert test.class_names == {11_318: "coffee maker 11319"}
    assert test.is_query is None


def test_super_classes_follow_the_images(products):
    train = stanford_online_products.read(products, check_counts=False)
    assert train.take([2, 0]).super_labels.tolist() == [11, 0]
    assert train.select_classes([0]).super_labels.tolist() == [11]
    contiguous = train.take([0, 1]).contiguous()
    assert contiguous.labels.tolist() == [0, 0]
    assert contiguous.super_labels.tolist() == [0, 0]


def test_row_order_changes_no_label(products):
    expected = stanford_online_products.read(products, check_counts=False)
    _write(products, TRAIN[::-1])
    found = stanford_online_products.read(products, check_counts=False)
    assert dict(zip(found.images.paths, found.labels, strict=True)) == dict(
        zip(expected.images.paths, expected.labels, strict=True)
    )
    assert found.class_names == expected.class_names


def test_parent_folder_will_do(products):
    assert len(catalogue.load("sop", products.parent, "test", check_counts=False)) == 1


def test_image_and_class_counts_are_checked(products, monkeypatch):
    with pytest.raises(UserError, match=r"expected 59,551 train images in \S*Ebay_train\.txt, found 3; .*again"):
        stanford_online_products.read(products)
    monkeypatch.setitem(stanford_online_products.NUM_IMAGES, "train", 3)
    with pytest.raises(UserError, match=r"expected 11,318 train classes in \S*Ebay_train\.txt, found 2"):
        stanford_online_products.read(products)


def test_missing_image_is_named(products):
    (products / "bicycle_final" / "222_1.JPG").unlink()
    with pytest.raises(UserError, match=r"1 of 3 images are missing, the first is \S*222_1\.JPG"):
        stanford_online_products.read(products, check_counts=False)


def test_missing_list_is_named(products):
    (products / "Ebay_test.txt").unlink()
    with pytest.raises(UserError, match=r"sop: found no Ebay_test\.txt in"):
        stanford_online_products.read(products, "test")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"line 1: expected the header 'image_id .* path', found ''"),
        ("1 1 1 a.JPG\n", r"line 1: expected the header .*, found '1 1 1 a\.JPG'"),
        (f"{HEADER}\n", r"Ebay_train\.txt has no row"),
        (f"{HEADER}\n1 1 1 a.JPG\n2 1 1 b c.JPG\n", r"line 3: expected 4 columns .*, found 5: '2 1 1 b c\.JPG'"),
        (f"{HEADER}\n1 0 1 a.JPG\n", r"line 2: class_id is '0'"),
        (f"{HEADER}\n1 -5 1 a.JPG\n", r"line 2: class_id is '-5'"),
        (f"{HEADER}\n1 5 13 a.JPG\n", r"line 2: super_class_id is '13'; expected a whole number from 1 to 12"),
        (f"{HEADER}\n1 {2**63} 1 a.JPG\n", r"line 2: class_id is '9223372036854775808'; expected a whole number"),
        (f"{HEADER}\n1 5 2 a.JPG\n\n2 5 2 a.JPG\n", r"lines 2 and 4: path 'a\.JPG' comes twice"),
        (f"{HEADER}\n1 5 2 a.JPG\n2 5 3 b.JPG\n", r"lines 2 and 3: class_id 5 has super_class_id 2 and 3"),
        (f"{HEADER}\n1 5 2 a.JPG\n2 5", r"line 3: expected 4 columns .*, found 2"),
    ],
)
def test_a_faulty_list_is_named(products, text, message):
    (products / "Ebay_train.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        stanford_online_products.read(products, check_counts=False)


@settings(max_examples=60, deadline=None)
@given(
    header=st.sampled_from([b"", HEADER.encode() + b"\n"]),
    data=st.binary(max_size=40) | st.text("0123456789 \n\r\t.a\x85\x00", max_size=40).map(str.encode),
)
def test_any_bytes_are_read_or_refused_in_one_line(header, data):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "Ebay_train.txt").write_bytes(header + data)
        with pytest.raises(UserError) as raised:
            stanford_online_products.read(folder, check_counts=False)
    assert len(str(raised.value).splitlines()) == 1


def test_a_list_of_the_full_size_is_read_in_no_time(tmp_path, monkeypatch):
    numbers = np.arange(120_053)
    rows = [f"{i + 1} {i // 6 + 1} {i // 6 % 12 + 1} folder_{i % 12}/{i // 6:012d}_{i % 6}.JPG" for i in numbers]
    (tmp_path / "Ebay_train.txt").write_text("\n".join([HEADER, *rows]))
    listings = {str(tmp_path / f"folder_{k}"): [] for k in range(12)}
    for row in rows:
        folder, name = row.split()[-1].split("/")
        listings[str(tmp_path / folder)].append(name)
    monkeypatch.setattr("os.listdir", lambda folder: listings.get(folder, []))
    started = time.process_time()
    dataset = stanford_online_products.read(tmp_path, check_counts=False)
    assert time.process_time() - started < 2  # a third of a second where nothing else runs
    assert len(dataset) == 120_053
    assert dataset.num_classes == 20_009


@pytest.mark.parametrize("field", ["super_labels", "is_query"])
def test_a_field_of_another_length_is_refused(products, field):
    train = stanford_online_products.read(products, check_counts=False)
    with pytest.raises(UserError, match=rf"sop: 3 images but {field} of shape \(2,\)"):
        dataclasses.replace(train, **{field: np.zeros(2, int)})
