"""The words of errors."""

import pytest
import tensorflow as tf

from tfdml.errors import REASON, UserError, short_message, user_errors

LONG = "one\n\n  two   three\n" + "x" * 1000


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (ValueError("one\n  two"), {}, "one two"),
        (ValueError("one\n  two \n"), {"keep": "last"}, "two"),
        (ValueError("one"), {"named": True}, "ValueError: one"),
        (ValueError(" \n"), {"keep": "first"}, "ValueError"),
        (LONG, {"longest": 15}, "one two three x"),
        (LONG, {}, "one two three " + 286 * "x"),
        (tf.errors.DataLossError(None, None, "At\nbad PNG\n [[{{node a}}]]\nmore"), {"keep": "last"}, "bad PNG"),
        ("assertion failed: [no bytes] [1]\n [[{{node a}}]]", {"keep": "last"}, "no bytes] [1"),
    ],
)
def test_an_exception_in_short(error, arguments, message):
    assert short_message(error, **arguments) == message


def test_an_exception_becomes_a_message():
    message = f"a{{}}.npy: {REASON}; copy it again"
    with pytest.raises(UserError) as raised, user_errors((OSError, KeyError), message, keep="first"):
        raise OSError("first line\nsecond line")
    assert str(raised.value) == "a{}.npy: first line; copy it again"
    assert isinstance(raised.value.__cause__, OSError)
