"""The tower of texts: an embedder of token ids, and tokens that need no vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfdml import workarounds
from tfdml.arguments import boolean, integer, one_of
from tfdml.errors import UserError
from tfdml.models.embedder import Embedder, Head, mode_of
from tfdml.names import TEXT, clean
from tfdml.pairwise import refuse_outside
from tfdml.saving import SavedByArguments, restore

_LOGGER = logging.getLogger(__name__)
#: How many texts are tokenized or embedded at a time.
_BATCH = 1000


class ByteTokenizer(SavedByArguments, keras.layers.Layer):
    """Texts to their UTF-8 bytes, (B, length) int32; 0 fills up the end. It works for every script.

    Called with strings, in a graph of TensorFlow too. What is longer is cut:
    `TextEmbedder.tokenize` refuses it.

    Args:
        length: How many bytes, at least one more than the longest text has.
        lowercase: Whether capitals count as small letters.

    Example:
        >>> np.array(ByteTokenizer(length=4)(["Ab", "c"])).tolist()
        [[97, 98, 0, 0], [99, 0, 0, 0]]
    """

    def __init__(self, length=64, lowercase=True, **kwargs):
        super().__init__(**kwargs)
        self.length = integer("length", length, at_least=2)
        self.lowercase = boolean("lowercase", lowercase)

    def __call__(self, texts):
        """(B,) strings -> (B, length) int32, on TensorFlow whatever the backend of Keras."""
        import tensorflow as tf

        texts = tf.convert_to_tensor(texts)
        texts = tf.strings.lower(texts, encoding="utf-8") if self.lowercase else texts
        return tf.cast(tf.io.decode_raw(texts, tf.uint8, fixed_length=self.length), tf.int32)


class TokenPooling(SavedByArguments, keras.layers.Layer):
    """The vectors of a text's tokens to one: their `"avg"` or `"max"`, the `"first"`, or the
    `"last"`; no padding.

    Args:
        mode: One of these.
        pad_id: The id of tokens that do not count.
    """

    MODES = ("avg", "max", "first", "last")

    def __init__(self, mode="avg", pad_id=0, **kwargs):
        super().__init__(**kwargs)
        self.mode, self.pad_id = one_of("pooling", mode, self.MODES), int(pad_id)

    def call(self, vectors, tokens):
        """(B, T, c) and (B, T) ids -> (B, c)."""
        if self.mode == "first":
            return vectors[:, 0]
        counts = tokens != self.pad_id
        if self.mode == "max":
            return ops.max(ops.where(counts[:, :, None], vectors, -1e4), axis=1)
        weights = ops.cast(counts, "float32")
        if self.mode == "last":
            end = ops.sum(weights, axis=1, keepdims=True)
            weights = ops.cast(ops.equal(ops.cumsum(weights, axis=1) * weights, end), "float32")
        total = ops.maximum(ops.sum(weights, axis=1, keepdims=True), 1.0)
        return ops.sum(vectors * ops.cast((weights / total)[:, :, None], vectors.dtype), axis=1)

    def compute_output_shape(self, vectors_shape, tokens_shape):
        """(B, c)."""
        return (vectors_shape[0], vectors_shape[-1])


class TextEmbedder(Embedder):
    """Texts, as token ids, to L2-normalized embeddings: the second tower of a `MetricLearner` of
    images and texts.

    tokens (B, T) int32 -> encoder -> pooling -> pooled (B, D) -> dense -> projection (B, d) -> L2
    -> embedding (B, d)

    It trains, is measured and saved as an `Embedder` is. `tokenize` makes the ids of texts. Ids
    beyond the encoder's vocabulary are refused; in a program that JAX or XLA compiles, of batches
    that were not looked at before, their embedding is NaN on JAX.

    Args:
        encoder: A `keras.Model` from token ids (B, T) to vectors (B, D), or to the vectors of
            tokens (B, T, D); or a text backbone of KerasHub. `byte_encoder` makes a small one.
        tokenizer: From strings to ids (B, T), or to a dict with `token_ids` and `padding_mask`: a
            `ByteTokenizer`, a `keras.layers.TextVectorization` with its `output_sequence_length`,
            or a preprocessor of KerasHub.
        length: T; by default that of the tokenizer's ids.
        embedding_dim: As of `Embedder`.
        pooling: Over tokens: `"avg"`, `"max"`, the `"first"` or the `"last"` one.
        pad_id: The id that fills up texts.
        truncate: Whether texts that fill all T tokens are cut, which a warning counts; else they
            are refused.
        dropout: As of `Embedder`.
        projection_bias: Likewise.
        head: Likewise.

    Raises:
        ValueError: An argument does not fit.

    Example:
        >>> tokenizer = ByteTokenizer(length=32)
        >>> model = TextEmbedder(byte_encoder(32, width=8), tokenizer, embedding_dim=16)
        >>> model.embed_texts(["a red car", "a blue car"]).shape
        (2, 16)
    """

    fixed = tuple(name for name in Head.fixed if name != "pooling")

    def __init__(
        self,
        encoder,
        tokenizer=None,
        length=None,
        embedding_dim=None,
        pooling="avg",
        pad_id=0,
        truncate=False,
        dropout=0.0,
        projection_bias=True,
        head=None,
        name="text_embedder",
        **kwargs,
    ):
        encoder, tokenizer = restore(encoder), restore(tokenizer)
        if length is None:
            length = (
                encoder.input_shape[-1]
                if tokenizer is None
                else np.shape(_ids(tokenizer(["a"])))[-1]
            )
        tokens = keras.Input((integer("length", length, at_least=1),), dtype="int32", name="tokens")
        vectors = _run(encoder, tokens, pad_id)
        if len(vectors.shape) == 3:
            vectors = TokenPooling(pooling, pad_id, name="pool")(vectors, tokens)
        backbone = keras.Model(tokens, vectors, name="text_backbone")
        options = {
            "dropout": dropout,
            "projection_bias": projection_bias,
            "head": head,
            "batch_norm": "train",
        }
        super().__init__(backbone, embedding_dim, 1, scaling="none", name=name, **options, **kwargs)
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.length = int(length)
        #: How many token ids the encoder knows; None where it does not say.
        self.vocabulary_size = vocabulary_size(encoder)
        self.pooling = pooling
        self.pad_id = int(pad_id)
        self.truncate = boolean("truncate", truncate)

    @property
    def view_shape(self) -> tuple[int, ...]:
        """(T,)."""
        return tuple(self.backbone.input_shape[1:])

    def check_values(self, images) -> None:
        """Refuse token ids beyond the vocabulary, as `tfdml.pairwise.refuse_outside`.

        Args:
            images: (B, T) ids.

        Raises:
            UserError: One is negative, or not below `vocabulary_size`.
        """
        if self.vocabulary_size is not None:
            message = (
                f"{self.name}: token ids must be 0 to {self.vocabulary_size - 1}, the vocabulary "
                "of its encoder: make them by its tokenizer"
            )
            refuse_outside(images, self.vocabulary_size, message, "id")

    def represent(self, images, training=None, detached=False):
        """See `Embedder.represent`, of token ids (B, T)."""
        tokens = ops.cast(images, "int32")
        # An exported graph makes the ids itself.
        if training or not _in_graph():
            self.check_values(tokens)
        pooled = self.backbone(tokens, training=mode_of(self.backbone, training))
        if keras.backend.backend() == "jax" and self.vocabulary_size is not None:
            # A program of JAX refuses nothing, and counts negative ids from the end.
            unknown = ops.logical_or(tokens < 0, tokens >= self.vocabulary_size)
            unknown = ops.any(unknown, axis=1, keepdims=True)
            pooled = ops.where(unknown, ops.cast(float("nan"), pooled.dtype), pooled)
        return {"pooled": pooled, **self._projected(pooled, training, detached)}

    def encode(self, texts):
        """Return the ids of strings, (B,) -> (B, T), and which strings leave no padding, (B,)
        booleans or 0 and 1.

        In a graph of TensorFlow too; nothing is checked.

        Raises:
            UserError: There is no tokenizer.
        """
        if self.tokenizer is None:
            raise UserError(
                f"{self.name} has no tokenizer: give TextEmbedder one, such as ByteTokenizer(), or "
                "token ids"
            )
        output = self.tokenizer(texts)
        ids = _ids(output)
        return ids, output["padding_mask"][:, -1] if isinstance(output, dict) else ids[
            :, -1
        ] != self.pad_id

    def tokenize(self, texts: Sequence[str]) -> np.ndarray:
        """Return the ids of texts, (N, T) int32.

        Raises:
            UserError: There is no tokenizer, a text is empty or no UTF-8, or one fills all T tokens
                and may be cut.

        Example:
            >>> TextEmbedder(byte_encoder(4), ByteTokenizer(4)).tokenize(["a", "abcd"])
            Traceback (most recent call last):
            tfdml.errors.UserError: 1 of 2 texts do not fit into 4 tokens, the first is text 1, ...
        """
        texts = clean(texts, TEXT, "texts", lambda row: f"text {row}")
        parts, full = [np.zeros((0, self.length), np.int32)], []
        for first in range(0, len(texts), _BATCH):
            ids, is_full = self.encode(texts[first : first + _BATCH])
            full += (first + np.flatnonzero(is_full)).tolist()
            parts.append(np.asarray(ids, np.int32))
        if full:
            overlong = f"{len(full):,} of {len(texts):,} texts do not fit into {self.length} tokens"
            where = f"the first is text {full[0]}, {texts[full[0]][:80]!r}"
            if not self.truncate:
                raise UserError(
                    f"{overlong}, {where}: make the tokens longer, shorten the texts, or set "
                    "truncate=True"
                )
            _LOGGER.warning("%s, %s: the rest is cut", overlong, where)
        return np.concatenate(parts)

    def embed_texts(self, texts: Sequence[str], batch_size: int = 100) -> np.ndarray:
        """Return the embeddings of texts, (N, d) float32.

        Raises:
            UserError: As `tokenize`.
        """
        return self.predict(self.tokenize(texts), batch_size=batch_size, verbose=0)


def vocabulary_size(encoder: keras.Model) -> int | None:
    """Return how many token ids an encoder has a vector of; None where no layer shows it.

    Example:
        >>> vocabulary_size(byte_encoder(8))
        256
    """
    layers = workarounds.layers_of(encoder)
    # Layers of KerasHub; `keras.layers.TextVectorization` has a method of this name.
    stated = [getattr(layer, "vocabulary_size", None) for layer in layers]
    sizes = [size for size in stated if isinstance(size, int)]
    if not sizes:
        # Others have embeddings of positions and segments as well.
        tokens = {id(tensor) for tensor in getattr(encoder, "inputs", None) or ()}
        for layer in layers:
            if isinstance(layer, keras.layers.Embedding):
                read = {id(tensor) for tensor in workarounds.inputs_of(layer)}
                sizes += [layer.input_dim] if read & tokens else []
    return min(sizes, default=None)


def _in_graph() -> bool:
    """Whether TensorFlow traces a graph."""
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return not tf.executing_eagerly()


def _ids(output: Any) -> Any:
    return output["token_ids"] if isinstance(output, dict) else output


def _run(encoder: keras.Model, tokens: Any, pad_id: int) -> Any:
    """Return what an encoder gives for token ids; those of KerasHub take and return dicts."""
    inputs = getattr(encoder, "input", None)
    if isinstance(inputs, dict) and inputs:
        output = encoder({name: _encoder_input(name, tokens, pad_id) for name in inputs})
    else:
        output = encoder(tokens)
    return output["sequence_output"] if isinstance(output, dict) else output


def _encoder_input(name: str, tokens: Any, pad_id: int) -> Any:
    if name == "padding_mask":
        return ops.cast(tokens != pad_id, "int32")
    return ops.zeros_like(tokens) if name == "segment_ids" else tokens


def byte_encoder(length: int, width: int = 64) -> keras.Model:
    """Return a small untrained encoder of bytes, two convolutions over windows of five: (B, T) ->
    (B, T, 4 width).

    Args:
        length: T, as of the `ByteTokenizer`.
        width: How many features a byte has.

    Example:
        >>> byte_encoder(32, width=8).output_shape
        (None, 32, 32)
    """
    tokens = keras.Input((length,), dtype="int32", name="tokens")
    x = keras.layers.Embedding(256, width, name="bytes")(tokens)
    for number, factor in enumerate((2, 4)):
        x = keras.layers.Conv1D(
            factor * width, 5, padding="same", activation="relu", name=f"conv{number}"
        )(x)
    return keras.Model(tokens, x, name="byte_encoder")
