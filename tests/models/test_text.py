"""An embedder of texts, and a learner of two views: its step, its files, what it refuses."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.models.networks import Taking, colored_batch, tiny_embedder, values
from tests.models.test_chunks import check
from tests.support.mathematics import assert_close, dtype_policy
from tfdml import losses, objectives
from tfdml.errors import UserError
from tfdml.models import ByteTokenizer, Head, MetricLearner, TextEmbedder, byte_encoder
from tfdml.training.optimizers import build_optimizer

WORDS = ("red", "Green sea", "bleu ciel, été")
LENGTH = 24


def text_embedder(dim=5, **options):
    keras.utils.set_random_seed(1)
    return TextEmbedder(
        byte_encoder(LENGTH, 4), ByteTokenizer(LENGTH), embedding_dim=dim, **options
    )


def terms():
    return [
        objectives.SoftmaxAcrossViews(dims=[2, 5]),
        objectives.SigmoidAcrossViews(weight=0.1, shared="left_out"),
        objectives.AcrossViews(losses.TripletLoss(0.2)),
        losses.ContrastiveLoss(),
        objectives.MetricLoss(
            losses.ContrastiveLoss(), representation="text_embedding", name="of texts"
        ),
    ]


def learner(objectives=None):
    return MetricLearner({"image": tiny_embedder(), "text": text_embedder()}, objectives or terms())


def batch():
    labels, images = colored_batch()
    return labels, {
        "image": images,
        "text": text_embedder().tokenize([WORDS[label] for label in labels]),
    }


def test_the_gradient_of_both_embedders_by_chunks_is_that_of_a_plain_step():
    labels, inputs = batch()
    check(learner, batch=(labels, inputs))


def test_bytes_that_many_texts_share_train_by_the_sum_of_their_gradients():
    labels, inputs = batch()
    weights = []
    for chunk in (0, 8):  # by chunks all gradients are dense
        model = learner(objectives.SoftmaxAcrossViews())
        model.gradient_cache = chunk
        model.build(model.view_shape)
        options = {"weight_decay": 0.01, "clip_norm": 0.1, "ema": 0.9, "epsilon": 0.01}
        model.compile(build_optimizer("adam", model, 0.01, **options), run_eagerly=True)
        for _ in range(2):
            model.train_step(
                ({view: tf.constant(x) for view, x in inputs.items()}, tf.constant(labels))
            )
        weights.append(values(model.trainable_variables))
    for one, other in zip(*weights, strict=True):
        assert_close(one, other, 1e-4, floor=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"jit_compile": True}, {"jit_compile": False, "run_eagerly": True}],
    ids=["xla", "eager"],
)
def test_it_learns_to_find_texts_and_continues_as_it_was_saved(options, tmp_path):
    labels, inputs = batch()
    # XLA takes a minute for all of them.
    model = learner(terms()[1:2] if "run_eagerly" not in options else None)
    model.compile(keras.optimizers.Adam(0.01), **options)
    losses_of = model.fit(inputs, labels, epochs=4, batch_size=len(labels), verbose=0).history[
        "loss"
    ]
    assert losses_of[-1] < losses_of[0]
    model.save(tmp_path / "learner.keras")
    again = keras.saving.load_model(tmp_path / "learner.keras")
    assert list(again.towers) == ["image", "text"]
    for one, other in zip(model(inputs).items(), again(inputs).items(), strict=True):
        assert one[0] == other[0]
        np.testing.assert_array_equal(one[1], other[1])
    for copy in (model, again):
        copy.fit(inputs, labels, batch_size=len(labels), verbose=0)
    for one, other in zip(
        values(model.trainable_variables), values(again.trainable_variables), strict=True
    ):
        assert_close(one, other, 1e-5, floor=1e-6)


def test_parts_are_named_by_view_and_a_frozen_tower_stays():
    labels, inputs = batch()
    model = learner()
    model.build(model.view_shape)
    assert list(model.parts()) == [
        "backbone",
        "projection",
        "text backbone",
        "text projection",
        "objectives",
    ]
    model.embedder.trainable = False
    before = values(model.embedder.weights)
    model.compile(Taking(), run_eagerly=True)
    model.train_step(({view: tf.constant(x) for view, x in inputs.items()}, tf.constant(labels)))
    # Those of BatchNorm in its own mode are the frozen layer's.
    for one, other in zip(before, values(model.embedder.weights), strict=True):
        np.testing.assert_array_equal(one, other)


def vectors():
    """Labels, and vectors of two views."""
    x = np.random.default_rng(0).normal(size=(2, 8, 6)).astype("float32")
    return np.arange(8) % 3, {"image": x[0], "text": x[1]}


def heads(objectives_of_views=None):
    """A learner of vectors of two views, not built."""
    keras.utils.set_random_seed(1)
    text = keras.Sequential([keras.layers.Dense(5), keras.layers.Dense(4)])
    towers = {"image": Head(6, 4), "text": Head(6, head=text, dropout=0.5, name="texts")}
    return MetricLearner(towers, objectives_of_views or objectives.SigmoidAcrossViews())


def freeze_text(model):
    model.towers["text"].trainable = False


def freeze_a_layer(model):
    model.towers["text"].head.layers[1].trainable = False


def freeze_all_but_a_layer(model):
    freeze_text(model)
    model.towers["text"].head.layers[0].trainable = True


FREEZES = {"tower": freeze_text, "layer": freeze_a_layer, "rest": freeze_all_but_a_layer}


@pytest.mark.parametrize("freeze", FREEZES)
def test_what_is_frozen_stays_so_in_a_file_and_before_weights_are_created(freeze, tmp_path):
    labels, inputs = vectors()
    model = heads()
    FREEZES[freeze](model)
    model.compile("adam", run_eagerly=True)
    model.fit(inputs, labels, batch_size=8, verbose=0)
    # Two weights of each of three layers, the scale and the bias.
    trained = {"tower": 4, "layer": 6, "rest": 6}[freeze]
    assert len(model.trainable_variables) == trained
    model.save(tmp_path / "learner.keras")
    again = keras.saving.load_model(tmp_path / "learner.keras")
    assert len(again.trainable_variables) == trained
    for one, other in zip(
        values(model.optimizer.variables), values(again.optimizer.variables), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    model.embedder.save(tmp_path / "image.keras")
    model.towers["text"].save(tmp_path / "text.keras")
    text = keras.saving.load_model(tmp_path / "text.keras")
    flags = [weight.trainable for weight in text.weights]
    assert flags == [weight.trainable for weight in model.towers["text"].weights]


def test_fit_refuses_what_was_frozen_or_thawed_since_the_optimizer_was_built():
    labels, inputs = vectors()
    model = heads()
    model.compile("adam", run_eagerly=True)
    for frozen, words in ((True, "4 variables are frozen"), (False, "4 variables are trainable")):
        model.fit(inputs, labels, batch_size=8, verbose=0)
        model.towers["text"].trainable = not frozen
        before = values(model.variables + model.optimizer.variables)
        for method in (model.fit, model.train_on_batch):
            with pytest.raises(UserError, match=words):
                method(inputs, labels)
        for one, other in zip(
            before, values(model.variables + model.optimizer.variables), strict=True
        ):
            np.testing.assert_array_equal(one, other)
        model.evaluate(inputs, labels, verbose=0)
        model.compile("adam", run_eagerly=True)
        text = values(model.towers["text"].weights)
        model.fit(inputs, labels, batch_size=8, verbose=0)
        changed = [
            not np.array_equal(*pair)
            for pair in zip(text, values(model.towers["text"].weights), strict=True)
        ]
        assert any(changed) != frozen


def test_the_dropout_of_a_frozen_part_is_off():
    layers = [keras.layers.Embedding(9, 8), keras.layers.Dropout(0.5)]
    encoder = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
    tower = TextEmbedder(encoder, embedding_dim=4, dropout=0.5)
    tower.build((None, 6))
    x = np.arange(48).reshape(8, 6) % 9

    def differing():
        runs = [tower.represent(x, training=True) for _ in range(2)]
        return {name for name in runs[0] if np.any(np.asarray(runs[0][name] != runs[1][name]))}

    assert differing() == {"pooled", "projection", "embedding"}
    tower.freeze_backbone()
    assert differing() == {"projection", "embedding"}
    tower.trainable = False
    assert not differing()


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return 2

    def __getitem__(self, index):
        rows = slice(index * 4, index * 4 + 4)
        return {view: x[rows] for view, x in self.x.items()}, self.y[rows]


FORMS = {
    "the first view": lambda x, y: x["image"],
    "views": lambda x, y: x,
    "a dataset": lambda x, y: tf.data.Dataset.from_tensor_slices((x, y)).batch(3),
    "a dataset of views": lambda x, y: tf.data.Dataset.from_tensor_slices(x).batch(3),
    "a generator": lambda x, y: (batch for batch in [(x, y)]),
    "batches": Batches,
}


@pytest.mark.parametrize("form", FORMS)
def test_predict_takes_what_fit_takes_and_embeds_the_first_view(form):
    labels, inputs = vectors()
    model = heads()
    expected = model.embedder(inputs["image"])
    assert_close(model.predict(FORMS[form](inputs, labels), verbose=0), expected)
    if form in ("the first view", "views"):
        assert_close(model.predict_on_batch(FORMS[form](inputs, labels)), expected)


def test_a_learner_of_views_adapts_to_batches_of_them():
    labels, inputs = vectors()
    measured = []
    for batches in ([(inputs, labels)], [(inputs["image"], labels)]):
        model = heads([losses.ContrastiveLoss(), objectives.DensityAdaptivity(3)])
        model.adapt(batches)
        measured.append(model.objectives[1].measured_density)
    assert_close(*measured)
    with pytest.raises(UserError, match="the view 'image'"):
        model.predict({"text": inputs["text"]})


def test_towers_that_share_weights_are_refused():
    tower = Head(6, 4)
    with pytest.raises(UserError, match="'image' and 'text' share weights"):
        MetricLearner({"image": tower, "text": tower}, objectives.SigmoidAcrossViews())
    head = keras.layers.Dense(4)
    towers = {view: Head(6, head=head, name=view) for view in ("image", "text")}
    sharing = MetricLearner(towers, objectives.SigmoidAcrossViews())
    # The weights of the head are created here.
    with pytest.raises(UserError, match="'image' and 'text' share weights"):
        sharing.build(sharing.view_shape)


def test_the_scale_of_the_softmax_stays_at_most_100():
    labels, inputs = batch()
    towers = {"image": tiny_embedder(), "text": text_embedder()}
    model = MetricLearner(towers, objectives.SoftmaxAcrossViews(scale=99.9))
    model.compile(keras.optimizers.SGD(1e4), run_eagerly=True)
    model.fit(inputs, labels, epochs=3, batch_size=len(labels), verbose=0)
    assert 0 <= float(model.objectives[0].log_scale) <= np.float32(np.log(100))


def test_stored_vectors_and_mixed_precision():
    labels, x = np.arange(8) % 3, np.random.default_rng(0).normal(size=(2, 8, 6)).astype("float32")
    with dtype_policy("mixed_float16"):
        model = MetricLearner(
            {"image": Head(6, 4), "text": Head(6, 4, name="texts")}, objectives.SigmoidAcrossViews()
        )
    model.compile("adam", run_eagerly=True)
    model.fit({"image": x[0], "text": x[1]}, labels, batch_size=8, verbose=0)
    assert all(np.isfinite(value).all() for value in values(model.weights))


@pytest.mark.one_quick_case
@pytest.mark.parametrize("pooling", ["avg", "max", "first", "last"])
def test_padding_changes_no_embedding_and_files_keep_the_tokens(pooling, tmp_path):
    encoder = keras.Sequential(
        [keras.Input((None,), dtype="int32"), keras.layers.Embedding(256, 6)]
    )
    short, long = (
        TextEmbedder(encoder, ByteTokenizer(size), embedding_dim=0, pooling=pooling)
        for size in (20, 40)
    )
    expected = short.embed_texts(WORDS)
    assert_close(long.embed_texts(WORDS), expected)
    assert_close(short.embed_texts([word.upper() for word in WORDS]), expected)
    short.save(tmp_path / "text.keras")
    np.testing.assert_array_equal(
        keras.saving.load_model(tmp_path / "text.keras").embed_texts(WORDS), expected
    )
    vectors = keras.ops.convert_to_numpy(encoder.layers[0].embeddings)[list(b"red")]
    pooled = {
        "avg": vectors.mean(0),
        "max": vectors.max(0),
        "first": vectors[0],
        "last": vectors[-1],
    }[pooling]
    assert_close(expected[0], pooled / np.linalg.norm(pooled))


def test_a_layer_of_keras_tokenizes():
    tokenizer = keras.layers.TextVectorization(output_sequence_length=5, vocabulary=["red", "sea"])
    model = TextEmbedder(
        keras.Sequential([keras.Input((5,)), keras.layers.Embedding(4, 3)]), tokenizer
    )
    assert model.tokenize(["red sea", "sea unknown"]).tolist() == [[2, 3, 0, 0, 0], [3, 1, 0, 0, 0]]


def test_what_does_not_fit_is_refused_or_truncated_as_asked():
    model = text_embedder()
    for texts, says in (
        (["red", " "], "text 1"),
        (["\udce9t\udce9"], "texts, text 0: must be text without control"),
        (["red", "a" * LENGTH], "text 1, 'aaa"),
    ):
        with pytest.raises(UserError, match=says):
            model.tokenize(texts)
    model.truncate = True
    assert model.tokenize(["a" * LENGTH]).shape == (1, LENGTH)
    labels, inputs = batch()
    with pytest.raises(UserError, match="must be a dict with 'image', 'text'"):
        learner()({"image": inputs["image"]})
    both = learner()
    both.compile("adam")
    with pytest.raises(UserError, match=r"images must have shape \(N, 24\)"):
        both.fit({**inputs, "text": inputs["text"][:, :5]}, labels)


def test_token_ids_beyond_the_vocabulary_are_refused_at_every_entrance():
    model, (labels, inputs) = learner(losses.ContrastiveLoss()), batch()
    tower = model.towers["text"]
    model.compile("sgd")
    assert tower.vocabulary_size == 256
    # In the last row, which no look at the first ones would meet.
    tokens = np.tile(inputs["text"], (20, 1))
    tokens[-1, 0] = -1
    beyond = np.where(tokens < 0, 256, tokens)
    x = {"image": np.tile(inputs["image"], (20, 1, 1, 1)), "text": tokens}
    y = np.tile(labels, 20)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(len(y))
    entrances = [
        lambda: tower.predict(tokens, verbose=0),
        lambda: tower.predict(beyond, verbose=0),
        lambda: tower.predict_on_batch(tokens),
        lambda: tower(tokens),
        lambda: model.fit(x, y, verbose=0),
        lambda: model.fit({**x, "text": beyond}, y, verbose=0),
        lambda: model.evaluate(x, y, verbose=0),
        lambda: model.train_on_batch(x, y),
        lambda: model.fit(batches, verbose=0),
    ]
    for entrance in entrances:
        with pytest.raises(
            (UserError, tf.errors.InvalidArgumentError), match="must be 0 to 255, the vocabulary"
        ):
            entrance()


def test_the_vocabulary_is_that_of_the_tokens_not_of_positions_and_segments():
    tokens = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(30, 2)(tokens)
    x = x + keras.layers.Embedding(4, 2)(keras.ops.zeros_like(tokens))
    encoder = keras.Model(tokens, x)
    assert TextEmbedder(encoder, embedding_dim=2).vocabulary_size == 30


def test_views_without_labels_are_refused_for_want_of_labels():
    model, (_, inputs) = learner(losses.ContrastiveLoss()), batch()
    model.compile("sgd")
    for entrance in (model.fit, model.evaluate, model.train_on_batch, model.test_on_batch):
        with pytest.raises(UserError, match="learns from integer labels, one for each item"):
            entrance(inputs)
