"""A retriever finds what a search by hand finds, names what is bad, and refuses what is damaged."""

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf

from tests.export.conftest import SEARCHED
from tests.export.networks import picture, small_dataset, small_embedder
from tfdml.data import EncodedImages, ImageDataset, load
from tfdml.embeddings.backends import SavedModelEmbedder
from tfdml.embeddings.model_card import view_of
from tfdml.errors import UserError
from tfdml.evaluation import calibrate
from tfdml.export import Gallery, Retriever, search_graph
from tfdml.export.retriever import _calibration, joined
from tfdml.export.saved_model import WARM_UP


@pytest.fixture(scope="module")
def retriever(shop):
    return Retriever.load(shop.retriever)


@pytest.fixture(scope="module")
def signatures(retriever):
    return retriever._loaded.signatures


def by_hand(queries, gallery, k):
    """Rows and Euclidean distances, in float64."""
    distances = np.linalg.norm(queries[:, None].astype(np.float64) - gallery[None].astype(np.float64), axis=-1)
    rows = np.argsort(distances, axis=1, kind="stable")[:, :k]
    return rows, np.take_along_axis(distances, rows, 1)


def search(signatures, name, k, **inputs):
    tensors = {key: tf.constant(value, tf.string if key == "image_bytes" else None) for key, value in inputs.items()}
    return {key: value.numpy() for key, value in signatures[name](**tensors, k=tf.constant(k, tf.int32)).items()}


def test_neighbors_are_those_of_a_search_by_hand(shop, retriever):
    queries = [picture(seed) for seed in (3, 50, 51)]
    vectors = retriever.embed(queries)
    rows, distances = by_hand(vectors, shop.embeddings, 5)
    result = retriever.search(queries, 5)
    np.testing.assert_array_equal(result.indices, rows)
    np.testing.assert_allclose(result.distances, distances, atol=1e-6)
    np.testing.assert_allclose(result.similarities, (vectors[:, None] * shop.embeddings[rows]).sum(-1), atol=1e-6)
    assert result.ids.tolist() == [[shop.ids[row] for row in line] for line in rows]
    assert result.classes.tolist() == [[f"class {row // 3}" for row in line] for line in rows]
    np.testing.assert_array_equal(result.labels, rows // 3)
    assert json.loads(result.metadata[0, 0]) == {"class": f"class {rows[0, 0] // 3}", "path": f"item {rows[0, 0]}"}
    np.testing.assert_array_equal(result.accepted, result.distances <= np.float32(SEARCHED.threshold))
    assert result.known.tolist() == result.accepted.any(axis=1).tolist()


def test_all_forms_of_a_query_find_the_same(shop, retriever, tmp_path):
    (tmp_path / "query.png").write_bytes(shop.images[0])
    expected = retriever.search([shop.images[0]], 3)
    vector = retriever.embed(shop.images[0])
    forms = (shop.images[0], tmp_path / "query.png", [str(tmp_path / "query.png")], vector[0], 7 * vector.astype(float))
    for query in forms:
        result = retriever.search(query, 3)
        np.testing.assert_array_equal(result.ids, expected.ids)
        np.testing.assert_allclose(result.distances, expected.distances, atol=1e-6)
    # In batches of any size; more neighbors than there are means all.
    own = retriever.search(list(shop.images) * 3, 1)
    assert own.ids[:, 0].tolist() == list(shop.ids) * 3
    np.testing.assert_allclose(own.distances, 0, atol=1e-6)
    assert own.known.all()
    assert sorted(retriever.search(shop.images[0], 10_000).ids[0]) == sorted(shop.ids)


def test_a_bad_query_is_named(shop, retriever, tmp_path):
    vectors = shop.embeddings[:3].copy()
    vectors[1, 2] = np.nan
    (tmp_path / "cut.jpg").write_bytes(picture(3)[:300])
    for query, k, message in (
        (vectors, 2, r"embedding\[1\] of 3: holds NaN"),
        (np.zeros((2, 8)), 2, r"embedding\[0\] of 2: has length 0"),
        (np.ones((2, 7)), 2, r"shape \(2, 8\)"),
        ([shop.images[0], b""], 2, "^image 1 cannot be embedded: no bytes$"),
        ([tmp_path / "cut.jpg"], 2, r"cut\.jpg cannot be embedded: cannot be decoded"),
        (vectors[:1], 0, "k: must be at least 1"),
    ):
        with pytest.raises(UserError, match=message) as refused:
            retriever.search(query, k)
        assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_in_search_each_a_bad_query_fails_no_other(shop, signatures):
    images = [shop.images[4], b"", shop.images[6][:200], shop.images[7]]
    answer = search(signatures, "search_each", [2, 2, 1, 1], image_bytes=images)
    good, empty, damaged_image, also_good = (error.decode() for error in answer["error"])
    assert (good, empty, also_good) == ("", "no bytes", "")
    assert "damaged" in damaged_image
    alone = search(signatures, "search_bytes", 2, image_bytes=[shop.images[4], shop.images[7]])
    for name, values in alone.items():
        np.testing.assert_array_equal(answer[name][[0, 3]], values)
    assert answer["indices"][1:3].tolist() == answer["labels"][1:3].tolist() == [[-1, -1]] * 2
    assert answer["ids"][1:3].tolist() == [[b"", b""]] * 2
    assert np.isinf(answer["distances"][1:3]).all()
    assert answer["known"].tolist() == [True, False, False, True]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"image_bytes\[1\] of 4: no bytes; bad in all: 2"):
        search(signatures, "search_bytes", 2, image_bytes=images)


