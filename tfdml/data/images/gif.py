"""Walks over the blocks of a GIF, in TensorFlow graph operations alone."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

FRAME, EXTENSION, GRAPHIC_CONTROL = 0x2C, 0x21, 0xF9
# Zeros that the bytes need behind them, so that every read of a cut-off file falls on zeros.
PADDING = 32


def walk_blocks(
    data: tf.Tensor,
    enters: Callable[[tf.Tensor], tf.Tensor],
    state: tuple[tf.Tensor, ...] = (),
    at_block: Callable[..., tuple[tf.Tensor, ...]] = lambda at, is_frame, *state: state,
) -> tuple[tf.Tensor, tuple[tf.Tensor, ...]]:
    """Walks from block to block, over the sub-blocks of each.

    Args:
        data: (n + `PADDING`,) int32, the bytes and zeros.
        enters: Whether to go on over a block, from where it begins.
        state: What is gathered on the way.
        at_block: From where a (sub-)block begins, whether it is a frame, and the state, to the next state.

    Returns:
        Where the walk ended: at a block that was not entered, or at n; and the state.

    Example:
        >>> head, comment = [*b"GIF89a", 1, 0, 1, 0, 0, 0, 0], [EXTENSION, 0xFE, 1, 7, 0]
        >>> data = tf.constant([*head, *comment, FRAME, *PADDING * [0]])
        >>> int(walk_blocks(data, lambda at: data[at] == EXTENSION)[0])
        18
    """
    end = tf.size(data) - PADDING

    def palette(flags: tf.Tensor) -> tf.Tensor:
        return tf.where(flags >= 128, 3 * tf.bitwise.left_shift(2, flags & 7), 0)

    def goes_on(at: tf.Tensor, in_block: tf.Tensor, *state: tf.Tensor) -> tf.Tensor:
        del state
        return (at < end) & (in_block | enters(at))

    def advance(at: tf.Tensor, in_block: tf.Tensor, *state: tf.Tensor) -> tuple[tf.Tensor, ...]:
        is_frame = ~in_block & (data[at] == FRAME)
        head = tf.where(is_frame, 11 + palette(data[at + 9]), 2)
        length = tf.where(in_block, data[at] + 1, head)
        return tf.minimum(at + length, end), ~in_block | (data[at] != 0), *at_block(at, is_frame, *state)

    start = tf.minimum(13 + palette(data[10]), end)
    at, _, *gathered = tf.while_loop(goes_on, advance, (start, tf.constant(False), *state))
    return at, tuple(gathered)
