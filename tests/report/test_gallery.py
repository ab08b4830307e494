import base64
import io

import numpy as np
from PIL import Image

from tests.report.pages import embedded
from tfdml.report.gallery import choose_examples, choose_queries, rank_queries, spread_over_classes
from tfdml.report.thumbnails import sprite_sheet


def test_worst_and_best_are_what_they_say():
    embeddings, labels = embedded(3, classes=20)
    examples = choose_examples(embeddings, labels, num_queries=10, neighbours=6)
    right = {kind: [e.hits.sum() for e in examples if e.kind == kind] for kind in ("worst", "best")}
    assert max(right["worst"]) < min(right["best"])
    assert len({e.query for e in examples}) == 10
    for kind in ("worst", "best"):
        assert len({labels[e.query] for e in examples if e.kind == kind}) == 3
    for example in examples:
        assert example.query not in example.neighbours
        np.testing.assert_array_equal(example.hits, labels[example.neighbours] == labels[example.query])


def test_each_class_comes_once_before_any_comes_twice():
    labels = np.array([1, 1, 2, 3, 3, 3])
    assert spread_over_classes([5, 4, 0, 1, 2], labels) == [5, 0, 2, 4, 1]


def test_queries_of_a_comparison_gain_and_lose():
    embeddings, labels = embedded(3, classes=20)
    other = embeddings + np.random.default_rng(1).normal(size=embeddings.shape)
    ranked = [rank_queries(x, labels, neighbours=6, distance="euclidean", seed=0) for x in (embeddings, other)]
    np.testing.assert_array_equal(ranked[0].queries, ranked[1].queries)
    chosen = choose_queries(ranked, labels, 7)
    assert {kind: len(places) for kind, places in chosen.items()} == {"random": 3, "better": 2, "worse": 2}
    gain = ranked[1].score - ranked[0].score
    assert gain[chosen["better"]].min() > 0
    assert gain[chosen["better"][0]] == gain.max()
    assert gain[chosen["worse"]].max() < 0
    assert gain[chosen["worse"][0]] == gain.min()
    everything = [place for places in chosen.values() for place in places]
    assert len(set(everything)) == len(everything)
    same = choose_queries([ranked[0], ranked[0]], labels, 7)
    assert (same["better"], same["worse"]) == ([], [])


def test_sheet_holds_every_picture_in_its_cell():
    images = [np.full((20, 40, 3), 20 * i, np.uint8) for i in range(7)]
    uri = sprite_sheet(iter(images), 7, size=16, columns=3, quality=95)
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
