"""A retriever finds what a search by hand finds, names what is bad, and refuses what is damaged."""

import copy
import dataclasses
import json
import shutil

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.export.conftest import SEARCHED
from tests.export.networks import picture, small_embedder
from tfdml import names
from tfdml.data import EncodedImages, ImageDataset, load
from tfdml.embeddings.backends import SavedModelEmbedder
from tfdml.embeddings.model_card import CARD, view_of
from tfdml.errors import UserError
from tfdml.evaluation import calibrate
from tfdml.export import Retriever, RetrieverItems
from tfdml.export.retriever import _calibration
from tfdml.export.retriever_graph import nearest, search_embedding
from tfdml.export.saved_model import WARM_UP
from tfdml.registry import PER_CLASS
from tfdml.retrieval import About, MemoryGallery, Rows, open_gallery
from tfdml.web.pictures import pictures_of_gallery


@pytest.fixture(scope="module")
def retriever(shop):
    return Retriever.load(shop.retriever)


@pytest.fixture(scope="module")
def signatures(retriever):
    return retriever._loaded.signatures


def by_hand(queries, gallery, k):
    """Rows and Euclidean distances, in float64."""
    distances = np.linalg.norm(
        queries[:, None].astype(np.float64) - gallery[None].astype(np.float64), axis=-1
    )
    rows = np.argsort(distances, axis=1, kind="stable")[:, :k]
    return rows, np.take_along_axis(distances, rows, 1)


def search(signatures, name, k, **inputs):
    tensors = {
        key: tf.constant(value, tf.string if key == "image_bytes" else None)
        for key, value in inputs.items()
    }
    return {
        key: value.numpy()
        for key, value in signatures[name](**tensors, k=tf.constant(k, tf.int32)).items()
    }


