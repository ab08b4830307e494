"""`tfdml search`: the same neighbors in each kind of gallery, and one clear line for what is
wrong."""

import dataclasses
import json

import keras
import numpy as np
import pytest
from pyarrow.parquet import read_table

from tests.cli.commands import write_embedder, write_noise
from tfdml.data import load
from tfdml.embeddings import read_embeddings
from tfdml.evaluation import calibrate, evaluate_retrieval
from tfdml.export import Retriever
from tfdml.results import RetrievalResults
from tfdml.retrieval import Identities, nearest_neighbors, open_gallery


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Stored embeddings of a gallery and of queries."""
    folder = tmp_path_factory.mktemp("search")
    rng = np.random.default_rng(0)
    points = rng.normal(size=(40, 8)).astype("float32")
    np.savez(folder / "gallery.npz", embeddings=points[:30], labels=np.arange(30) // 3)
    np.savez(folder / "queries.npz", embeddings=points[30:])
    np.savez(folder / "other.npz", embeddings=points[:, :5])
    (folder / "written").mkdir()
    return folder


def nearest(commands, folder, gallery, *flags):
    """The neighbors that the command writes, and what it prints."""
    path = folder / "written" / "nearest.parquet"
    queries = f"--queries={folder / 'queries.npz'}"
    status, said, errors = commands.run(
        "search", f"--gallery={gallery}", queries, f"--out={path}", *flags
    )
    assert status == 0, errors
    table = read_table(path)
    columns = {name: table[name].to_numpy() for name in table.column_names}
    return RetrievalResults(columns), said


@pytest.mark.slow
def test_stored_embeddings_and_a_database_find_the_same(commands, folder):
    points = np.load(folder / "gallery.npz")["embeddings"]
    rows, distances = nearest_neighbors(np.load(folder / "queries.npz")["embeddings"], points, k=4)
    stored, _ = nearest(commands, folder, folder / "gallery.npz", "--k=4")
    assert stored.column("query").tolist() == [str(query) for query in range(10) for _ in range(4)]
    assert stored.column("id").astype(int).tolist() == rows.ravel().tolist()
    assert stored.column("class").tolist() == (rows // 3).ravel().astype(str).tolist()
    np.testing.assert_allclose(stored.column("distance"), distances.ravel())

    pytest.importorskip("lancedb")
    uri = f"lancedb://{folder}/galleries"
    status, _, errors = commands.run(
        "index", f"--embeddings={folder / 'gallery.npz'}", f"--to={uri}"
    )
    assert status == 0, errors
    found, _ = nearest(commands, folder, uri, "--k=4")
    np.testing.assert_allclose(found.column("distance"), stored.column("distance"), rtol=1e-6)
    assert found.table.drop_columns(["distance"]).equals(stored.table.drop_columns(["distance"]))


def test_a_threshold_of_a_file_is_of_the_distance_and_the_size_of_its_gallery(
    commands, folder, tmp_path, caplog
):
    arrays = np.load(folder / "gallery.npz")
    calibration = calibrate(arrays["embeddings"], arrays["labels"], fpir=0.1)
    path = tmp_path / "threshold.json"
    path.write_text(json.dumps({"calibration": calibration.to_dict()}))
    whole, _ = nearest(commands, folder, folder / "gallery.npz", "--k=4")
    some, said = nearest(
        commands, folder, folder / "gallery.npz", "--k=4", f"--max_distance={path}"
    )
    near = whole.column("distance") <= calibration.threshold
    assert [name for name in some.column("id") if name is not None] == whole.column("id")[
        near
    ].tolist()
    assert f"at most {calibration.threshold:.9g}\n" in said
    assert "is of a gallery of" not in caplog.text
    arguments = [
        f"--gallery={folder / 'gallery.npz'}",
        f"--queries={folder / 'queries.npz'}",
        f"--max_distance={path}",
    ]
    errors = commands.run("search", *arguments, "--distance=cosine")[2]
    assert "the threshold is of distance='euclidean'" in errors
    small = dataclasses.replace(calibration.basis, images=15)
    calibration = dataclasses.replace(calibration, basis=small)
    path.write_text(json.dumps({"calibration": calibration.to_dict()}))
    nearest(commands, folder, folder / "gallery.npz", f"--max_distance={path}")
    assert "is of a gallery of 15 images, and this one has 30" in caplog.text


def test_classes_are_found_by_their_means(commands, folder, tmp_path):
    gallery = folder / "gallery.npz"
    arrays = np.load(gallery)
    queries = np.load(folder / "queries.npz")["embeddings"]
    labels = arrays["labels"]
    calibration = calibrate(arrays["embeddings"], labels, fpir=0.1, per_class="mean")
    path = tmp_path / "threshold.json"
    path.write_text(json.dumps({"calibration": calibration.to_dict()}))
    names, classes = np.unique(labels, return_inverse=True)
    near, far = Identities(arrays["embeddings"], classes, "mean").search(queries, 2)
    flags = "--k=2", "--per_class=mean"
    table, _ = nearest(commands, folder, gallery, *flags)
    assert table.column("id").tolist() == names[near].ravel().astype(str).tolist()
    np.testing.assert_allclose(table.column("distance"), far.ravel(), rtol=1e-6)
    within, output = nearest(commands, folder, gallery, *flags, f"--max_distance={path}")
    accepted = [name for name in within.column("id") if name is not None]
    assert len(accepted) == np.sum(far <= calibration.threshold)
    assert "by per_class=mean" in output
    search = "search", f"--gallery={gallery}", f"--max_distance={path}"
    errors = commands.run(*search, f"--queries={folder / 'queries.npz'}")[2]
    assert "the threshold is of per_class='mean', the search of 'nearest'" in errors
    errors = commands.run(*search, f"--queries={gallery}", "--per_class=mean")[2]
    assert "name other --queries" in errors


def test_the_same_embeddings_are_searched_as_they_are_evaluated(commands, folder):
    gallery, out = folder / "gallery.npz", folder / "written" / "same.parquet"
    flags = f"--gallery={gallery}", f"--queries={gallery}", "--k=29", f"--out={out}"
    status, said, errors = commands.run("search", *flags)
    assert status == 0, errors
    arrays = np.load(gallery)
    metrics = evaluate_retrieval(
        arrays["embeddings"], arrays["labels"], metrics=["recall@1", "mrr"]
    )
    assert f"Recall@1 {100 * metrics['recall@1']:.2f} %\n" in said
    table = read_table(out).to_pandas()
    assert len(table) == 30 * 29
    first = table[table["relevant"]].groupby("query")["rank"].min()
    assert np.mean(1 / first) == pytest.approx(metrics["mrr"], abs=1e-12)
    for words, message in (
        ([f"{folder}/*.jpg", "--model=x"], "*.jpg"),
        ([f"{folder}/other.npz"], "dimension"),
    ):
        status, _, errors = commands.run(
            "search", f"--gallery={gallery}", f"--queries={words[0]}", *words[1:]
        )
        assert (status, message in errors) == (2, True), errors


@pytest.fixture(scope="module")
def two_shops(commands, tmp_path_factory):
    """An embedder, and two folders of images that number their classes each from 0; `b` is in
    both."""
    folder = tmp_path_factory.mktemp("shops")
    for shop, names in (("one", "ab"), ("two", "bc")):
        write_noise(folder / shop, names, 3)
    write_embedder(folder / "embedder.keras")
    for shop in ("one", "two"):
        data = [
            "--dataset=folder",
            f"--data_dir={folder / shop}",
            "--split=all",
            f"--out={folder / shop}.embeddings",
        ]
        status, _, errors = commands.run("embed", f"--model={folder}/embedder.keras", *data)
        assert status == 0, errors
    return folder


@pytest.mark.slow
def test_images_are_queries(commands, two_shops, tmp_path):
    photos, retriever = two_shops / "one", f"--gallery={tmp_path}/retriever"
    embedder = keras.saving.load_model(two_shops / "embedder.keras")
    Retriever.build(
        embedder, load("folder", photos, "all"), tmp_path / "retriever", directory=photos
    )
    stored, model = f"--gallery={two_shops}/one.embeddings", f"--model={two_shops}/embedder.keras"
    asked = f"--queries={photos}/a/*.png,{photos}/a/2.png"
    write_embedder(tmp_path / "other.keras")
    assert (
        "different models"
        in commands.run("search", stored, f"--model={tmp_path}/other.keras", asked)[2]
    )
    for number, flags in enumerate(([retriever], [stored, model])):
        status, text, errors = commands.run(
            "search", *flags, asked, f"--out={tmp_path}/{number}.parquet", "--k=2"
        )
        assert status == 0, errors
        assert "a/2.png  class=a" in text
        best = read_table(tmp_path / f"{number}.parquet").to_pandas().query("rank == 1")
        assert len(best) == 4
        for query, name, distance in zip(best["query"], best["id"], best["distance"], strict=True):
            assert name.endswith("/".join(query.split("/")[-2:]))
            assert distance == pytest.approx(0, abs=2e-3)
    assert (
        "no threshold" in commands.run("search", retriever, asked, "--max_distance=calibrated")[2]
    )


@pytest.mark.slow
def test_classes_of_two_folders_go_by_name_in_one_gallery(commands, two_shops):
    pytest.importorskip("lancedb")
    uri = f"lancedb://{two_shops}/galleries"
    index = ["index", f"--to={uri}"]
    assert commands.run(*index, f"--embeddings={two_shops}/one.embeddings")[0] == 0
    # `b/0.png` of the second shop is another image than that of the first.
    status, _, errors = commands.run(*index, f"--embeddings={two_shops}/two.embeddings")
    assert (status, "3 ids of" in errors) == (2, True)
    status, text, _ = commands.run(
        *index, f"--embeddings={two_shops}/two.embeddings", "--prefix=two/"
    )
    assert (status, "6 added, 0 replaced" in text) == (0, True)
    with open_gallery(uri) as gallery:
        rows = gallery.rows(99)
    assert {name: rows.columns["class"].count(name) for name in "abc"} == {"a": 3, "b": 6, "c": 3}
    query = f"--queries={two_shops}/two/c/1.png"
    status, text, errors = commands.run(
        "search", f"--gallery={uri}", f"--model={two_shops}/embedder.keras", query
    )
    assert status == 0, errors
    assert "two/c/1.png  class=c" in text.splitlines()[2]


@pytest.mark.slow
def test_queries_and_gallery_of_two_sources_are_compared_by_names(commands, two_shops):
    """Recall@1 of the queries of class b, whose number is 0 here and 1 in the gallery."""
    one, two = (read_embeddings(two_shops / f"{shop}.embeddings") for shop in ("one", "two"))
    nearest = nearest_neighbors(two.embeddings[:3], one.embeddings, k=1)[0][:, 0]
    flags = [f"--gallery={two_shops}/one.embeddings", f"--queries={two_shops}/two.embeddings"]
    status, text, errors = commands.run("search", *flags, f"--out={two_shops}/nearest.parquet")
    assert status == 0, errors
    assert f"Recall@1 {100 * (nearest >= 3).mean():.2f} %" in text
    table = read_table(two_shops / "nearest.parquet").to_pandas()
    assert set(table["query_class"]) == {"b", "c"}
    assert (table["relevant"] == (table["query_class"] == table["class"])).all()
    assert table[table["query_class"] == "c"]["num_relevant"].eq(0).all()
