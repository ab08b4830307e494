"""The audit of data in which what is wrong was planted."""

import csv
import io

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from tfdml.audit import audit, label_confidences, outlier_factors, read_drops, write_table
from tfdml.embeddings.files import ImageTable
from tfdml.errors import UserError
from tfdml.retrieval import nearest_neighbors


def clusters(sizes, seed=0, dim=16, spread=0.25):
    """Embeddings around random directions, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return rng.normal(size=(len(sizes), dim))[labels] + spread * rng.normal(
        size=(len(labels), dim)
    ), labels


def table(labels, roles=None, names=None, class_names=None):
    names = names or [f"{row}.jpg" for row in range(len(labels))]
    return ImageTable(tuple(names), labels, roles or ["train"] * len(labels), class_names or {})


def carton(label, color=(180, 40, 40)):
    """A photograph of a product on white, which differs from others by its label alone."""
    rng = np.random.default_rng(3)
    pixels = np.full((120, 120, 3), 255.0)
    pixels[10:112, 30:90] = color
    for top, left in zip(rng.integers(14, 104, 12), rng.integers(32, 70, 12), strict=True):
        pixels[top : top + 5, left : left + 15] = rng.integers(0, 2) * 200
    pixels[40:70, 40:80] = 250
    rng = np.random.default_rng(label)
    for top, left in zip(rng.integers(42, 62, 5), rng.integers(42, 70, 5), strict=True):
        pixels[top : top + 6, left : left + 8] = 30
    return Image.fromarray(pixels.astype(np.uint8))


def jpeg(image):
    file = io.BytesIO()
    image.save(file, "JPEG", quality=60)
    return Image.open(file)


PAIRS = {
    "encoded": (jpeg, "drop"),
    "half the size": (lambda image: image.resize((60, 60)), "drop"),
    "crop": (lambda image: image.crop((3, 2, 118, 117)), "drop"),
    "other label": (lambda image: carton(2), "check"),
    "left and right": (lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), "check"),
    "other color": (lambda image: carton(1, (60, 60, 120)), "check"),
    "darker": (lambda image: ImageEnhance.Brightness(image).enhance(0.6), "check"),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_copy_is_dropped_and_another_product_is_not(pair):
    change, action = PAIRS[pair]
    pictures = [np.asarray(image) for image in (carton(1), change(carton(1)))]
    found = audit(np.eye(2), table([0, 0]), pictures.__getitem__, min_correlation=0.0).of(
        "duplicate"
    )
    assert [finding.action for finding in found] == [
        "keep" if action == "drop" else "check",
        action,
    ]


def actions_of(monkeypatch, count, pairs, scores, roles=None):
    """What becomes of images of which these pairs are alike, and by which other image."""
    monkeypatch.setattr(
        "tfdml.audit.near_duplicates", lambda *_, **__: (np.array(pairs), np.array(scores))
    )
    found = audit(np.eye(count), table(np.zeros(count, int), roles), lambda row: None).of(
        "duplicate"
    )
    return {finding.row: (finding.action, finding.other, finding.score) for finding in found}


@pytest.mark.parametrize("seed", range(5))
def test_each_drop_has_its_own_pair_with_what_stays(monkeypatch, seed):
    rng = np.random.default_rng(seed)
    pairs = np.argwhere(np.triu(rng.random((30, 30)) < 0.08, 1))
    scores = rng.uniform(0.8, 1, len(pairs))
    known = dict(zip(map(tuple, pairs.tolist()), scores.tolist(), strict=True))
    roles = rng.choice(["train", "test"], 30).tolist()
    actions = actions_of(monkeypatch, 30, pairs, scores, roles)
    assert set(actions) == set(pairs.ravel().tolist())
    for row, (action, other, score) in actions.items():
        assert known[min(row, other), max(row, other)] == score
        if action == "drop":
            assert actions[other][0] == "keep"
            assert score >= 0.9
            assert (roles[row], roles[other]) != ("test", "train")
    # Of two that are surely alike, one goes.
    for (a, b), score in known.items():
        assert score < 0.9 or "drop" in (actions[a][0], actions[b][0])
    kept = {other for action, other, _ in actions.values() if action == "drop"}
    assert kept <= {row for row, (action, _, _) in actions.items() if action == "keep"}


def test_without_images_only_the_same_vector_is_dropped():
    x = np.array([[1.0, 0.0, 0.0], [1.0, 0.05, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 2.0]])
    found = audit(x, table([0, 0, 1, 1])).of("duplicate")
    assert {finding.row: finding.action for finding in found} == {
        0: "check",
        1: "check",
        2: "keep",
        3: "drop",
    }


def test_groups_are_connected_and_say_what_they_lie_across():
    x = np.eye(8)[[0, 0, 0, 1, 1, 2, 3, 4]] + 0
    names = table([5, 5, 6, 7, 7, 8, 8, 8], ["train", "train", "test", *["train"] * 5])
    rows = [(f.row, f.group, f.across, f.action) for f in audit(x, names).of("duplicate")]
    assert rows == [
        (2, 1, "split and class", "keep"),  # what is measured on is kept
        (0, 1, "split and class", "drop"),
        (1, 1, "split and class", "drop"),
        (3, 2, "", "keep"),
        (4, 2, "", "drop"),
    ]


def test_planted_labels_come_first_and_singletons_are_not_judged():
    x, truth = clusters([30] * 6 + [1])
    labels, planted = truth.copy(), np.arange(0, 180, 12)
    labels[planted] = (truth[planted] + 1) % 6
    confidences, suggested = label_confidences(x, labels)
    assert sorted(np.argsort(confidences)[:15]) == planted.tolist()
    np.testing.assert_array_equal(suggested[planted], truth[planted])
    assert np.isnan(confidences[180])
    found = audit(x, table(labels)).of("label")
    assert [f.row for f in found] == np.argsort(confidences)[:15].tolist()
    assert {(f.action, labels[f.row] != f.other_label) for f in found} == {("relabel", True)}


def test_a_score_is_that_of_a_classifier_fitted_without_the_image():
    x, labels = clusters([5, 6], seed=1, dim=3)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    targets = np.eye(2)[labels]
    # The mean stays that of all images, as in the closed form.
    centered, priors = x - x.mean(axis=0), targets.mean(axis=0)
    penalty = np.trace(centered.T @ centered) / 3
    scores = []
    for row in range(11):
        rest = np.delete(centered, row, axis=0)
        weights = np.linalg.solve(
            rest.T @ rest + penalty * np.eye(3), rest.T @ np.delete(targets - priors, row, axis=0)
        )
        scores.append((centered[row] @ weights)[labels[row]])
    usual = np.bincount(labels, scores) / np.bincount(labels)
    np.testing.assert_allclose(label_confidences(x, labels)[0], scores / usual[labels], rtol=1e-4)


def test_outliers_as_scikit_learn_finds_them():
    from sklearn.neighbors import LocalOutlierFactor

    x, _ = clusters([40], dim=4)
    x = np.concatenate([x, [-x.mean(axis=0)]])
    near, far = nearest_neighbors(x, k=10)
    expected = -LocalOutlierFactor(10).fit(x).negative_outlier_factor_
    np.testing.assert_allclose(outlier_factors(near, far), expected, rtol=1e-3)
    found = audit(x, table(np.zeros(41, int))).of("outlier")
    assert [f.row for f in found][:1] == [40]


NAMES = [
    "=1+1.jpg",
    " =1+1.jpg",
    "+a",
    "-a",
    "@a",
    "\ta",
    "'a",
    'a,b;c\n"d".jpg',
    "é.jpg",
    "<script>",
]


def test_names_survive_a_spreadsheet(tmp_path):
    path = tmp_path / "audit.csv"
    write_table(path, {"image": NAMES, "action": ["drop"] * len(NAMES)})
    with path.open(encoding="utf-8-sig", newline="") as file:
        cells = [row["image"] for row in csv.DictReader(file)]
    assert not [cell for cell in cells if cell[0] in "=+-@\t\r\n" or cell.lstrip()[0] in "=+-@"]
    assert read_drops(path) == tuple(NAMES)
    # As another program saves it: other order, delimiter and line ends, without a byte-order mark.
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=";", lineterminator="\n").writerows(
            [
                ["note", "Action", "IMAGE"],
                *([1, " DROP ", cell] for cell in cells),
                ["", "keep", "other"],
                [],
            ]
        )
    assert read_drops(path) == tuple(NAMES)
    path.write_text("image\na")
    with pytest.raises(UserError, match="has no column action"):
        read_drops(path)
