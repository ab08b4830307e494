"""The same embedder from a .keras file, a SavedModel and a .tflite file embeds the same; other
files are refused."""

import dataclasses
import json
import shutil
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.export import models_on_disk
from tests.web.pages import COLORS, Colors, encoded
from tfdml import backbones
from tfdml.data import EncodedImages, EvaluationTransform, ImageDataset, evaluation_batches
from tfdml.data.transforms import resize_to_side
from tfdml.embeddings import embed
from tfdml.embeddings.backends import (
    embed_readable,
    embed_views,
    load_backend,
    load_embedder,
    views_of,
)
from tfdml.embeddings.model_card import fingerprint
from tfdml.errors import UserError
from tfdml.models import Head

FORMS = ("keras", "saved_model", "litert")
# Vectors of length 1 in float32: decoding is the same bit by bit, arithmetic is not.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def sources(models):
    return {form: load_backend(getattr(models, form)) for form in FORMS}


@pytest.mark.one_quick_case
@pytest.mark.parametrize("form", FORMS)
def test_the_embedders_own_vectors(form, sources, models):
    dataset = models_on_disk.pictures()
    view = EvaluationTransform(**models_on_disk.VIEW)
    expected = embed(
        lambda images: models.embedder(images, training=False),
        evaluation_batches(dataset, view, 11),
    )
    vectors = sources[form].embed(dataset, batch_size=4)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)
    assert sources[form].kind == form
    assert sources[form].view == models_on_disk.VIEW


def test_every_form_has_the_fingerprint_of_the_embedder_and_the_checksum_of_its_content(
    sources, models, tmp_path
):
    expected = fingerprint(models.embedder)
    assert {source.fingerprint() for source in sources.values()} == {expected}
    checksums = {source.checksum() for source in sources.values()}
    assert len(checksums) == 3
    copy = shutil.copytree(models.saved_model, tmp_path / "moved")
    assert load_backend(copy).checksum() == sources["saved_model"].checksum()
    (copy / "more.txt").write_text("")
    assert load_backend(copy).checksum() not in checksums