def test_an_empty_batch_has_an_empty_answer(signatures):
    answers = [search(signatures, name, 3, image_bytes=[]) for name in ("search_bytes", "search_each")]
    empty = np.zeros((0, 8), np.float32)
    answers.append(search(signatures, "search_embedding", np.zeros(0, np.int32), embedding=empty))
    assert all(len(value) == 0 for answer in answers for value in answer.values())


def test_an_answer_of_too_many_results_is_refused(shop, monkeypatch):
    monkeypatch.setattr(search_graph, "MAX_RESULTS", 20)
    columns = dict.fromkeys(("ids", "labels", "classes", "metadata"), tf.range(12, dtype=tf.int64))
    gallery = {"embeddings": tf.constant(shop.embeddings), **columns}
    queries = tf.constant(shop.embeddings[:2])
    assert search_graph.search_embedding(gallery, queries, tf.constant(10))["ids"].shape == (2, 10)
    with pytest.raises(tf.errors.InvalidArgumentError, match="and 20 neighbors in all at most; k is 11, for 2 queries"):
        search_graph.search_embedding(gallery, queries, tf.constant(11))


@pytest.mark.slow
def test_the_graph_runs_in_a_session_as_servers_run_it(shop, retriever):
    """TF Serving loads a version into a session, where variables are restored by other means than in Python."""
    expected = retriever.search(list(shop.images[:2]), 3)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        loaded = tf.compat.v1.saved_model.load(session, ["serve"], str(shop.retriever / "1")).signature_def
        signature = loaded["search_bytes"]
        feed = {signature.inputs["image_bytes"].name: list(shop.images[:2]), signature.inputs["k"].name: 3}
        ids = session.run(signature.outputs["ids"].name, feed)
    assert [[text.decode() for text in line] for line in ids] == expected.ids.tolist()


def test_the_warm_up_requests_are_ones_that_the_signatures_answer(shop, signatures):
    logs = pytest.importorskip("tensorflow_serving.apis.prediction_log_pb2")
    names, sizes = [], set()
    for record in tf.data.TFRecordDataset(str(shop.retriever / "1" / WARM_UP)):
        request = logs.PredictionLog.FromString(record.numpy()).predict_log.request
        names.append(request.model_spec.signature_name)
        inputs = {key: tf.constant(tf.make_ndarray(tensor)) for key, tensor in request.inputs.items()}
        answer = signatures[names[-1]](**inputs)
        assert not any(answer.get("error", tf.constant([b""])).numpy())
        assert "k" not in inputs or answer["ids"].shape == (len(inputs["k"]), 10)
        sizes |= {len(value) for value in inputs.values()}
    assert sorted(names) == sorted(3 * [*signatures])
    assert sizes == {1, 8, 32}


