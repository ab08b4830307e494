import csv
import io
import urllib.parse

import numpy as np
import pytest

import tfdml
from tests.report.pages import EVIL, Page, embedded, made
from tfdml import UserError
from tfdml.report.embedding_map import lay_out, map_html
from tfdml.report.queries import rank_queries


def test_groups_keep_together_and_places_are_repeatable():
    embeddings, labels = embedded(1, classes=4, per_class=30, spread=0.05)
    places = lay_out(embeddings)
    assert places.shape == (120, 2)
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


def test_map_has_every_point_with_its_class():
    embeddings, labels = embedded(2, classes=12, per_class=5)
    dataset = made(labels, names={int(c): f"{c} {EVIL}" for c in np.unique(labels)})
    page = Page(map_html(embeddings, dataset, [33, 5, 0]))
    # Two of the classes asked for are on the map: marked in the picture and in the legend.
    (key,) = page.all("ul", class_="map-key")
    assert " ".join(key["text"].split()) == f"●33 {EVIL}■0 {EVIL}"
    (figure,) = page.all("svg", role="img")
    assert figure["aria-label"] == f"Map of 60 images. Marked classes: 33 {EVIL}, 0 {EVIL}."
    assert len(page.all("use")) == 60
    (link,) = page.all("a")
    rows = list(csv.reader(io.StringIO(urllib.parse.unquote(link["href"].partition(",")[2]))))
    assert rows[0] == ["image", "class", "x", "y"]
    assert [row[:2] for row in rows[1:]] == [[f"{i}.png", dataset.class_names[c]] for i, c in enumerate(labels)]
    np.testing.assert_allclose(np.array(rows[1:])[:, 2:].astype(float), lay_out(embeddings), atol=1e-3)


def test_a_notebook_map_has_every_image_and_names_the_frequent_classes():
    embeddings, labels = embedded(0, classes=10, per_class=5)
    x, y = np.concatenate([embeddings, embeddings[:5] + 0.01]), np.concatenate([labels, labels[:5]])
    figure = tfdml.report.map(x, y, class_names={0: "zero"})
    drawn = figure.axes[0].lines
    assert [len(points.get_xdata()) for points in drawn] == [10, 10, *[5] * 7]
    assert drawn[1].get_label() == "zero"
    assert figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="one class id per embedding, 55"):
        tfdml.report.map(x, y[:-1])
    with pytest.raises(UserError, match="too few different embeddings"):
        tfdml.report.map(x[:4])