def test_neighbors_are_those_of_a_search_by_hand(shop, retriever, signatures):
    queries = [picture(seed) for seed in (3, 50, 51)]
    vectors = retriever.embed(queries)
    rows, distances = by_hand(vectors, shop.embeddings, 5)
    result = retriever.search(queries, 5)
    np.testing.assert_allclose(result.distances, distances, atol=1e-6)
    assert result.ids.tolist() == [[shop.ids[row] for row in line] for line in rows]
    classes = [[f"class {row // 3}" for row in line] for line in rows]
    assert result.columns["class"].tolist() == classes
    assert json.loads(result.columns["metadata"][0, 0]) == {
        "class": f"class {rows[0, 0] // 3}",
        "path": f"item {rows[0, 0]}",
    }
    accepted = result.distances <= np.float32(SEARCHED.threshold)
    np.testing.assert_array_equal(result.columns["accepted"], accepted)
    answer = search(signatures, "search_embedding", 5, embedding=vectors)
    np.testing.assert_array_equal(answer["indices"], rows)
    np.testing.assert_array_equal(answer["labels"], rows // 3)
    np.testing.assert_array_equal(answer["known"], accepted.any(axis=1))
    products = (vectors[:, None] * shop.embeddings[rows]).sum(-1)
    np.testing.assert_allclose(answer["similarities"], products, atol=1e-6)


def test_all_forms_of_a_query_find_the_same(shop, retriever, tmp_path):
    (tmp_path / "query.png").write_bytes(shop.images[0])
    expected = retriever.search([shop.images[0]], 3)
    vector = retriever.embed(shop.images[0])
    forms = (
        shop.images[0],
        tmp_path / "query.png",
        [str(tmp_path / "query.png")],
        vector[0],
        7 * vector.astype(float),
    )
    for query in forms:
        result = retriever.search(query, 3)
        np.testing.assert_array_equal(result.ids, expected.ids)
        np.testing.assert_allclose(result.distances, expected.distances, atol=1e-6)
    # In batches of any size; more neighbors than there are means all.
    own = retriever.search(list(shop.images) * 3, 1)
    assert own.ids[:, 0].tolist() == list(shop.ids) * 3
    np.testing.assert_allclose(own.distances, 0, atol=1e-6)
    assert own.columns["accepted"].all()
    everything = retriever.search(shop.images[0], 100)
    assert sorted(everything.ids[0, :12]) == sorted(shop.ids)
    assert everything.ids[0, 12:].tolist() == [None] * 88
    assert np.isinf(everything.distances[0, 12:]).all()
    assert not everything.columns["accepted"][0, 12:].any()


def test_the_card_of_the_embedder_stays_with_it_but_for_other_files(shop):
    card = json.loads((shop.retriever / "1" / CARD).read_text())
    assert (card["run"], card["artifacts"]) == ("of the shop", {})


def test_a_retriever_is_a_gallery(shop, retriever, caplog):
    """Which `open_gallery` opens, and which compares models as every other."""
    with open_gallery(str(shop.retriever)) as gallery:
        assert (len(gallery), gallery.distance) == (12, "euclidean")
        assert gallery.about == About("euclidean", 8, retriever.card["model"])
        assert gallery.calibration.threshold == pytest.approx(SEARCHED.threshold)
        rows = gallery.rows(3, [*shop.ids[5:9], "no"])
        assert rows.ids == list(shop.ids[5:8])
        assert rows.columns["class"] == ["class 1", "class 2", "class 2"]
        assert rows.columns["path"] == rows.ids
        np.testing.assert_allclose(rows.vectors, shop.embeddings[5:8], atol=1e-6)
        assert gallery.class_counts() == {f"class {number}": 3 for number in range(4)}
        vectors = 3 * shop.embeddings[:2]
        found = gallery.search(vectors, 4, {"class": "class 2"})
        assert [sorted(row[:3]) for row in found.ids] == [sorted(shop.ids[6:9])] * 2
        assert found.ids[:, 3].tolist() == [None, None]
        everything = gallery.search(vectors, 12)
        for row, ids in enumerate(everything.ids.tolist()):
            of_class = [ids.index(name) for name in found.ids[row, :3]]
            assert of_class == sorted(of_class)
            np.testing.assert_allclose(
                everything.distances[row, of_class], found.distances[row, :3], atol=1e-6
            )
    # Of another model than a known one, and of one that nobody knows.
    known = copy.copy(retriever)
    known.card = {**retriever.card, "model": "sha256:1"}
    with pytest.raises(UserError, match="different models"):
        known.search(vectors, 1, model="sha256:2")
    caplog.clear()
    names.warn.cache_clear()
    known.search(list(shop.images[:1]), 1)
    known.search(vectors, 1, model="sha256:1")
    known.search(vectors, 1, model="unknown")
    assert not caplog.messages
    known.search(vectors, 1)
    note = "the model of the query embeddings is not known: models are not compared"
    assert caplog.messages == [f"{known.address}: {note}"]


def test_a_bad_query_is_named(shop, retriever, tmp_path):
    vectors = shop.embeddings[:3].copy()
    vectors[1, 2] = np.nan
    (tmp_path / "cut.jpg").write_bytes(picture(3)[:300])
    for query, k, message in (
        (vectors, 2, "NaN or infinite values .the first is row 1"),
        (np.zeros((2, 8)), 2, r"embedding\[0\] of 2"),
        (np.ones((2, 7)), 2, "7 dimensions"),
        ([shop.images[0], b""], 2, "image 1"),
        ([tmp_path / "cut.jpg"], 2, r"cut\.jpg"),
        (vectors[:1], 0, "k=0: "),
    ):
        with pytest.raises(UserError, match=message):
            retriever.search(query, k)


@pytest.mark.slow
def test_in_search_each_a_bad_query_fails_no_other(shop, signatures):
    images = [shop.images[4], b"", shop.images[6][:200], shop.images[7]]
    answer = search(signatures, "search_each", [2, 2, 1, 1], image_bytes=images)
    good, empty, damaged_image, also_good = (error.decode() for error in answer["error"])
    assert (good, empty, also_good) == ("", "no bytes", "")
    assert "damaged" in damaged_image
    alone = search(signatures, "search_bytes", 2, image_bytes=[shop.images[4], shop.images[7]])
    # Products of another number of rows may differ in their last bits.
    np.testing.assert_allclose(answer["distances"][[0, 3]], alone.pop("distances"), atol=1e-6)
    for name, values in alone.items():
        np.testing.assert_array_equal(answer[name][[0, 3]], values)
    assert answer["indices"][1:3].tolist() == answer["labels"][1:3].tolist() == [[-1, -1]] * 2
    assert answer["ids"][1:3].tolist() == [[b"", b""]] * 2
    assert np.isinf(answer["distances"][1:3]).all()
    assert answer["known"].tolist() == [True, False, False, True]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"image_bytes\[1\] of 4"):
        search(signatures, "search_bytes", 2, image_bytes=images)
    empty = search(signatures, "search_each", 3, image_bytes=[])
    assert all(len(value) == 0 for value in empty.values())