@pytest.mark.slow
def test_a_backend_is_cut_to_the_first_dimensions_and_is_another_model(sources, models):
    whole, cut = sources["keras"], load_backend(models.keras, truncate_dim=3)
    dataset = models_on_disk.pictures(7)
    vectors = whole.embed(dataset, 4)[:, :3]
    expected = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(cut.embed(dataset, 4), expected, atol=1e-6)
    np.testing.assert_array_equal(
        np.concatenate([*cut.stream(dataset.take(range(4, 7)), 4, 4)]), cut.embed(dataset, 4)[4:]
    )
    rows, readable = (
        np.concatenate(parts) for parts in zip(*cut.stream_readable(dataset, 4), strict=True)
    )
    assert rows.tolist() == list(range(7))
    np.testing.assert_allclose(readable, expected, atol=TOLERANCE)
    assert cut.checksum() != whole.checksum()
    assert cut.fingerprint() == f"3 dimensions of {whole.fingerprint()}"
    with pytest.raises(UserError, match="truncate_dim=7: the embeddings have 6 dimensions"):
        load_backend(models.keras, truncate_dim=7).embed(dataset, 4)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_pass_from_the_middle_continues_bit_by_bit(form, sources):
    dataset = models_on_disk.pictures()
    whole = list(sources[form].stream(dataset, 4))
    assert [len(batch) for batch in whole] == [4, 4, 3]
    for first in (4, 8):
        rest = list(sources[form].stream(dataset.take(range(first, len(dataset))), 4, 4))
        np.testing.assert_array_equal(np.concatenate(rest), np.concatenate(whole[first // 4 :]))


@pytest.mark.one_quick_case
@pytest.mark.parametrize("form", FORMS)
def test_an_image_that_cannot_be_decoded_is_named(form, sources):
    dataset = models_on_disk.pictures(broken=[6])
    with pytest.raises(UserError, match=r"image6\.jpg") as refused:
        sources[form].embed(dataset, 4)
    assert "image5" not in str(refused.value)


def test_a_saved_model_answers_batch_by_batch_and_names_the_image_that_it_refuses():
    """By a model that needs no graph."""
    colors = ["red", "green", "blue", "red", "green"]
    data = [encoded(COLORS[name]) for name in colors]
    names = tuple(f"image{row}.png" for row in range(5))
    images = EncodedImages(tuple(data), names)
    dataset = ImageDataset("colors", "all", images, np.zeros(5, np.int64))
    expected = np.array([COLORS[name] for name in colors]) / 255
    np.testing.assert_allclose(Colors().embed(dataset, 2), expected, atol=1e-6)
    data[3] = data[3][:-40]
    damaged = dataclasses.replace(dataset, images=EncodedImages(tuple(data), names))
    with pytest.raises(UserError, match=r"colors refuses image3\.png"):
        Colors().embed(damaged, 2)
    (rows, *more), vectors = zip(*Colors().stream_readable(damaged, 4), strict=True)
    assert [*rows, *np.concatenate(more)] == [0, 1, 2, 4]
    np.testing.assert_allclose(np.concatenate(vectors), expected[[0, 1, 2, 4]], atol=1e-6)


def test_a_file_without_a_card_or_with_that_of_another_model_is_refused(models, tmp_path):
    lone = tmp_path / "litert" / "model.tflite"
    lone.parent.mkdir()
    shutil.copyfile(models.litert, lone)
    with pytest.raises(UserError, match="copy that of its export"):
        load_backend(lone)
    for card in (
        {"view": {**models_on_disk.VIEW, "image_size": 36}},
        {"view": {"dimension": 4}},
        {},
    ):
        (tmp_path / "model_card.json").write_text(json.dumps(card))
        with pytest.raises(UserError, match=r"view|head|36 px"):
            load_backend(lone)


def test_the_newest_version_below_a_folder(models, tmp_path):
    for number in (2, 10):
        shutil.copytree(models.saved_model, tmp_path / str(number))
    assert load_backend(tmp_path).path == tmp_path / "10"
    # A later version of other formats alone is passed over; where there is nothing else, its files
    # are named.
    for folder in (tmp_path / "11", tmp_path / "lite" / "1"):
        shutil.copytree(models.litert.parent, folder / "litert")
    assert load_backend(tmp_path).path == tmp_path / "10"
    with pytest.raises(UserError, match="holds no SavedModel"):
        load_backend(tmp_path / "lite")


def test_what_is_no_model_is_refused(models, tmp_path):
    (tmp_path / "text.tflite").write_text("not a model")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "saved_model.pb").write_text("not a model")
    for path in (
        tmp_path / "text.tflite",
        tmp_path / "broken",
        tmp_path / "nowhere",
        models.litert.parent,
    ):
        with pytest.raises(UserError, match=path.name):
            load_backend(path)


def rewrite(source, target, **members):
    """A .keras file with other members; what stands under a name is called with the old content."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            change = members.get(name.partition(".")[0])
            new.writestr(name, change(old.read(name)) if change else old.read(name))


def test_keras_files_made_to_do_harm(models, tmp_path):
    def layer(module, name, /, **config):
        return json.dumps(
            {"module": module, "class_name": name, "config": config, "registered_name": name}
        ).encode()

    crafted = {
        "a layer of another package": layer("keras.layers", "FlaxLayer", module=None),
        "a layer of torch": layer("keras.layers", "TorchModuleWrapper", module="x", name="y"),
        "code": layer(
            "keras.layers",
            "Lambda",
            function={"class_name": "__lambda__", "config": {"code": "4wE="}},
        ),
        "a function of the system": layer("os", "system", command="touch made"),
        "a preset": layer("tfdml.models", "Embedder", backbone="hub:hf://a/b"),
        "a vocabulary": layer("keras.layers", "StringLookup", vocabulary="/etc/passwd"),
        "deep": b'{"a":' * 100_000,
        "another model": layer("keras.layers", "Dense", units=3),
    }
    for name, config in crafted.items():
        path = tmp_path / f"{name}.keras"
        rewrite(models.keras, path, config=lambda _, config=config: config)
        with pytest.raises(UserError, match=r"cannot be loaded|not an Embedder|not opened"):
            load_embedder(path)
    assert not (tmp_path / "made").exists()
    data = bytearray(models.keras.read_bytes())
    data[len(data) // 2] ^= 1
    for damaged in (data, b"\x89HDF\r\n\x1a\n" + bytes(99)):
        (tmp_path / "embedder.keras").write_bytes(damaged)
        with pytest.raises(UserError, match=r"cannot be loaded|is damaged"):
            load_embedder(tmp_path / "embedder.keras")


PLACES = ("hub:hf://a/b", "hub:kaggle://a/b", "hub:dinov2_small", "hub:/tmp/preset", "conv4")


@pytest.mark.parametrize("key", ["vocabulary", "merges", "proto", "filepath", "origin"])
def test_a_keras_file_that_names_another_file_is_refused_before_it_is_built(key, models, tmp_path):
    value = "https://h/a" if key == "origin" else "/etc/passwd"
    config = json.dumps({"class_name": "StringLookup", "config": {key: value}}).encode()
    rewrite(models.keras, tmp_path / "a.keras", config=lambda _: config)
    with pytest.raises(UserError, match=f"{key}='{value}', which is not opened"):
        load_embedder(tmp_path / "a.keras")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("load", [load_embedder, keras.saving.load_model])
def test_a_keras_file_that_names_its_backbone_opens_nothing_else(
    load, place, models, tmp_path, monkeypatch
):
    def named(content):
        config = json.loads(content)
        config["config"]["backbone"] = place
        return json.dumps(config).encode()

    def opened(*_):
        raise AssertionError("a place is opened")

    monkeypatch.setattr(backbones, "resolve", opened)
    rewrite(models.keras, tmp_path / "a.keras", config=named)
    with pytest.raises(UserError, match=f"{place}.*if you trust it"):
        load(tmp_path / "a.keras")


@pytest.mark.parametrize("mode", ["squash", "shorter", "pad"])
def test_crops_are_cut_from_the_resized_image(mode):
    transform = EvaluationTransform(20, 13, mode)
    image = tf.constant(np.random.default_rng(0).integers(0, 256, (31, 47, 3)), tf.uint8)
    whole = EvaluationTransform(20, 20, mode)
    views = views_of(transform, crops=5)
    assert len(views) == 10
    np.testing.assert_array_equal(views[0](image), transform(image))
    if mode == "shorter":  # wider than a square: the right corner is that of the whole
        resized = resize_to_side(image, 20, mode, (0, 0, 0)).numpy()
    else:
        resized = whole(image).numpy()
    height, width = resized.shape[:2]
    corners = [(top, left) for top in (0, height - 13) for left in (0, width - 13)]
    places = [((height - 13) // 2, (width - 13) // 2), *corners]
    for number, view in enumerate(views):
        top, left = places[number // 2]
        expected = resized[top : top + 13, left : left + 13]
        expected = expected[:, ::-1] if number % 2 else expected
        np.testing.assert_array_equal(view(image), expected)


@pytest.mark.slow
def test_embeddings_are_averaged_over_views(models, sources):
    backend, dataset = sources["keras"], models_on_disk.pictures(7)
    averaged = embed_views(backend, dataset, 4)
    total = 0.0
    for view in views_of(backend.transform):
        images = np.stack(
            [view(tf.constant(dataset.images.picture(row))).numpy() for row in range(7)]
        )
        total = total + np.asarray(models.embedder(images), np.float64)
    np.testing.assert_allclose(
        averaged, total / np.linalg.norm(total, axis=1, keepdims=True), atol=1e-5
    )
    one = embed_views(backend, dataset, 4, flip=False)
    np.testing.assert_allclose(one, backend.embed(dataset, 4), atol=1e-6)
    for arguments, error in (
        ({"crops": 5}, "no room"),
        ({"crops": 2}, "1 or 5"),
        ({"flip": 1}, "true or false"),
    ):
        with pytest.raises(ValueError, match=error):
            views_of(EvaluationTransform(28, 28), **arguments)
    with pytest.raises(UserError, match="has one view"):
        embed_views(sources["saved_model"], dataset, 4)


def test_no_stored_vector_is_left_out_for_the_image_that_it_is_of(tmp_path):
    head = Head(3, embedding_dim=2)
    head.build((None, 3))
    head.save(tmp_path / "head.keras")
    backend = load_backend(tmp_path / "head.keras")
    dataset = ImageDataset(vectors=np.eye(3), labels=[0, 0, 1])
    rows, vectors, faults = embed_readable(backend, dataset, batch_size=2)
    assert (rows.tolist(), faults) == ([0, 1, 2], [])
    np.testing.assert_array_equal(vectors, backend.embed(dataset, 2))
