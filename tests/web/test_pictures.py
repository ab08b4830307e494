"""What a demo searches: the neighbors of exact search, pictures of its folder alone, folders, files
and databases."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("starlette")

from tests.embeddings.folders import write_folder
from tests.web.pages import Colors, encoded, small_gallery
from tfdml.embeddings.files import ImageTable
from tfdml.errors import UserError
from tfdml.io import files
from tfdml.retrieval import nearest_neighbors, open_gallery
from tfdml.web import pictures as module
from tfdml.web.pictures import Pictures, pictures_of


@pytest.mark.parametrize("distance", ["euclidean", "cosine", "dot"])
def test_the_neighbors_are_those_of_exact_search(distance):
    rng = np.random.default_rng(0)
    points = rng.normal(3, 1, (50, 6)).astype("float32")
    gallery = Pictures("", list(map(str, range(50))), points, distance=distance)
    rows, far = nearest_neighbors(points, k=49, distance=distance)
    expected = list(zip(rows[5].tolist(), far[5].tolist(), strict=True))
    assert gallery.search(points[5], 7, without=5) == expected[:7]
    assert gallery.search(points[5], 900, without=5) == expected
    assert len(gallery.search(points[5], 900)) == 50


# What a file of somebody else may name as the path of an image.
ELSEWHERE = [
    *(
        "../secret.png",
        "/etc/passwd",
        "a/../../secret.png",
        "http://127.0.0.1:1/a.png",
        "file:///etc/passwd",
    ),
    *("s3://bucket/a.png", "zip://a.png::http://127.0.0.1:1/b.zip", "~/a.png", "", ".", "a\0.png"),
]


@pytest.mark.parametrize("folder", ["photos", "memory://photos", ""])
def test_nothing_is_opened_but_files_of_the_named_folder(folder, tmp_path, monkeypatch):
    (tmp_path / "photos").mkdir()
    (tmp_path / "secret.png").write_bytes(encoded((1, 2, 3)))
    (tmp_path / "photos" / "text.png").write_text("no image")
    monkeypatch.chdir(tmp_path)
    opened, open_file = [], files.open_file
    monkeypatch.setattr(
        files,
        "open_file",
        lambda path, **options: opened.append(path) or open_file(path, **options),
    )
    names = [*ELSEWHERE, str(tmp_path / "secret.png"), f"{folder}/../secret.png", "text.png"]
    gallery = Pictures("", names, np.eye(len(names)), folder=folder)
    for row in range(len(names)):
        with pytest.raises(UserError):
            gallery.picture(row, 64)
    inside = {"photos": f"{tmp_path}/photos", "memory://photos": "memory://photos/"}.get(
        folder, "(nothing)"
    )
    assert all(str(path).startswith(inside) and ".." not in str(path) for path in opened)
    assert bool(opened) == bool(folder)


def test_a_folder_is_embedded_and_what_is_left_out_is_counted(tmp_path, capsys):
    for name, color in (("red", (200, 0, 0)), ("blue", (0, 0, 200))):
        (tmp_path / name).mkdir()
        for number in range(3):
            (tmp_path / name / f"{number}.png").write_bytes(encoded(color))
    (tmp_path / "blue" / "9.png").write_bytes(encoded((0, 0, 9))[:-30])
    gallery = pictures_of(str(tmp_path), Colors())
    assert gallery.names == [
        f"{name}/{number}.png" for name in ("blue", "red") for number in range(3)
    ]
    assert gallery.classes == ["blue"] * 3 + ["red"] * 3
    assert gallery.embeddings.argmax(axis=1).tolist() == [2] * 3 + [0] * 3
    assert "1 image is left out" in capsys.readouterr().err


def test_stored_embeddings_have_their_paths_classes_and_model(tmp_path):
    columns = {"path": ["a", "b"], "label": [3, 4], "class": ["bus", "coupe"], "tags": [[1], [2]]}
    pq.write_table(
        pa.table({**columns, "embedding": [[1.0, 0.0], [0.0, 1.0]]}), tmp_path / "x.parquet"
    )
    gallery = pictures_of(str(tmp_path / "x.parquet"), Colors())
    assert (list(gallery.names), gallery.classes) == (["a", "b"], ["bus", "coupe"])
    np.savez(tmp_path / "x.npz", embeddings=np.eye(2), labels=np.array(["bus", "coupe"]))
    gallery = pictures_of(str(tmp_path / "x.npz"), Colors())
    assert (list(gallery.names), gallery.classes) == (["0", "1"], ["bus", "coupe"])
    images = ImageTable(("a.jpg",), [0], ["test"])
    write_folder(
        tmp_path / "x", {}, images, np.ones((1, 2)), {"model": {"fingerprint": "sha256:1"}}
    )
    assert len(pictures_of(str(tmp_path / "x"), Colors())) == 1
    with pytest.raises(UserError, match="are of different models"):
        pictures_of(str(tmp_path / "x"), Colors("sha256:2"))


@pytest.mark.slow
def test_a_database_is_read_whole_or_refused(tmp_path, monkeypatch):
    pytest.importorskip("lancedb")
    held = small_gallery(tmp_path)
    address = f"lancedb://{tmp_path}/galleries"
    with open_gallery(address) as database:
        columns = {"path": held.names, "class": held.classes}
        database.add(held.names, held.embeddings, columns, model=Colors().fingerprint())
    gallery = pictures_of(address, Colors(), str(tmp_path))
    with pytest.raises(UserError, match="are of different models"):
        pictures_of(address, Colors("sha256:2"), str(tmp_path))
    order = [gallery.names.index(name) for name in held.names]
    np.testing.assert_allclose(gallery.embeddings[order], held.embeddings)
    assert [gallery.classes[row] for row in order] == held.classes
    monkeypatch.setattr(module, "MOST_ROWS", 11)
    with pytest.raises(UserError, match="more than 11 rows"):
        pictures_of(address, Colors())