def test_an_answer_of_too_many_results_is_refused(shop, monkeypatch):
    monkeypatch.setattr("tfdml.export.retriever_graph.MAX_RESULTS", 20)
    columns = dict.fromkeys(("ids", "labels", "classes", "metadata"), tf.range(12, dtype=tf.int64))
    gallery = {"embeddings": tf.constant(shop.embeddings), **columns}
    queries = tf.constant(shop.embeddings[:2])
    assert search_embedding(gallery, queries, tf.constant(10))["ids"].shape == (2, 10)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="and 20 neighbors in all at most; k is 11, for 2 queries",
    ):
        search_embedding(gallery, queries, tf.constant(11))


@pytest.mark.slow
def test_the_graph_runs_in_a_session_as_servers_run_it(shop, retriever):
    """TF Serving loads a version into a session, where variables are restored by other means than
    in Python."""
    expected = retriever.search(list(shop.images[:2]), 3)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        loaded = tf.compat.v1.saved_model.load(
            session, ["serve"], str(shop.retriever / "1")
        ).signature_def
        signature = loaded["search_bytes"]
        feed = {
            signature.inputs["image_bytes"].name: list(shop.images[:2]),
            signature.inputs["k"].name: 3,
        }
        ids = session.run(signature.outputs["ids"].name, feed)
    assert [[text.decode() for text in line] for line in ids] == expected.ids.tolist()


@pytest.mark.slow
def test_the_warm_up_requests_are_ones_that_the_signatures_answer(shop, signatures):
    logs = pytest.importorskip("tensorflow_serving.apis.prediction_log_pb2")
    names, sizes = [], set()
    for record in tf.data.TFRecordDataset(str(shop.retriever / "1" / WARM_UP)):
        request = logs.PredictionLog.FromString(record.numpy()).predict_log.request
        names.append(request.model_spec.signature_name)
        inputs = {
            key: tf.constant(tf.make_ndarray(tensor)) for key, tensor in request.inputs.items()
        }
        answer = signatures[names[-1]](**inputs)
        assert not any(answer.get("error", tf.constant([b""])).numpy())
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
    np.testing.assert_allclose(
        second.gallery().embeddings[:12], first.gallery().embeddings, atol=1e-6
    )
    # Whoever has loaded a version keeps it.
    shutil.rmtree(first.path)
    assert first.search(shop.images[3], 1).ids.tolist() == [["item 3"]]
    assert Retriever.load(tmp_path / "versions").path == second.path


@pytest.mark.slow
def test_a_gallery_calibrates_itself_by_classes_that_were_not_trained_on(shop, tmp_path):
    shutil.copytree(shop.embedder, tmp_path / "embedder")
    file = tmp_path / "embedder" / "1" / "model_card.json"
    card = {
        "trained_on": [f"0 {label}" for label in range(5)],
        "view": view_of(small_embedder()),
        "fingerprint": "f",
    }
    file.write_text(json.dumps(card))
    rng, labels, folder = (
        np.random.default_rng(0),
        np.repeat(np.arange(20), 6),
        tmp_path / "retriever",
    )
    x = rng.normal(size=(20, 8))[labels] + 0.5 * rng.normal(size=(120, 8))
    items = RetrieverItems(
        x.astype("float32"), [*map(str, range(120))], [f"0 {label}" for label in labels], [{}] * 120
    )
    retriever = Retriever.build(tmp_path / "embedder", items, folder, calibration="fpir=0.05")
    gallery = retriever.gallery()
    names = np.array(gallery.classes)
    rows = np.flatnonzero(~np.isin(names, card["trained_on"]))
    sides = {"gallery": gallery.embeddings, "gallery_labels": names, "own_rows": rows}
    expected = calibrate(gallery.embeddings[rows], names[rows], fpir=0.05, **sides)
    assert retriever.calibration.threshold == pytest.approx(expected.threshold)
    assert retriever.calibration.rates == expected.rates
    assert retriever.card["model"] == retriever.gallery().model == "f"
    of_means = _calibration("fpir=0.05", gallery, card, print, "mean")
    expected = calibrate(
        gallery.embeddings[rows], names[rows], fpir=0.05, **sides, per_class="mean"
    )
    assert (of_means.threshold, of_means.basis) == (expected.threshold, expected.basis)
    # All trained on: not asked for, no threshold; asked for, refused. So is a threshold of pairs.
    trained_on = {"trained_on": names.tolist()}
    assert _calibration("auto", gallery, trained_on, print) is None
    with pytest.raises(UserError, match="cannot show the threshold"):
        _calibration("fpir=0.05", gallery, trained_on, print)
    with pytest.raises(UserError, match="pairs of images"):
        _calibration(dataclasses.replace(SEARCHED, kind="far"), gallery, {}, print)


