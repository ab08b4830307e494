"""What a demo searches: the neighbors that exact search finds, filters, folders that are embedded once, the map."""

import numpy as np
import pytest

pytest.importorskip("starlette")

from tests.demo.pages import EVIL, Colors, embed, encoded, small_gallery
from tfdml.demo import DatabaseGallery, Demo, Gallery, combined_query, folder_gallery, map_of, stored_gallery
from tfdml.errors import UserError
from tfdml.retrieval import connect, nearest_neighbors


@pytest.mark.parametrize("distance", ["euclidean", "sqeuclidean", "cosine", "dot"])
def test_the_neighbors_are_those_of_exact_search(distance):
    rng = np.random.default_rng(0)
    points, query = rng.normal(3, 1, (500, 6)).astype("float32"), rng.normal(3, 1, 6).astype("float32")
    gallery = Gallery("", list(map(str, range(500))), points, {"part": np.arange(500) % 3}, distance=distance)
    rows, far = nearest_neighbors(query[None], points, k=500, distance=distance)
    expected = [(int(row), float(d)) for row, d in zip(rows[0], far[0], strict=True)]
    assert gallery.search(query, k=7) == expected[:7]
    some = [(row, d) for row, d in expected if row % 3 == 1]
    assert gallery.search(query, k=5, where={"part": "1"}, without=[some[0][0]]) == some[1:6]
    assert gallery.search(query, k=900, where={"part": "2"}) == [(row, d) for row, d in expected if row % 3 == 2]
    assert gallery.search(query, k=3, where={"part": "9"}) == []
    with pytest.raises(UserError, match="no attribute 'color'; it has part"):
        gallery.search(query, k=3, where={"color": "red"})


def test_negative_examples_push_away():
    here, there = np.array([[1.0, 0.0]]), np.array([[0.8, 0.6]])
    np.testing.assert_allclose(combined_query(2 * here, np.zeros((0, 2))), [2, 0])
    pushed = combined_query(2 * here, there)
    assert np.linalg.norm(pushed) == pytest.approx(2)
    np.testing.assert_allclose(pushed, 2 * np.array([1.8, -0.15]) / np.hypot(1.8, 0.15), rtol=1e-6)


def test_pictures_come_from_the_folder_alone(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "secret.png").write_bytes(encoded((1, 2, 3)))
    (tmp_path / "photos" / "text.png").write_text("no image")
    names = ["../secret.png", str(tmp_path / "secret.png"), "text.png", "gone.png"]
    gallery = Gallery("", names, np.eye(4), {}, str(tmp_path / "photos"))
    for row in (0, 1):
        with pytest.raises(UserError, match="not in the folder"):
            gallery.picture(row, 64)
    for row in (2, 3):
        with pytest.raises(UserError, match="missing, no image"):
            gallery.picture(row, 64)
    for row in (-1, 4):
        with pytest.raises(UserError, match="there is no image"):
            gallery.picture(row, 64)


def test_a_folder_is_embedded_once_for_the_same_model_and_images(tmp_path):
    photos, cache, model = tmp_path / "photos", tmp_path / "cache", Colors()
    for name in ("red", "blue"):
        (photos / name).mkdir(parents=True)
        for number in range(3):
            (photos / name / f"{number}.png").write_bytes(encoded(((200, 0, number), (0, 0, 200))[name == "blue"]))
    (photos / "blue" / "9.png").write_bytes(encoded((0, 0, 9))[:-30])
    gallery = folder_gallery(str(photos), model, cache)
    assert (len(gallery), model.asked) == (6, 6)
    assert gallery.describe(4) == {"row": 4, "name": "red/1.png", "attributes": gallery.describe(4)["attributes"]}
    assert gallery.describe(4)["attributes"]["class"] == "red"
    assert gallery.picture(4, 8)[:2] == b"\xff\xd8"
    again = folder_gallery(str(photos), model, cache)
    assert model.asked == 6
    np.testing.assert_array_equal(again.embeddings, gallery.embeddings)
    (photos / "red" / "1.png").write_bytes(encoded((0, 200, 0)))
    assert folder_gallery(str(photos), model, cache).embeddings[4].argmax() == 1
    model.name = "sha256:2"
    folder_gallery(str(photos), model, cache)
    assert model.asked == 18


