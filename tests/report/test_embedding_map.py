import base64
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

import tfdml
from tests.report.pages import EVIL, Page, embedded, made, rows_of
from tfdml import UserError
from tfdml.report.embedding_map import lay_out, map_html, sprite_sheet
from tfdml.report.queries import rank_queries


def test_groups_keep_together_and_places_are_repeatable():
    embeddings, labels = embedded(1, classes=4, per_class=30, spread=0.05)
    places = lay_out(embeddings)
    assert places.shape == (120, 2)
    assert places.min() == 0
    assert places.max() == 1
    np.testing.assert_array_equal(places, lay_out(embeddings))
    ranked = rank_queries(places, labels)
    assert ranked.hits.all()


def test_layouts_of_degenerate_embeddings():
    rng = np.random.default_rng(0)
    assert lay_out(np.ones((40, 3))) is None
    assert lay_out(rng.normal(size=(4, 3))) is None
    for x in (rng.normal(size=(9, 1)), np.repeat(rng.normal(size=(2, 3)), 5, axis=0), 1e30 * rng.normal(size=(20, 60))):
        for distance in ("euclidean", "cosine"):
            places = lay_out(x.astype(np.float32), distance=distance)
            assert places is not None
            assert np.isfinite(places).all()


def test_map_holds_every_point_its_class_and_its_picture():
    embeddings, labels = embedded(2, classes=12, per_class=5)
    points, all_labels = np.concatenate([embeddings, embeddings[:5] + 0.01]), np.concatenate([labels, labels[:5]])
    pixels = np.stack([np.full((8, 8, 3), 4 * i if i < 60 else 250, np.uint8) for i in range(65)])
    dataset = made(all_labels, names={int(c): f"{c} {EVIL}" for c in np.unique(labels)}, pixels=pixels)
    text = str(map_html(points, dataset, [33, 5, 0]))
    page = Page(text)
    data = json.loads(page.all("script")[0]["text"])
    assert "<" not in re.search(r'id="map-data">(.*?)</script>', text)[1]
    assert len(data["x"]) == len(data["y"]) == len(data["names"]) == 65
    assert [data["classes"][c] for c in data["class"]] == [dataset.class_names[c] for c in all_labels]
    assert data["names"] == [f"{i}.png" for i in range(65)]
    # Two of the classes asked for are on the map: marked in the picture and in the legend.
    key = [e["text"] for e in page.all("ul", class_="map-key")]
    assert [" ".join(text.split()) for text in key] == [f"●33 {EVIL} 5■0 {EVIL} 10"]
    assert page.all("svg", role="img")[0]["aria-label"].startswith(
        f"Map of 65 images. Marked classes: 33 {EVIL}, 0 {EVIL}."
    )
    # The script places its rings in the picture's units.
    drawn = sorted((float(e["x"]), float(e["y"])) for e in page.all("use"))
    np.testing.assert_allclose(drawn, sorted(zip(data["x"], data["y"], strict=True)), atol=0.06)
    rows = rows_of(text, "Classes on the map, the most mixed first")
    assert sorted(row[0] for row in rows) == sorted(dataset.class_names.values())
    shares = [int(row[2]) for row in rows]
    assert shares == sorted(shares)
    (sheet,) = page.all("img")
    with Image.open(io.BytesIO(base64.b64decode(sheet["src"].split(",")[1]))) as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    cell, columns = data["cell"], data["columns"]
    for i in (0, 7, 49, 50, 59, 64):
        row, column = divmod(i, columns)
        middle = pixels[row * cell + cell // 2, column * cell + cell // 2]
        assert abs(middle - (4 * i if i < 60 else 250)).max() <= 8


def test_sheet_holds_every_picture_in_its_cell():
    pixels = np.stack([np.full((20, 40, 3), 20 * i, np.uint8) for i in range(9)])
    uri = sprite_sheet(made(np.arange(9), pixels=pixels), np.arange(7), size=16, columns=3)
    with Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))) as sheet:
        assert sheet.size == (48, 48)
        pixels = np.asarray(sheet.convert("RGBA")).astype(int)
    for i in range(7):
        row, column = divmod(i, 3)
        cell = pixels[16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
        assert abs(cell[8, 8, :3] - 20 * i).max() <= 6
        assert cell[8, 8, 3] == 255
        assert cell[1, 8, 3] == 0  # twice as wide as high: nothing above it
    assert pixels[40, 40, 3] == 0


def test_a_notebook_map_has_every_image_and_names_the_frequent_classes():
    embeddings, labels = embedded(0, classes=10, per_class=5)
    x, y = np.concatenate([embeddings, embeddings[:5] + 0.01]), np.concatenate([labels, labels[:5]])
    figure = tfdml.report.map(x, y, class_names={0: "zero"})
    drawn = figure.axes[0].collections
    assert [len(points.get_offsets()) for points in drawn] == [10, 10, *[5] * 7]
    assert drawn[1].get_label() == "zero"
    assert figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="one class id per embedding, 55"):
        tfdml.report.map(x, y[:-1])
    with pytest.raises(UserError, match="too few different embeddings"):
        tfdml.report.map(x[:4])
