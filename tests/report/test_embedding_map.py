import base64
import io
import json
import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.report.pages import EVIL, Page, embedded, made
from tfdml.report.embedding_map import choose_images, lay_out, mixing
from tfdml.report.map_html import map_html
from tfdml.report.thumbnails import Pictures


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 300), st.integers(0, 9))
def test_images_are_chosen_evenly(sizes, limit, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)) * 7, sizes))
    rows = choose_images(labels, limit, seed)
    assert 0 < len(rows) <= limit
    assert (np.diff(rows) > 0).all()
    np.testing.assert_array_equal(rows, choose_images(labels, limit, seed))
    counts = {int(c): int((labels[rows] == c).sum()) for c in np.unique(labels[rows])}
    most = max(counts.values())
    if len(counts) > 1:
        # Each class has as many as the others, or all its images.
        assert all(n == most or n == (labels == c).sum() for c, n in counts.items())
    if sum(sizes) <= limit:
        assert len(rows) == sum(sizes)


def test_many_classes_are_fewer_classes_of_ten_images():
    labels = np.repeat(np.arange(1000), 12)
    rows = choose_images(labels, 500)
    classes, counts = np.unique(labels[rows], return_counts=True)
    assert len(classes) == 50
    assert set(counts) == {10}
    assert classes.max() > 500  # drawn, not the first ones
    asked = [c for c in range(1000) if c not in classes][:3]
    assert set(asked) <= set(labels[choose_images(labels, 500, include=asked)])


def test_groups_keep_together_and_places_are_repeatable():
    embeddings, labels = embedded(1, classes=4, per_class=30, spread=0.05)
    places = lay_out(embeddings)
    assert places.shape == (120, 2)
    assert places.min() == 0
    assert places.max() == 1
    np.testing.assert_array_equal(places, lay_out(embeddings))
    for entry in mixing(places, labels):
        assert entry.own == 1.0
        assert entry.other is None


def test_layouts_of_degenerate_embeddings():
    rng = np.random.default_rng(0)
    assert lay_out(np.ones((40, 3))) is None
    assert lay_out(rng.normal(size=(4, 3))) is None
    for x in (rng.normal(size=(9, 1)), np.repeat(rng.normal(size=(2, 3)), 5, axis=0), 1e30 * rng.normal(size=(20, 60))):
        for distance in ("euclidean", "cosine"):
            places = lay_out(x.astype(np.float32), distance=distance)
            assert places is not None
            assert np.isfinite(places).all()


def test_mixing_against_a_count_point_by_point():
    rng = np.random.default_rng(3)
    places, labels = rng.random((60, 2)), rng.integers(0, 6, 60)
    labels[0] = 77
    gaps = np.linalg.norm(places[:, None] - places[None], axis=-1)
    np.fill_diagonal(gaps, np.inf)
    for entry in mixing(places, labels, near=5):
        own = np.flatnonzero(labels == entry.label)
        near = min(5, len(own) - 1) or 5
        around = [labels[j] for i in own for j in np.argsort(gaps[i])[:near]]
        assert entry.images == len(own)
        assert np.isclose(entry.own, around.count(entry.label) / len(around))
        others = [c for c in around if c != entry.label]
        assert np.isclose(entry.other_share, max((others.count(c) for c in others), default=0) / len(around))


def test_map_holds_every_point_its_class_and_its_picture():
    embeddings, labels = embedded(2, classes=12, per_class=5)
    points, all_labels = np.concatenate([embeddings, embeddings[:5] + 0.01]), np.concatenate([labels, labels[:5]])
    dataset = made(all_labels, names={int(c): f"{c} {EVIL}" for c in np.unique(labels)})
    pictures = Pictures(dataset, lambda i: np.full((8, 8, 3), 4 * i if i < 60 else 250, np.uint8))
    text = map_html(points, pictures, [33, 5, 0])
    page = Page(text)
    data = json.loads(page.all("script")[0]["text"])
    assert "<" not in re.search(r'id="map-data">(.*?)</script>', text)[1]
    assert len(data["x"]) == len(data["y"]) == len(data["names"]) == 65
    assert [data["classes"][c] for c in data["class"]] == [pictures.class_name(c) for c in all_labels]
    assert data["names"] == [f"{i}.png" for i in range(65)]
    # Two of the classes asked for are on the map: marked in the picture and in the legend.
    key = [e["text"] for e in page.all("ul", class_="map-key")]
    assert key == [f"133 {EVIL} 520 {EVIL} 10"]
    assert page.all("svg", role="img")[0]["aria-label"].startswith(
        f"Map of 65 images. Marked classes: 1 33 {EVIL}; 2 0"
    )
    assert text.count("h0") == 65 - 15  # the others are dots
    (sheet,) = page.all("img")
    with Image.open(io.BytesIO(base64.b64decode(sheet["src"].split(",")[1]))) as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    cell, columns = data["cell"], data["columns"]
    for i in (0, 7, 49, 50, 59, 64):
        row, column = divmod(i, columns)
        middle = pixels[row * cell + cell // 2, column * cell + cell // 2]
        assert abs(middle - (4 * i if i < 60 else 250)).max() <= 8