def test_columns_of_stored_embeddings_are_attributes(tmp_path):
    pa = pytest.importorskip("pyarrow")

    columns = {"path": ["a", "b"], "price": [3, None], "empty": [None, None], "tags": [[1], [2]]}
    pa.parquet.write_table(pa.table({**columns, "embedding": [[1.0, 0.0], [0.0, 1.0]]}), tmp_path / "x.parquet")
    gallery = stored_gallery(str(tmp_path / "x.parquet"))
    assert [gallery.describe(row)["attributes"] for row in (0, 1)] == [{"price": "3"}, {"price": ""}]
    assert gallery.names == ["a", "b"]
    np.savez(tmp_path / "x.npz", embeddings=np.eye(2), labels=np.array(["bus", "coupe"]))
    assert stored_gallery(str(tmp_path / "x.npz")).describe(1) == {
        "row": 1, "name": "1", "attributes": {"label": "coupe"},
    }  # fmt: skip


@pytest.mark.slow
def test_a_database_finds_what_memory_finds(tmp_path, monkeypatch):
    pytest.importorskip("lancedb")
    from tfdml.demo import gallery as module

    held = small_gallery(tmp_path)
    with connect(f"lancedb://{tmp_path}/galleries") as database:
        columns = {"path": held.names, "class": [name[:1] for name in held.names], "role": list(map(str, range(12)))}
        database.upsert(held.names, held.embeddings, columns)
        monkeypatch.setattr(module, "MOST_ROWS", 5)
        gallery = DatabaseGallery(database, str(tmp_path))
        assert (len(gallery), gallery.count, gallery.names[:2]) == (5, 12, ["blue0.png", "blue1.png"])
        query = held.embeddings[11]
        found, expected = gallery.search(query, 4), held.search(query, 4)
        assert [gallery.names[row] for row, _ in found] == [held.names[row] for row, _ in expected]
        assert [far for _, far in found] == pytest.approx([far for _, far in expected])
        beyond = found[0][0]
        assert gallery.describe(beyond) == {
            "row": beyond, "name": EVIL, "attributes": {"class": "<", "role": "11"},
        }  # fmt: skip
        assert gallery.picture(beyond, 8)
        assert gallery.vector(beyond) is None
        demo = Demo(gallery, embed)
        assert demo.neighbors({"positives": [{"row": beyond}], "k": 1})[0]["name"] == "red2.png"
        assert [gallery.names[row] for row, _ in gallery.search(query, 2, {"role": "3"})] == ["blue3.png"]
        assert gallery.search(query, 2, {"role": "three"}) == []


def test_the_map_places_images_by_their_sampled_neighbors(tmp_path, monkeypatch):
    from tfdml.demo import gallery as module

    monkeypatch.setattr(module, "_SAMPLE", 60)
    rng, calls = np.random.default_rng(0), []
    labels = np.repeat(np.arange(4), 50)
    points = (10 * np.eye(4)[labels] + rng.normal(size=(200, 4))).astype("float32")
    lay_out = module.lay_out
    monkeypatch.setattr(module, "lay_out", lambda *given, **options: calls.append(1) or lay_out(*given, **options))
    gallery = Gallery("", list(map(str, range(200))), points, {})
    places = map_of(gallery, tmp_path)
    assert places.shape == (200, 2)
    assert 0 <= places.min() < places.max() <= 1
    near = nearest_neighbors(places, k=1)[0][:, 0]
    assert (labels[near] == labels).mean() > 0.95
    np.testing.assert_array_equal(map_of(gallery, tmp_path), places)
    assert len(calls) == 1
    assert map_of(Gallery("", ["a", "b"], np.eye(2), {}), tmp_path) is None
