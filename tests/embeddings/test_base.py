"""Several views of an image, whose embeddings are averaged; embeddings that are cut."""

import numpy as np
import pytest
import tensorflow as tf

from tests.models.networks import tiny_embedder
from tfdml import data
from tfdml.data.transforms import EvaluationTransform
from tfdml.embeddings.backends import load_backend
from tfdml.embeddings.base import Views, embed_views
from tfdml.errors import UserError


@pytest.mark.parametrize("mode", ["squash", "shorter", "pad"])
def test_crops_are_cut_from_the_resized_image(mode):
    transform = EvaluationTransform(20, 13, mode)
    image = tf.constant(np.random.default_rng(0).integers(0, 256, (31, 47, 3)), tf.uint8)
    whole = EvaluationTransform(20, 20, mode)
    views = Views(flip=True, crops=5).of(transform)
    assert len(views) == 10
    np.testing.assert_array_equal(views[0](image), transform(image))
    if mode == "shorter":  # wider than a square: the right corner is that of the whole
        from tfdml.data.transforms import resize_to_side

        resized = resize_to_side(image, 20, mode, (0, 0, 0)).numpy()
    else:
        resized = whole(image).numpy()
    height, width = resized.shape[:2]
    places = [
        ((height - 13) // 2, (width - 13) // 2),
        (0, 0),
        (0, width - 13),
        (height - 13, 0),
        (height - 13, width - 13),
    ]
    for number, view in enumerate(views):
        top, left = places[number // 2]
        expected = resized[top : top + 13, left : left + 13]
        expected = expected[:, ::-1] if number % 2 else expected
        np.testing.assert_array_equal(view(image), expected)
        size = tf.constant([31, 47])
        window = view.window(size)
        y, x, h, w = window.numpy()
        np.testing.assert_array_equal(view.finish(image[y : y + h, x : x + w], window, size), expected)


def test_embeddings_are_averaged(tmp_path):
    embedder = tiny_embedder(resize=14, resize_mode="squash")
    embedder.build((None, embedder.image_size, embedder.image_size, 3))
    embedder.save(tmp_path / "tiny.keras")
    backend = load_backend(tmp_path / "tiny.keras")
    dataset = data.load("glyphs", split="test", images_per_class=2, size=32).take(np.arange(7))
    found = embed_views(backend, dataset, 4, Views(flip=True, crops=5))
    total = 0.0
    for view in Views(flip=True, crops=5).of(EvaluationTransform.of(embedder)):
        images = np.stack([view(tf.constant(image)).numpy() for image in dataset.images.data])
        total = total + np.asarray(embedder(images), np.float64)
    np.testing.assert_allclose(found, total / np.linalg.norm(total, axis=1, keepdims=True), atol=1e-5)
    one = embed_views(backend, dataset, 4, Views(flip=False))
    np.testing.assert_allclose(one, backend.embed(dataset, 4), atol=1e-6)


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match="no room"):
        Views(crops=5).of(EvaluationTransform(28, 28))
    for wrong, says in (({"crops": 2}, "crops must be 1 or 5"), ({"flip": 1}, "flip must be true or false")):
        with pytest.raises(ValueError, match=says):
            Views(**wrong)
    with pytest.raises(UserError, match="has one view"):
        embed_views(type("Served", (), {"address": "grpc://x"})(), None, 1, Views())


def test_a_backend_is_cut_to_the_first_dimensions_and_is_another_model(tmp_path):
    embedder = tiny_embedder(resize=14)
    embedder.build((None, embedder.image_size, embedder.image_size, 3))
    embedder.save(tmp_path / "tiny.keras")
    whole, cut = load_backend(tmp_path / "tiny.keras"), load_backend(tmp_path / "tiny.keras", truncate_dim=3)
    dataset = data.load("glyphs", split="test", images_per_class=2, size=32).take(np.arange(7))
    vectors = whole.embed(dataset, 4)[:, :3]
    expected = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(cut.embed(dataset, 4), expected, atol=1e-6)
    np.testing.assert_array_equal(np.concatenate([*cut.stream(dataset, 4, 4)]), cut.embed(dataset, 4)[4:])
    rows, readable = (np.concatenate(parts) for parts in zip(*cut.stream_readable(dataset, 4), strict=True))
    assert rows.tolist() == list(range(7))
    np.testing.assert_allclose(readable, expected, atol=1e-5)
    assert cut.checksum() != whole.checksum()
    assert (cut.kind, cut.address, cut.view) == (whole.kind, whole.address, whole.view)
    with pytest.raises(UserError, match="`truncate_dim=6`: the embeddings have 5 dimensions"):
        load_backend(tmp_path / "tiny.keras", truncate_dim=6).embed(dataset, 4)
