"""A retriever finds what a search by hand finds, names what is bad, and changes by whole versions."""

import dataclasses
import json
import shutil
import threading

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import prediction_log_pb2

from tests.export.conftest import CALIBRATION, SEARCHED, one_line
from tests.export.networks import picture, small_dataset, small_embedder
from tfdml.data import EncodedImages
from tfdml.embeddings.model_card import view_of
from tfdml.errors import UserError
from tfdml.evaluation import KNNClassifier, calibrate
from tfdml.export import GalleryItem, Retriever, prune, search_graph
from tfdml.export.gallery import embedded, items_of_dataset, items_of_folder
from tfdml.export.saved_model import version_numbers
from tfdml.export.search_graph import MAX_NEIGHBORS


@pytest.fixture(scope="module")
def retriever(shop):
    return Retriever.load(shop.retriever)


@pytest.fixture(scope="module")
def signatures(retriever):
    return retriever._version.loaded.signatures


@pytest.fixture
def own(shop, tmp_path):
    """A retriever whose versions the test may change."""
    shutil.copytree(shop.retriever, tmp_path / "versions")
    return Retriever.load(tmp_path / "versions")


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
    found = retriever.search(queries, 5)
    np.testing.assert_array_equal(found.indices, rows)
    np.testing.assert_allclose(found.distances, distances, atol=1e-6)
    np.testing.assert_allclose(found.similarities, (vectors[:, None] * shop.embeddings[rows]).sum(-1), atol=1e-6)
    assert found.ids.tolist() == [[shop.ids[row] for row in line] for line in rows]
    assert found.classes.tolist() == [[f"class {row // 3}" for row in line] for line in rows]
    assert json.loads(found.metadata[0, 0]) == {"class": f"class {rows[0, 0] // 3}", "path": f"{rows[0, 0]}.jpg"}


def test_images_of_the_gallery_find_themselves(shop, retriever):
    found = retriever.search(list(shop.images), 1)
    assert found.ids[:, 0].tolist() == list(shop.ids)
    np.testing.assert_allclose(found.distances, 0, atol=1e-6)


@pytest.mark.parametrize("limit", [0.0, 0.15, "calibrated", 3])
def test_what_is_further_than_a_distance_is_left_out(limit, shop, retriever):
    queries = [shop.images[4], picture(50)]
    whole, found = retriever.search(queries, 12), retriever.search(queries, 12, max_distance=limit)
    near = whole.distances <= (SEARCHED.threshold if limit == "calibrated" else limit)
    assert near[0].any() == (limit != 0.0)
    for name, filler in (
        *(("indices", -1), ("ids", ""), ("distances", np.inf), ("similarities", -1), ("classes", ""), ("metadata", "")),
    ):
        column, expected = getattr(found, name), getattr(whole, name)
        assert column.dtype == expected.dtype
        np.testing.assert_array_equal(column[near], expected[near])
        assert all(value == filler for value in column[~near])


def test_a_distance_that_is_none_or_not_calibrated_is_refused(shop, retriever):
    for limit in (-1, float("nan"), "near"):
        one_line(lambda limit=limit: retriever.search(shop.images[0], 1, max_distance=limit), "max_distance must")
    plain = Retriever(dataclasses.replace(retriever._version, calibration=None))
    with pytest.raises(UserError, match=r"built without a threshold: .* `calibrate=fpir=0\.01`"):
        plain.search(shop.images[0], 1, max_distance="calibrated")


def test_searches_say_what_is_accepted(shop, signatures):
    queries = [shop.images[4], picture(50)]
    found = search(signatures, "search_bytes", 12, image_bytes=queries)
    np.testing.assert_array_equal(found["accepted"], found["distances"] <= np.float32(SEARCHED.threshold))
    assert found["known"].tolist() == found["accepted"][:, 0].tolist()
    assert found["known"][0]
    none = search(signatures, "search_bytes", 0, image_bytes=queries[:0])
    assert none["known"].shape == (0,)