@pytest.mark.slow
def test_a_larger_gallery_is_another_version_around_the_same_embedder(shop, tmp_path):
    shutil.copytree(shop.retriever, tmp_path / "versions")
    first = Retriever.load(tmp_path / "versions")
    new = ImageDataset("new", "all", EncodedImages((picture(77),), ("new",)), [9])
    second = Retriever.build(first.path, [first.gallery(), new], tmp_path / "versions")
    assert (second.path.name, len(second), len(first)) == ("2", 13, 12)
    assert second.search(picture(77), 1).ids.tolist() == [["new"]]
    np.testing.assert_allclose(second.gallery().embeddings[:12], first.gallery().embeddings, atol=1e-6)
    sizes = [(one.path / "variables" / "variables.data-00000-of-00001").stat().st_size for one in (first, second)]
    assert sizes[1] < 1.2 * sizes[0]  # the first gallery is not in the second
    # Whoever has loaded a version keeps it.
    shutil.rmtree(first.path)
    assert first.search(shop.images[3], 1).ids.tolist() == [["item 3"]]
    assert Retriever.load(tmp_path / "versions").path == second.path


def clustered(seed, classes, per_class):
    """Unit vectors around random centers, each class with a name."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), per_class)
    x = rng.normal(size=(classes, 8))[labels] + 0.5 * rng.normal(size=(len(labels), 8))
    names = [f"{seed} {label}" for label in labels]
    return Gallery(x.astype("float32"), [f"{seed}/{row}" for row in range(len(x))], names, [{}] * len(x))


@pytest.mark.slow
def test_a_gallery_calibrates_itself_by_classes_that_were_not_trained_on(shop, tmp_path):
    shutil.copytree(shop.embedder, tmp_path / "embedder")
    file = tmp_path / "embedder" / "1" / "model_card.json"
    card = {"trained_on": [f"0 {label}" for label in range(5)], "view": view_of(small_embedder()), "fingerprint": "f"}
    file.write_text(json.dumps(card))
    printed, items, folder = [], clustered(0, 20, 6), tmp_path / "retriever"
    options = {"calibration": "fpir=0.05", "report": printed.append}
    retriever = Retriever.build(tmp_path / "embedder", items, folder, **options)
    gallery = retriever.gallery()
    names = np.array(gallery.classes)
    rows = np.flatnonzero(~np.isin(names, card["trained_on"]))
    sides = {"gallery": gallery.embeddings, "gallery_labels": names, "own_rows": rows}
    expected = calibrate(gallery.embeddings[rows], names[rows], fpir=0.05, **sides)
    assert retriever.calibration.threshold == pytest.approx(expected.threshold)
    assert retriever.calibration.rates == expected.rates
    assert str(expected) in printed
    assert retriever.card["model"] == retriever.gallery().model == "f"
    # All trained on: not asked for, no threshold; asked for, refused. So is a threshold of pairs.
    trained_on = {"trained_on": names.tolist()}
    assert _calibration("auto", gallery, trained_on, printed.append) is None
    assert "no threshold: the images cannot show the threshold: " in printed[-1]
    with pytest.raises(UserError, match="cannot show the threshold"):
        _calibration("fpir=0.05", gallery, trained_on, printed.append)
    with pytest.raises(UserError, match=r"far=0\.01 is a rate of pairs of images, not of searches"):
        _calibration(dataclasses.replace(SEARCHED, kind="far"), gallery, {}, printed.append)


# Galleries


def test_galleries_that_cannot_be(shop, tmp_path):
    for vectors, ids, metadata, message in (
        ([[1.0, 0], [0, 0]], "ab", {}, "item b: .* length 0"),
        (np.eye(2), "aa", {}, "occur twice, the first is 'a'"),
        (np.eye(2), ("a", ""), {}, "are empty"),
        (np.eye(2), "a", {}, "2, 1, 1, 1 embeddings"),
        (np.eye(2), "ab", {"a": float("nan")}, "as JSON"),
    ):
        with pytest.raises(UserError, match=message):
            Gallery(np.array(vectors), tuple(ids), ("",) * len(ids), (metadata,) * len(ids)).columns()
    with pytest.raises(UserError, match="have 7 dimensions, the embedder 8"):
        Retriever.build(shop.embedder, Gallery(np.ones((1, 7)), ("a",), ("",), ({},)), tmp_path)
    gallery = Gallery(np.eye(2), "ab", ("", "bus"), ({}, {}), "sha256:1")
    assert (gallery.take([1]).ids, gallery.take([1]).model) == (["b"], "sha256:1")
    with pytest.raises(UserError, match="are of different models"):
        joined([gallery], 2, "sha256:2")
    with pytest.raises(UserError, match="rows must be integers"):
        gallery.take(np.array([True, False]))


def test_classes_go_by_name():
    """Two folders number their classes from 0; `bus` is in both."""
    classes = ("bus", "van", "pizza", "bus", "", "7")
    columns = Gallery(np.eye(6), tuple("abcdef"), classes, ({},) * 6).columns()
    assert columns["classes"] == list(classes)
    assert columns["labels"].tolist() == [1, 3, 2, 1, -1, 0]


@pytest.fixture
def photos(tmp_path, shop):
    names = ["van/1.jpg", "coupe/b/2.PNG", "coupe/a.jpg", "van/loose.jpg", ".hidden/3.jpg", "van/.4.jpg"]
    for name, image in zip(names, shop.images, strict=False):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    (tmp_path / "photos" / "van" / "notes.txt").write_text("x")
    return tmp_path / "photos"


def test_images_of_a_folder_have_their_classes(photos, retriever):
    (photos / "van" / "gone.jpg").symlink_to("nowhere.jpg")
    backend, lines = SavedModelEmbedder(retriever.path), []
    options = {"skip_bad": True, "report": lines.append}
    gallery = Gallery.of_images(backend, load("folder", photos, "all"), photos, **options)
    assert gallery.ids == ("coupe/a.jpg", "coupe/b/2.PNG", "van/1.jpg", "van/loose.jpg")
    assert gallery.metadata[1] == {"path": "coupe/b/2.PNG", "class": "coupe"}
    assert lines == [f"bad image {photos}/van/gone.jpg: missing"]
    alone = photos / "coupe" / "b"
    gallery = Gallery.of_images(backend, load("folder", alone, "all"), alone)
    assert (gallery.ids, gallery.classes, gallery.metadata) == (("2.PNG",), [""], [{"path": "2.PNG"}])


@pytest.mark.slow
def test_a_data_set_is_a_gallery_of_which_bad_images_are_left_out_only_when_asked(shop, tmp_path):
    dataset = small_dataset("test", classes=2, per_class=2)
    images = EncodedImages((*dataset.images.data[:3], b"no"), dataset.images.names)
    dataset = dataclasses.replace(dataset, images=images)
    lines = []
    built = Retriever.build(shop.embedder, dataset, tmp_path / "skipped", skip_bad=True, report=lines.append)
    assert tuple(built.gallery().ids) == images.names[:3]
    assert list(built.gallery().classes) == ["100", "100", "101"]
    assert built.gallery().metadata[0] == {"class": "100", "path": images.names[0]}
    assert "fpir=0.01 needs at least 100 queries of unknown classes, not 3" in lines[1]
    message = r"1 of 4 gallery images cannot be embedded, the first is 101_1\.jpg: not a JPEG"
    with pytest.raises(UserError, match=message):
        Retriever.build(shop.embedder, dataset, tmp_path / "refused")


# Damage


def edited(path, **values):
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "gone"}))


def test_what_is_no_retriever_and_a_malformed_card_are_refused(shop, tmp_path):
    for path, message in ((shop.embedder, r"retriever\.json"), (tmp_path, "no exported version")):
        with pytest.raises(UserError, match=message):
            Retriever.load(path)
    for values, message in (
        ({"files": "gone"}, "key files must be"),
        ({"items": "12"}, "must be int"),
        ({"calibration": {"threshold": 0.1}}, "the calibration cannot be used: a calibration has the values"),
        ({"calibration": {**SEARCHED.to_dict(), "distance": "dot"}}, "of distance='dot', the search of 'euclidean'"),
        ({"files": {"../../etc/passwd": {"sha256": ""}}}, "names a file outside its folder"),
    ):
        shutil.copytree(shop.retriever / "1", tmp_path / "1", dirs_exist_ok=True)
        edited(tmp_path / "1" / "retriever.json", **values)
        with pytest.raises(UserError, match=message):
            Retriever.load(tmp_path)


def test_damaged_files_and_another_model_are_refused(shop, tmp_path):
    for name in ("saved_model.pb", os.path.join("variables", "variables.data-00000-of-00001")):
        shutil.copytree(shop.retriever / "1", tmp_path / "1", dirs_exist_ok=True)
        data = bytearray((tmp_path / "1" / name).read_bytes())
        data[len(data) // 2] ^= 1
        (tmp_path / "1" / name).write_bytes(data)
        with pytest.raises(UserError, match=r"is damaged: its SHA-256 is not that in .*retriever\.json"):
            Retriever.load(tmp_path)
    edited(tmp_path / "1" / "retriever.json", files={})
    (tmp_path / "1" / "saved_model.pb").write_bytes(b"another model")
    with pytest.raises(UserError, match="cannot be loaded as a retriever: "):
        Retriever.load(tmp_path)