# The search in the graph


def units(rng, count, dimensions):
    vectors = rng.normal(size=(count, dimensions))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 4), st.integers(1, 40), st.integers(0, 50))
def test_ties_are_in_the_order_of_rows(seed, batch, count, k):
    rng = np.random.default_rng(seed)
    # Vectors of length 1 in whose products float32 makes no error, and which are often equally
    # near.
    queries, gallery = (
        rng.choice([-0.5, 0.5], size=(rows, 4)).astype(np.float32) for rows in (batch, count)
    )
    rows, squares = nearest(tf.constant(queries), tf.constant(gallery), tf.constant(k))
    expected_rows, expected_distances = by_hand(queries, gallery, k)
    assert rows.shape == (batch, min(k, count))
    np.testing.assert_array_equal(rows, expected_rows)
    np.testing.assert_array_equal(np.sqrt(np.float64(squares)), expected_distances)


def test_equally_near_rows_are_in_order_also_where_their_products_are_not():
    """Lengths differ, as much as rounding lets them differ, so that the later row has the larger
    product."""
    gallery = np.array(
        [[0.5, 0.25], [0.75, 0.5], [0.75, -0.5], [0.5, -0.25], [-1.0, 0.0]], np.float32
    )
    for k in (1, 2, 3, 4, 5):
        rows, _ = nearest(tf.constant([[1.0, 0.0]]), tf.constant(gallery), tf.constant(k))
        assert rows.numpy().tolist() == [[0, 1, 2, 3, 4][:k]]


@pytest.mark.parametrize("k", [1, 7, 300])
def test_distances_are_exact(k):
    rng = np.random.default_rng(k)
    gallery = units(rng, 257, 16)
    # Neighbors so near that a product of float32 would lose their distance.
    queries = units(rng, 5, 16)
    gallery[100] = queries[2]
    gallery[200] = queries[2] + np.float32(3e-5) * units(rng, 1, 16)[0]
    rows, squares = nearest(tf.constant(queries), tf.constant(gallery), tf.constant(k))
    expected_rows, expected_distances = by_hand(queries, gallery, k)
    np.testing.assert_allclose(squares, expected_distances**2, rtol=2e-6, atol=1e-12)
    np.testing.assert_array_equal(rows, expected_rows)
    assert squares[2, 0] == 0


def test_neighbors_of_a_crowd_are_those_of_float64():
    """More images within the rounding of the product than there are spare candidates."""
    rng = np.random.default_rng(0)
    gallery = np.array([1, 0, 0, 0]) + 1e-5 * rng.normal(size=(300, 4))
    gallery = (gallery / np.linalg.norm(gallery, axis=1, keepdims=True)).astype(np.float32)
    rows, squares = nearest(tf.constant(gallery[:20]), tf.constant(gallery), tf.constant(5))
    exact = gallery.astype(np.float64)
    expected = np.sort(np.square(exact[:20, None] - exact).sum(axis=2), axis=1)[:, :5]
    np.testing.assert_allclose(squares, expected, rtol=2e-7)
    chosen = np.square(exact[:20, None] - exact[rows.numpy()]).sum(axis=2)
    np.testing.assert_allclose(chosen, expected, rtol=1e-12)


# Classes of several images


def items_of_classes(seed=0, classes=7, dim=8):
    """Items of classes of 1 to 7 images, in no order."""
    rng = np.random.default_rng(seed)
    sizes = 1 + np.arange(classes) % 7
    numbers = rng.permutation(np.repeat(np.arange(classes), sizes))
    vectors = rng.normal(size=(classes, dim))[numbers] + rng.normal(size=(len(numbers), dim))
    names = [f"class {number}" for number in numbers]
    ids = [f"image {row}" for row in range(len(numbers))]
    return RetrieverItems(vectors, ids, names, [{}] * len(ids))


