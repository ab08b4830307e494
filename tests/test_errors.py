"""The words of errors."""

import pytest
import tensorflow as tf

from tfdml.errors import short_message

LONG = "one\n\n  two   three\n" + "x" * 1000


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (ValueError("one\n  two"), {}, "one two"),
        (ValueError("\n one\n  two"), {"keep": "first"}, "one"),
        (ValueError("one\n  two \n"), {"keep": "last"}, "two"),
        (ValueError("one"), {"named": True}, "ValueError: one"),
        (ValueError(), {"named": True}, "ValueError"),
        (ValueError(" \n"), {"keep": "first"}, "ValueError"),
        (ValueError("\n"), {"keep": "last"}, "ValueError"),
        (LONG, {"longest": 15}, "one two three x"),
        (LONG, {}, "one two three " + 286 * "x"),
        ("", {}, ""),
        (tf.errors.DataLossError(None, None, "At\nbad PNG\n [[{{node a}}]]\nmore"), {"keep": "last"}, "bad PNG"),
        ("assertion failed: [no bytes] [1]\n [[{{node a}}]]", {"keep": "last"}, "no bytes] [1"),
        ("[[{{node a}}]] alone", {"keep": "last"}, "[[{{node a}}]] alone"),
    ],
)
def test_an_exception_in_short(error, arguments, message):
    assert short_message(error, **arguments) == message
