"""The syntax of --objectives and --backbone."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdml.errors import UserError
from tfdml.expressions import Call, parse_call, parse_sum


def test_a_sum_keeps_order_weights_and_arguments():
    terms = parse_sum(
        "am_softmax(scale=20, margin=0.1) + 0.4 * jrs(levels=[pooled, embedding]) - other*2",
        "--objectives",
    )
    assert terms == [
        (1.0, Call("am_softmax", {"scale": 20, "margin": 0.1})),
        (0.4, Call("jrs", {"levels": ["pooled", "embedding"]})),
        (-2.0, Call("other", {})),
    ]


def test_values_are_numbers_words_lists_and_calls():
    call = parse_call(
        "x(a=-1.5, b=true, c=none, d='class of', e=class, f=[1, [2]], g=k(m=[0.5]))", "--backbone"
    )
    assert call.arguments == {
        "a": -1.5,
        "b": True,
        "c": None,
        "d": "class of",
        "e": "class",
        "f": [1, [2]],
        "g": Call("k", {"m": [0.5]}),
    }


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "a +",
            "a(1)",
            "a(**b)",
            "1 + 2",
            "a * b",
            "true * a",
            "a(b=c+d)",
            "a[0]",
            "lambda: 0",
            "(",
        ),
        "a; b",
        pytest.param("+".join(["a"] * 5000), id="long"),
    ],
)
def test_what_cannot_be_read_names_the_flag(text):
    with pytest.raises(UserError, match="--objectives"):
        parse_sum(text, "--objectives")


@pytest.mark.slow
@given(st.text(max_size=40))
def test_any_text_either_parses_or_is_a_user_error(text):
    with contextlib.suppress(UserError):
        assert parse_sum(text, "--objectives")