def memory_gallery(items, rule):
    rows = Rows(list(items.ids), items.embeddings, {"class": list(items.classes)})
    about = About("euclidean", items.embeddings.shape[1])
    return MemoryGallery("items", rows, about).identities(rule)


@pytest.mark.parametrize("rule", PER_CLASS)
def test_the_graph_finds_by_each_rule_what_a_gallery_in_memory_finds(rule):
    items = items_of_classes(classes=60)
    table = {name: tf.constant(column) for name, column in items.table(rule).items()}
    queries = units(np.random.default_rng(1), 20, 8)
    gallery = memory_gallery(items, rule)
    for k in (1, 3, len(gallery), 100):
        answer = search_embedding(table, tf.constant(queries), tf.constant(k))
        expected = gallery.search(queries, k)
        found = min(k, len(gallery))
        ids = [[text.decode() for text in row] for row in answer["ids"].numpy()]
        assert ids == expected.ids[:, :found].tolist()
        np.testing.assert_allclose(answer["distances"], expected.distances[:, :found], rtol=1e-6)
        classes = [[text.decode() for text in row] for row in answer["classes"].numpy()]
        assert classes == expected.columns["class"][:, :found].tolist()
    if rule == "mean":
        names = np.array(items.classes)
        for query, row, similarities in zip(queries, classes, answer["similarities"], strict=True):
            cosines = [(items.embeddings[names == name] @ query).mean() for name in row]
            np.testing.assert_allclose(similarities, cosines, atol=1e-6)


_BASIS_OF_MEANS = dataclasses.replace(SEARCHED.basis, per_class="max_of_means")
OF_MEANS = dataclasses.replace(SEARCHED, threshold=0.9, basis=_BASIS_OF_MEANS)


def test_a_retriever_and_its_threshold_are_of_one_rule(shop):
    items = items_of_classes()
    for rule in ("nearest", "mean"):
        with pytest.raises(UserError, match="threshold is of per_class='max_of_means'"):
            _calibration(OF_MEANS, items, {}, print, rule)
    assert _calibration(OF_MEANS, items, {}, print, "max_of_means") is OF_MEANS
    with pytest.raises(UserError, match="was built by per_class=nearest"):
        open_gallery(str(shop.retriever), per_class="mean")
    with open_gallery(str(shop.retriever), per_class="nearest") as gallery:
        assert isinstance(gallery, Retriever)


@pytest.mark.slow
def test_a_retriever_of_means_finds_classes(shop, tmp_path, caplog):
    items = items_of_classes()
    stray = RetrieverItems(np.ones((1, 8)), ["stray"], [""], [{}])
    names.warn.cache_clear()
    retriever = Retriever.build(
        shop.embedder,
        [items, stray],
        tmp_path,
        calibration=OF_MEANS,
        per_class="max_of_means",
    )
    assert "leaves out 1 item without a class" in caplog.messages
    assert "a gallery of 4 classes, and this one has 7" in caplog.messages[-1]
    assert (len(retriever), retriever.card["items"], retriever.card["classes"]) == (7, 28, 7)
    queries = 3 * units(np.random.default_rng(1), 40, 8)
    expected = memory_gallery(items, "max_of_means").search(queries / 3, 9)
    with open_gallery(str(tmp_path), per_class="max_of_means") as gallery:
        assert gallery.about.per_class == "max_of_means"
        assert gallery.class_counts() == dict.fromkeys(sorted(set(items.classes)), 1)
        neighbors = gallery.search(queries, 9)
        one = gallery.search(queries, 9, {"class": "class 3"})
    assert neighbors.ids.tolist() == expected.ids.tolist()
    np.testing.assert_allclose(neighbors.distances, expected.distances, rtol=1e-6)
    accepted = expected.distances <= np.float32(0.9)
    assert neighbors.columns["accepted"].tolist() == accepted.tolist()
    assert one.ids[:, :2].tolist() == [["class 3", None]] * 40
    of_class = neighbors.distances[neighbors.ids == "class 3"]
    np.testing.assert_allclose(one.distances[:, 0], of_class, atol=1e-6)
    for ask, message in (
        (lambda: open_gallery(str(tmp_path), per_class="mean"), "built by per_class=max_of_means"),
        (retriever.gallery, "holds classes by per_class=max_of_means, not their images"),
        (lambda: pictures_of_gallery(retriever, "", ""), "not their images"),
        (lambda: retriever.identities("max_of_means", "path"), "not their images"),
    ):
        with pytest.raises(UserError, match=message):
            ask()


