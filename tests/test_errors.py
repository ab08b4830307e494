"""The words of errors."""

import pytest
import tensorflow as tf

from tfdml.errors import REASON, UserError, short_message, user_errors

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


def test_an_exception_becomes_a_message():
    message = f"a{{}}.npy: {REASON}; copy it again"
    with pytest.raises(UserError) as raised, user_errors((OSError, KeyError), message, keep="first"):
        raise OSError("first line\nsecond line")
    assert str(raised.value) == "a{}.npy: first line; copy it again"
    assert isinstance(raised.value.__cause__, OSError)


@pytest.mark.parametrize("error", [UserError("as it is"), KeyError("as it is"), KeyboardInterrupt("as it is")])
def test_other_exceptions_pass_unchanged(error):
    with pytest.raises(type(error), match="as it is") as raised, user_errors(ValueError, "not this"):
        raise error
    assert raised.value is error
