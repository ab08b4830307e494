"""`tfdml search`: the same neighbors in each kind of gallery, and one clear line for what is wrong."""

import json

import numpy as np
import pytest
from PIL import Image

from tfdml.retrieval import nearest_neighbours


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Stored embeddings of a gallery and of queries."""
    folder = tmp_path_factory.mktemp("search")
    rng = np.random.default_rng(0)
    points = rng.normal(size=(40, 8)).astype("float32")
    np.savez(folder / "gallery.npz", embeddings=points[:30], labels=np.arange(30) // 3)
    np.savez(folder / "queries.npz", embeddings=points[30:])
    np.savez(folder / "other.npz", embeddings=points[:, :5])
    return folder


def nearest(commands, folder, gallery, *flags):
    """The neighbors that the command writes, and what it prints."""
    path = folder / "nearest.json"
    queries = f"--embeddings={folder / 'queries.npz'}"
    status, said, errors = commands.run("search", f"--gallery={gallery}", queries, f"--json={path}", *flags)
    assert status == 0, errors
    return json.loads(path.read_text())["queries"], said


def test_stored_embeddings_and_a_database_find_the_same(commands, folder):
    points = np.load(folder / "gallery.npz")["embeddings"]
    rows, distances = nearest_neighbours(np.load(folder / "queries.npz")["embeddings"], points, k=4)
    stored, said = nearest(commands, folder, folder / "gallery.npz", "--k=4")
    assert [each["query"] for each in stored] == [str(number) for number in range(10)]
    assert [[int(item["id"]) for item in each["neighbors"]] for each in stored] == rows.tolist()
    assert [[item["label"] for item in each["neighbors"]] for each in stored] == (rows // 3).tolist()
    np.testing.assert_allclose([[item["distance"] for item in each["neighbors"]] for each in stored], distances)
    assert f"     1  {distances[0, 0]:8.4f}  {rows[0, 0]}  label={rows[0, 0] // 3}\n" in said

    pytest.importorskip("lancedb")
    uri = f"lancedb://{folder}/galleries"
    status, _, errors = commands.run("index", f"--embeddings={folder / 'gallery.npz'}", f"--to={uri}")
    assert status == 0, errors
    found, _ = nearest(commands, folder, uri, "--k=4")
    for here, there in zip(stored, found, strict=True):
        distances = [[item.pop("distance") for item in each["neighbors"]] for each in (here, there)]
        np.testing.assert_allclose(*distances, rtol=1e-6)
        assert here == there


def test_what_is_further_away_is_left_out(commands, folder):
    whole, _ = nearest(commands, folder, folder / "gallery.npz", "--k=4")
    some, _ = nearest(commands, folder, folder / "gallery.npz", "--k=4", "--max_distance=3")
    kept = [[item for item in each["neighbors"] if item["distance"] <= 3] for each in whole]
    assert [each["neighbors"] for each in some] == kept
    assert 0 < sum(map(len, kept)) < 40


def test_a_gallery_of_fewer_images_is_found_whole(commands, folder):
    stored, _ = nearest(commands, folder, folder / "gallery.npz", "--k=99", "--distance=cosine")
    assert {len(each["neighbors"]) for each in stored} == {30}


@pytest.mark.slow
def test_images_are_queries(commands, tmp_path):
    from tfdml.export import Retriever
    from tfdml.export.gallery import items_of_folder
    from tfdml.models import Embedder

    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(5):
            pixels = rng.integers(0, 255, (24, 24, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    embedder = Embedder("conv4", embedding_dim=4, image_size=16)
    embedder.build((None, 16, 16, 3))
    embedder.save(tmp_path / "embedder.keras")
    Retriever.build(embedder, items_of_folder(tmp_path / "photos"), tmp_path / "retriever")
    model = f"--model={tmp_path / 'embedder.keras'}"
    photos = ["--dataset=folder", f"--data_dir={tmp_path}/photos", "--split=all", f"--out={tmp_path}/embeddings"]
    status, _, errors = commands.run("embed", model, *photos)
    if status:
        pytest.fail(errors)
    asked = f"--images={tmp_path}/photos/a/*.png,{tmp_path}/photos/a/3.png"
    for number, flags in enumerate(([f"--gallery={tmp_path}/retriever"], [f"--gallery={tmp_path}/embeddings", model])):
        status, _, errors = commands.run("search", *flags, asked, f"--json={tmp_path}/{number}.json", "--k=2")
        assert status == 0, errors
        found = json.loads((tmp_path / f"{number}.json").read_text())["queries"]
        assert len(found) == 6
        for each in found:
            assert each["neighbors"][0]["id"].endswith("/".join(each["query"].split("/")[-2:]))
            assert each["neighbors"][0]["distance"] == pytest.approx(0, abs=2e-3)
    status, _, errors = commands.run("search", f"--gallery={tmp_path}/retriever", asked, "--max_distance=calibrated")
    assert status == 2
    assert "was built without a calibration: export its embedder with tfdml export --calibrate" in errors


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "--gallery is missing"),
        (["--gallery={}/gallery.npz"], "name the queries: --images or --embeddings"),
        (["--gallery={}/gallery.npz", "--images=a", "--embeddings=b"], "one of the two"),
        (["--gallery={}/gallery.npz", "--images={}/*.jpg"], "--model is missing"),
        (["--gallery={}/gallery.npz", "--images={}/*.jpg", "--model=nowhere"], "*.jpg"),
        (["--gallery={}/gallery.npz", "--images={}", "--model=x"], "is a folder: name its files"),
        (["--gallery={}/gallery.npz", "--embeddings={}/other.npz"], "dimension"),
        (["--gallery={}/gallery.npz", "--embeddings={}/none.npz"], "none.npz"),
        (["--gallery={}/nothing", "--embeddings={}/queries.npz"], "there are no embeddings at"),
        (["--gallery={}", "--embeddings={}/queries.npz"], "there is no exported version at"),
        (["--gallery={}", "--images=a", "--model=x"], "--model=x has no effect"),
        (["--gallery=lancedb://{}/none", "--embeddings={}/queries.npz"], "holds no table"),
        (["--gallery={}/gallery.npz", "--embeddings={}/queries.npz", "--k=0"], "--k=0"),
        (["--gallery={}/gallery.npz", "--images=a", "--max_distance=near"], "--max_distance=near: write a number"),
        (["--gallery={}/gallery.npz", "--images=a", "--max_distance=calibrated"], "only a retriever has a threshold"),
        (["--gallery={}/gallery.npz", "--embeddings={}/queries.npz", "--json=no/x.json"], "its folder does not exist"),
    ],
)
def test_what_is_wrong_is_one_line(commands, folder, flags, says):
    if "lancedb" in str(flags):
        pytest.importorskip("lancedb")
    status, _, errors = commands.run("search", *[flag.replace("{}", str(folder)) for flag in flags])
    assert (status, errors.count("\n")) == (2, 1), errors
    assert says in errors