# Galleries


def test_galleries_that_cannot_be(shop, tmp_path):
    for vectors, ids, metadata, message in (
        ([[1.0, 0], [0, 0]], "ab", {}, "item b"),
        (np.eye(2), "aa", {}, "twice"),
        (np.eye(2), ("a", ""), {}, "empty"),
        (np.eye(2), "a", {}, "embeddings"),
        (np.eye(2), "ab", {"a": float("nan")}, "JSON"),
    ):
        with pytest.raises(UserError, match=message):
            RetrieverItems(
                np.array(vectors), tuple(ids), ("",) * len(ids), (metadata,) * len(ids)
            ).table()
    with pytest.raises(UserError, match="7 dimensions"):
        Retriever.build(
            shop.embedder, RetrieverItems(np.ones((1, 7)), ("a",), ("",), ({},)), tmp_path
        )
    gallery = RetrieverItems(np.eye(2), "ab", ("", "bus"), ({}, {}), "sha256:1")
    with pytest.raises(UserError, match="different models"):
        RetrieverItems.joined([gallery], 2, "sha256:2")


def test_classes_go_by_name():
    """Two folders number their classes from 0; `bus` is in both."""
    classes = ("bus", "van", "pizza", "bus", "", "7")
    columns = RetrieverItems(np.eye(6), tuple("abcdef"), classes, ({},) * 6).table()
    assert columns["classes"] == list(classes)
    assert columns["labels"].tolist() == [1, 3, 2, 1, -1, 0]


def test_images_of_a_folder_have_their_classes_and_bad_ones_are_left_out_only_when_asked(
    shop, tmp_path, retriever
):
    photos, lines = tmp_path / "photos", []
    for name, image in zip(("van/1.jpg", "coupe/b/2.PNG", "van/.4.jpg"), shop.images, strict=False):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        (photos / name).write_bytes(image)
    (photos / "van" / "gone.jpg").symlink_to("nowhere.jpg")
    backend, dataset = SavedModelEmbedder(retriever.path), load("folder", photos, "all")
    gallery = RetrieverItems.of_images(backend, dataset, photos, skip_bad=True, report=lines.append)
    assert list(gallery.ids) == ["coupe/b/2.PNG", "van/1.jpg"]
    assert gallery.metadata[0] == {"path": "coupe/b/2.PNG", "class": "coupe"}
    assert len(lines) == 1
    with pytest.raises(UserError, match=r"gone\.jpg"):
        RetrieverItems.of_images(backend, dataset, photos)


# Damage


def test_what_is_no_retriever_or_damaged_is_refused(shop, tmp_path):
    for path, message in ((shop.embedder, r"retriever\.json"), (tmp_path, "no exported version")):
        with pytest.raises(UserError, match=message):
            Retriever.load(path)

    def loaded(model=None, **values):
        shutil.copytree(shop.retriever / "1", tmp_path / "1", dirs_exist_ok=True)
        card = tmp_path / "1" / "retriever.json"
        content = {**json.loads(card.read_text()), **values}
        card.write_text(
            json.dumps({key: value for key, value in content.items() if value != "gone"})
        )
        if model is not None:
            (tmp_path / "1" / "saved_model.pb").write_bytes(model)
        return Retriever.load(tmp_path)

    flipped = bytearray((shop.retriever / "1" / "saved_model.pb").read_bytes())
    flipped[len(flipped) // 2] ^= 1
    for model, values, message in (
        (None, {"files": "gone"}, "files"),
        (None, {"calibration": {"threshold": 0.1}}, "calibration"),
        (None, {"calibration": {**SEARCHED.to_dict(), "distance": "dot"}}, "distance"),
        (None, {"files": {"../../etc/passwd": {"sha256": ""}}}, "outside its folder"),
        (flipped, {}, "SHA-256"),
        (b"another model", {"files": {}}, "cannot be loaded"),
    ):
        with pytest.raises(UserError, match=message):
            loaded(model, **values)