def clustered(seed, classes, per_class):
    """Items of unit vectors around random centers, each class with a name."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), per_class)
    x = rng.normal(size=(classes, 8))[labels] + 0.5 * rng.normal(size=(len(labels), 8))
    return [
        GalleryItem(f"{seed}/{row}", embedding=vector, label=int(label), metadata={"class": f"{seed} {label}"})
        for row, (vector, label) in enumerate(zip(x.astype("float32"), labels, strict=True))
    ]


def expected_calibration(gallery, asked):
    """By the classes of the gallery that the model was not trained on, each searching the whole gallery."""
    names, rows = np.array(gallery.classes), np.flatnonzero(asked)
    sides = {"gallery": gallery.embeddings, "gallery_labels": names, "own_rows": rows}
    return calibrate(gallery.embeddings[rows], names[rows], fpir=0.05, **sides)


@pytest.mark.slow
def test_a_gallery_calibrates_itself_by_classes_that_were_not_trained_on(shop, tmp_path, caplog):
    shutil.copytree(shop.embedder, tmp_path / "embedder")
    card = {"trained_on": [f"0 {label}" for label in range(5)], "view": view_of(small_embedder())}
    (tmp_path / "embedder" / "1" / "model_card.json").write_text(json.dumps(card))
    printed = []
    options = {"calibration": "fpir=0.05", "report": printed.append}
    retriever = Retriever.build(tmp_path / "embedder", clustered(0, 20, 6), tmp_path / "retriever", **options)
    gallery = retriever.gallery()
    expected = expected_calibration(gallery, gallery.labels >= 5)
    assert retriever.calibration == dataclasses.replace(expected, **arrays(retriever.calibration))
    assert (expected.num_images, expected.num_classes) == (120, 20)
    assert str(expected) in printed
    # Grown by half: calibrated again, and the graph has the new threshold.
    retriever.add(clustered(1, 12, 6))
    gallery = retriever.gallery()
    names = np.array(gallery.classes)
    expected = expected_calibration(gallery, ~np.isin(names, card["trained_on"]))
    assert retriever.calibration.threshold == pytest.approx(expected.threshold, rel=1e-6)
    assert retriever.calibration.num_images == 192
    served = tf.saved_model.load(str(retriever.path)).signatures["search_embedding"]
    found = served(embedding=tf.constant(gallery.embeddings), k=tf.constant(3))
    np.testing.assert_array_equal(found["accepted"], found["distances"] <= np.float32(retriever.calibration.threshold))
    assert not caplog.text
    # All trained on: not asked for, no threshold; asked for, refused.
    (tmp_path / "embedder" / "1" / "model_card.json").write_text(json.dumps({**card, "trained_on": names.tolist()}))
    items, folder = clustered(0, 20, 6), tmp_path / "other"
    assert Retriever.build(tmp_path / "embedder", items, folder, report=printed.append).calibration is None
    assert "no threshold for 'unknown': no image of the gallery is of a class that was not trained on" in printed
    with pytest.raises(UserError, match="no image of the gallery"):
        Retriever.build(tmp_path / "embedder", items, folder, **options)
    # A threshold from elsewhere warns in a gallery that is larger by half, and one of pairs is refused.
    other = dataclasses.replace(SEARCHED, num_images=80)
    Retriever.build(tmp_path / "embedder", items, folder, calibration=other)
    assert "for fpir=0.01 is of a gallery of 80 images, and this one has 120" in caplog.text
    with pytest.raises(UserError, match=r"far=0\.01 is a rate of pairs of images, not of searches"):
        Retriever.build(tmp_path / "embedder", items, folder, calibration=CALIBRATION)


def arrays(calibration):
    return {"distances": calibration.distances, "probabilities": calibration.probabilities}


def test_classify_answers_each_image(shop, retriever, signatures):
    foreign = tf.io.encode_png(np.zeros((40, 40, 3), np.uint8)).numpy()
    queries = [shop.images[4], foreign, b"", shop.images[7]]
    found = signatures["classify"](image_bytes=tf.constant(queries), k=tf.constant([3, 12, 3, 1]))
    gallery = retriever.gallery()
    for row, k in ((0, 3), (1, 12), (3, 1)):
        classifier = KNNClassifier(
            gallery.embeddings, gallery.labels, k=k, distance="euclidean", threshold=retriever.calibration
        )
        expected = classifier.classify(retriever.embed(queries[row]))
        assert found["labels"][row] == expected.labels[0]
        np.testing.assert_allclose(found["distances"][row], expected.distances[0], atol=1e-6)
        np.testing.assert_allclose(found["confidences"][row], expected.confidences[0], atol=1e-5)
    assert found["classes"].numpy().tolist() == [b"class 1", b"unknown", b"", b"class 2"]
    assert found["error"].numpy().tolist() == [b"", b"", b"no bytes", b""]
    empty = signatures["classify"](image_bytes=tf.constant([], tf.string), k=tf.constant(3))
    assert all(len(value) == 0 for value in empty.values())


def test_all_forms_of_a_query_find_the_same(shop, retriever, tmp_path):
    (tmp_path / "query.png").write_bytes(shop.images[0])
    pixels = tf.io.decode_image(shop.images[0]).numpy()
    expected = retriever.search([shop.images[0]], 3)
    for query in (
        shop.images[0],
        tmp_path / "query.png",
        [str(tmp_path / "query.png")],
        pixels,
        pixels[None],
        retriever.embed(shop.images[0])[0],
        7 * retriever.embed(shop.images[0]).astype(np.float64),
    ):
        found = retriever.search(query, 3)
        np.testing.assert_array_equal(found.ids, expected.ids)
        np.testing.assert_allclose(found.distances, expected.distances, atol=1e-6)


def test_more_neighbors_than_the_gallery_holds_is_all_of_it(shop, retriever, signatures):
    assert sorted(retriever.search(shop.images[0], 10_000).ids[0]) == sorted(shop.ids)
    answer = search(signatures, "search_embedding", 10_000, embedding=shop.embeddings[:2])
    assert answer["ids"].shape == (2, 12)


def test_a_bad_query_is_named(shop, retriever):
    vectors = shop.embeddings[:3].copy()
    vectors[1, 2] = np.nan
    for query, k, says in (
        (vectors, 2, r"embedding\[1\] of 3: holds NaN"),
        (np.zeros((2, 8)), 2, r"embedding\[0\] of 2: has length 0"),
        (np.ones((2, 7)), 2, r"must be \(images, 8\)"),
        (np.array(["a"]), 2, "real numbers"),
        ([shop.images[0], b""], 2, "1 of 2 images cannot be embedded, the first is image 1: no bytes"),
        (["nowhere.jpg"], 2, r"nowhere\.jpg cannot be read"),
        (np.zeros((5, 5), np.uint8), 2, "must be"),
        (np.zeros((1, 5, 5, 1), np.uint8), 2, r".+"),
        (vectors[:1], 0, "k=0"),
        (vectors[:1], 1.5, r"k=1\.5"),
    ):
        with pytest.raises(UserError, match=says) as refused:
            retriever.search(query, k)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("inputs", "k", "says"),
    [
        ({"embedding": [[0.0] * 8]}, 2, r"embedding\[0\] of 1: has length 0"),
        ({"embedding": [[1.0] * 8, [float("inf")] * 8]}, 2, r"embedding\[1\] of 2: holds NaN or infinite"),
        ({"embedding": [[1.0] * 7]}, 2, r"embedding: must be \(B, 8\); its shape is \[1 7\]"),
        ({"embedding": [1.0] * 8}, 2, r"embedding: must be|(?s:.+)"),
        ({"embedding": [[1.0] * 8] * 3}, [2, 0, 1], r"k\[1\] of 3: k is 0, less than 1"),
        ({"embedding": [[1.0] * 8] * 3}, [2, 1], "k: must be one number, or one for each of 3 queries"),
        ({"embedding": [[1.0] * 8]}, [[2]], "k: must be one number"),
        ({"image_bytes": [picture(0), b"", b"no"]}, 2, r"image_bytes\[1\] of 3: no bytes; bad in all: 2"),
    ],
)
def test_a_bad_request_is_an_error_that_names_what_is_bad(inputs, k, says, signatures):
    name = "search_bytes" if "image_bytes" in inputs else "search_embedding"
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=says):
        search(signatures, name, k, **inputs)


def test_each_query_has_its_own_number_of_neighbors(shop, signatures):
    answer = search(signatures, "search_embedding", [3, 1], embedding=shop.embeddings[:2])
    alone = [
        search(signatures, "search_embedding", k, embedding=shop.embeddings[i : i + 1]) for i, k in ((0, 3), (1, 1))
    ]
    assert answer["ids"][0].tolist() == alone[0]["ids"][0].tolist()
    assert answer["ids"][1].tolist() == [alone[1]["ids"][0, 0], b"", b""]
    assert answer["indices"][1, 1:].tolist() == answer["labels"][1, 1:].tolist() == [-1, -1]
    assert np.isinf(answer["distances"][1, 1:]).all()


@pytest.mark.slow
def test_in_search_each_a_bad_query_fails_no_other(shop, signatures):
    images = [shop.images[4], b"", shop.images[5], shop.images[6][:200], shop.images[7]]
    answer = search(signatures, "search_each", [2, 2, 0, 2, 1], image_bytes=images)
    errors = [error.decode() for error in answer["error"]]
    assert errors[1] == "no bytes"
    assert errors[2] == "k is 0, less than 1"
    assert "damaged" in errors[3]
    assert errors[0] == errors[4] == ""
    alone = search(signatures, "search_bytes", 2, image_bytes=[shop.images[4], shop.images[7]])
    assert answer["ids"][0].tolist() == alone["ids"][0].tolist()
    assert answer["ids"][4].tolist() == [alone["ids"][1, 0], b""]
    for row in (1, 2, 3):
        assert answer["indices"][row].tolist() == [-1, -1]


def test_an_empty_batch_has_an_empty_answer(signatures):
    for answer in (
        search(signatures, "search_bytes", 3, image_bytes=[]),
        search(signatures, "search_each", 3, image_bytes=[]),
        search(signatures, "search_embedding", np.zeros(0, np.int32), embedding=np.zeros((0, 8), np.float32)),
    ):
        assert all(len(value) == 0 for value in answer.values())


@pytest.mark.slow
def test_an_answer_of_too_many_results_is_refused(shop, tmp_path, monkeypatch):
    monkeypatch.setattr(search_graph, "MAX_RESULTS", 20)
    monkeypatch.setattr(search_graph, "MAX_NEIGHBORS", 11)
    search_graph.write_graph(search_graph.load_exported(shop.embedder / "1"), tmp_path / "graph")
    loaded = tf.saved_model.load(str(tmp_path / "graph"))
    for name in ("embeddings", "ids", "labels", "metadata"):
        shape = (12, 8) if name == "embeddings" else (12,)
        kind = loaded.table[name].dtype
        loaded.table[name].assign(tf.fill(shape, "x") if kind == tf.string else tf.ones(shape, kind))
    queries = np.ones((2, 8), np.float32)
    assert search(loaded.signatures, "search_embedding", 10, embedding=queries)["ids"].shape == (2, 10)
    with pytest.raises(tf.errors.InvalidArgumentError, match="k: 22 neighbors in all, more than the limit of 20"):
        search(loaded.signatures, "search_embedding", 11, embedding=queries)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"k\[0\] of 1: k is 12, more than the limit of 11"):
        search(loaded.signatures, "search_embedding", 12, embedding=queries[:1])


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
    path = shop.retriever / "1" / "assets.extra" / "tf_serving_warmup_requests"
    asked = set()
    for record in tf.data.TFRecordDataset(str(path)):
        request = prediction_log_pb2.PredictionLog.FromString(record.numpy()).predict_log.request
        name = request.model_spec.signature_name
        if name.startswith("search"):
            found = signatures[name](**{key: tf.constant(tf.make_ndarray(t)) for key, t in request.inputs.items()})
            assert found["ids"].shape == (request.inputs["k"].tensor_shape.dim[0].size, 10)
        elif name == "classify":
            found = signatures[name](**{key: tf.constant(tf.make_ndarray(t)) for key, t in request.inputs.items()})
            assert not any(found["error"].numpy())
        asked.add(name)
    assert asked == set(signatures)


@pytest.mark.slow
def test_adding_and_removing_write_versions_and_leave_the_old_ones(own, shop):
    old = Retriever.load(own.path)
    new = picture(77)
    folder = own.path.parent
    assert own.add([GalleryItem("new", new, label=9)]).name == "2"
    assert len(own) == 13
    assert own.search(new, 1).ids.tolist() == [["new"]]
    assert own.search(new, 1).indices.tolist() == [[12]]
    assert own.remove(["item 3", "new"]).name == "3"
    assert own.search(new, 20).ids.shape == (1, 11)
    assert "item 3" not in own.search(shop.images[3], 20).ids
    assert own.gallery().ids == tuple(name for name in shop.ids if name != "item 3")
    assert own.calibration.to_dict() == SEARCHED.to_dict()
    assert own.gallery().classes[2:4] == ["class 0", "class 1"]
    np.testing.assert_array_equal(own.gallery().labels, [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3])
    # Whoever had loaded the first version keeps it until a reload.
    assert len(old) == 12
    assert old.search(shop.images[3], 1).ids.tolist() == [["item 3"]]
    assert old.refresh()
    assert len(old) == 11
    assert not old.refresh()
    assert version_numbers(folder) == [1, 2, 3]
    assert len(Retriever.load(folder / "1")) == 12
    assert own.add([GalleryItem("item 4", new)], replace=True).name == "4"
    assert own.search(new, 1).ids.tolist() == [["item 4"]]
    assert len(own) == 11


def test_a_change_that_is_refused_writes_nothing(own):
    for change, says in (
        (lambda: own.add([GalleryItem("item 1", picture(1))]), "occur more than once, the first is item 1:"),
        (lambda: own.add([GalleryItem("a", picture(1)), GalleryItem("a", picture(2))]), "more than once"),
        (
            lambda: own.add([GalleryItem("a", picture(1)), GalleryItem("b", b"no")]),
            "1 of 2 gallery images .* is b: not",
        ),
        (lambda: own.add([GalleryItem("a", embedding=np.ones(7))]), r"the shape \(8,\), .* got \(7,\)"),
        (lambda: own.add([GalleryItem("a", embedding=np.full(8, np.nan))]), "NaN"),
        (lambda: own.add([]), "empty"),
        (lambda: own.remove(["nobody"]), "1 ids are not in the gallery, the first is nobody"),
        (lambda: own.remove(own.gallery().ids), "the gallery is empty"),
    ):
        with pytest.raises(UserError, match=says):
            change()
    assert [entry.name for entry in own.path.parent.iterdir()] == ["1"]
    assert len(own) == 12


@pytest.mark.slow
def test_two_that_add_at_once_lose_nothing(own):
    others = [own, Retriever.load(own.path)]
    vectors = np.random.default_rng(0).normal(size=(2, 8))
    threads = [
        threading.Thread(target=other.add, args=([GalleryItem(f"new {i}", embedding=vectors[i])],))
        for i, other in enumerate(others)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    newest = Retriever.load(own.path.parent)
    assert newest.path.name == "3"
    assert set(newest.gallery().ids) >= {"new 0", "new 1"}


@pytest.mark.slow
def test_searching_never_fails_while_versions_are_replaced_and_pruned(own, shop):
    folder = own.path.parent
    readers = [Retriever.load(folder) for _ in range(2)]
    done, failures, searches = threading.Event(), [], []

    def read(reader):
        try:
            while not done.is_set():
                reader.refresh()
                found = reader.search(shop.embeddings, 1)
                # The first twelve items are never removed: each query finds its own in every version.
                assert found.ids[:, 0].tolist() == list(shop.ids)
                assert len(Retriever.load(folder)) >= 12
                searches.append(1)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=read, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    vectors = -shop.embeddings[:4]
    for round_number in range(2):
        own.add([GalleryItem(f"new {round_number}", embedding=vectors[round_number])])
        own.remove([f"new {round_number}"])
        prune(folder, keep=1)
    done.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert searches
    assert version_numbers(folder) == [5]
    assert not [entry for entry in folder.iterdir() if entry.name.startswith(".")]


def test_pruning_keeps_the_newest(tmp_path):
    for number in (1, 2, 9, 10):
        (tmp_path / str(number)).mkdir()
    (tmp_path / "notes").mkdir()
    assert prune(tmp_path) == [1, 2]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["10", "9", "notes"]
    with pytest.raises(UserError, match="keep=0"):
        prune(tmp_path, keep=0)
    with pytest.raises(UserError, match="there is no such folder"):
        prune(tmp_path / "nowhere")


@pytest.mark.slow
def test_a_data_set_is_a_gallery_of_which_bad_images_are_left_out_only_when_asked(shop, retriever, tmp_path):
    dataset = small_dataset("test", classes=2, per_class=2)
    images = EncodedImages((*dataset.images.data[:3], b"no"), dataset.images.names)
    dataset = dataclasses.replace(dataset, images=images)
    lines = []
    built = Retriever.build(shop.embedder, dataset, tmp_path / "skipped", skip_bad=True, report=lines.append)
    assert built.gallery().ids == images.names[:3]
    np.testing.assert_array_equal(built.gallery().labels, dataset.labels[:3])
    assert json.loads(built.gallery().metadata[0]) == {"class": "100", "path": images.names[0]}
    assert len(lines) == 2
    assert "fpir=0.01 needs at least 100 queries of unknown classes, not 3" in lines[1]
    with pytest.raises(
        UserError, match=r"1 of 4 gallery images cannot be embedded, the first is 101_1\.jpg: not a JPEG"
    ):
        embedded(items_of_dataset(dataset), retriever._version.loaded.signatures["embed_each"])


def test_what_is_no_retriever_is_told(shop, tmp_path):
    with pytest.raises(UserError, match=r"no retriever\.json"):
        Retriever.load(shop.embedder)
    with pytest.raises(UserError, match="no exported version"):
        Retriever.load(tmp_path)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "saved_model.pb").touch()
    for card, says in (("[]", r"retriever\.json is damaged or of something else"), ("{}", "its key items must be")):
        (tmp_path / "1" / "retriever.json").write_text(card)
        with pytest.raises(UserError, match=says):
            Retriever.load(tmp_path)
    with pytest.raises(UserError, match="no exported version"):
        Retriever.build(tmp_path / "nowhere", [GalleryItem("a", b"x")], tmp_path / "out")


@pytest.fixture
def version(shop, tmp_path):
    shutil.copytree(shop.retriever, tmp_path / "versions")
    return tmp_path / "versions" / "1"


def change(path, **values):
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "gone"}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "says"),
    [
        *(({key: "gone"}, f"key {key} must be") for key in ("items", "embedding_dim", "calibration", "files")),
        ({"items": "12"}, "must be int"),
        ({"calibration": {"threshold": 0.1}}, "the calibration cannot be used: a calibration has the values"),
        ({"calibration": {**SEARCHED.to_dict(), "threshold": "near"}}, "the calibration cannot be used"),
        ({"calibration": {**SEARCHED.to_dict(), "distance": "dot"}}, "its distance is 'dot', not 'euclidean'"),
        ({"calibration": CALIBRATION.to_dict()}, "far=0.01 is a rate of pairs of images, not of searches"),
        ({"items": 13, "files": {}}, "states 13 items"),
        ({"files": {"../../etc/passwd": {"sha256": ""}}}, "names a file outside its folder"),
        ({"files": []}, "files must be dict"),
    ],
)
def test_a_malformed_manifest_is_refused(values, says, version):
    change(version / "retriever.json", **values)
    one_line(lambda: Retriever.load(version), says)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["saved_model.pb", "variables/variables.data-00000-of-00001"])
def test_a_flipped_bit_is_seen(name, version):
    data = bytearray((version / name).read_bytes())
    data[len(data) // 2] ^= 1
    (version / name).write_bytes(data)
    one_line(lambda: Retriever.load(version), r"is damaged: its SHA-256 is not that in .*retriever\.json")


@pytest.mark.slow
def test_another_model_in_its_place_is_refused(version, shop):
    shutil.rmtree(version / "variables")
    shutil.copytree(shop.embedder / "1", version, dirs_exist_ok=True)
    change(version / "retriever.json", files={})
    one_line(lambda: Retriever.load(version), "cannot be loaded as a retriever: ")


@pytest.mark.slow
def test_the_limit_of_neighbors_holds_for_small_galleries(shop):
    retriever = Retriever.load(shop.retriever)
    assert retriever.search(shop.images[0], MAX_NEIGHBORS).ids.shape == (1, 12)
    one_line(lambda: retriever.search(shop.images[0], MAX_NEIGHBORS + 1), "k=10001: must be a number from 1 to 10000")
    search = retriever._version.loaded.signatures["search_embedding"]
    with pytest.raises(tf.errors.InvalidArgumentError, match="k is 10001, more than the limit of 10000"):
        search(embedding=tf.constant(shop.embeddings[:1]), k=tf.constant(MAX_NEIGHBORS + 1))


def test_classes_of_two_folders_go_by_name(own, tmp_path):
    """The second folder numbers its classes from 0 again; `class 1` is in both."""
    for number, name in enumerate(("class 1", "pizza")):
        (tmp_path / "new" / name).mkdir(parents=True)
        (tmp_path / "new" / name / "0.jpg").write_bytes(picture(80 + number))
    own.add(items_of_folder(tmp_path / "new"))
    gallery = own.gallery()
    of_name = dict(zip(gallery.classes, gallery.labels.tolist(), strict=True))
    assert len(of_name) == len(set(of_name.values())) == 5
    assert gallery.classes.count("class 1") == 4
    assert own.search([picture(80), picture(81)], 1).classes.tolist() == [["class 1"], ["pizza"]]
    assert own.card["classes"] == 5


def test_bad_queries_keep_their_file_name(own, tmp_path, capfd):
    good, cut = tmp_path / "good.jpg", tmp_path / "cut.jpg"
    good.write_bytes(picture(3))
    cut.write_bytes(picture(3)[:300])
    with pytest.raises(UserError) as raised:
        own.search([good, cut, tmp_path / "cut.jpg"], 1)
    assert str(raised.value).startswith(f"2 of 3 images cannot be embedded, the first is {cut}: ")
    for word in ("Node", "{{", "Op", "image_bytes", "Graph", "jpeg"):
        assert word not in str(raised.value).replace(str(tmp_path), "").replace("cut.jpg", "")
    print(str(raised.value))
    text = capfd.readouterr()
    assert "Premature" not in text.err, text.err
