"""The syntax of --objectives and --backbone."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdml.errors import UserError
from tfdml.expressions import Arguments, Call, Terms


def test_a_sum_keeps_order_weights_and_arguments():
    terms = Terms.parse(
        "am_softmax(scale=20, margin=0.1) + 0.4 * jrs(levels=[pooled, embedding]) - other*2",
        "objectives",
    )
    assert list(terms) == [
        (1.0, Call("am_softmax", {"scale": 20, "margin": 0.1})),
        (0.4, Call("jrs", {"levels": ["pooled", "embedding"]})),
        (-2.0, Call("other", {})),
    ]


def test_values_are_numbers_words_lists_and_calls():
    call = Call.parse(
        "x(a=-1.5, b=true, c=none, d='class of', e=class, f=[1, [2]], g=k(m=[0.5]))", "backbone"
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
    with pytest.raises(UserError, match="objectives="):
        Terms.parse(text, "objectives")


NAMES = st.sampled_from(["jrs", "keras.layers.Dense", "a_1"])


def arguments_of(values):
    """Arguments with such values."""
    return st.dictionaries(st.sampled_from("abc"), values, max_size=2).map(Arguments)


WORDS = st.sampled_from(["pooled", "class", "true", "None", "it's", 'a "b"', "a  b", "", "\n", "ﬁ"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | WORDS
    | st.text(max_size=5),
    lambda values: st.lists(values, max_size=2) | st.builds(Call, NAMES, arguments_of(values)),
    max_leaves=4,
)
TERMS = st.tuples(st.floats(allow_nan=False), st.builds(Call, NAMES, arguments_of(VALUES)))


@pytest.mark.slow
@given(st.text(max_size=40))
def test_any_text_either_parses_or_is_a_user_error(text):
    with contextlib.suppress(UserError):
        assert Terms.parse(text, "objectives")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(TERMS, max_size=3))
def test_a_text_reads_back(terms):
    terms = Terms(terms)
    assert not terms or Terms.parse(str(terms), "objectives") == terms
    for _, call in terms:
        assert Call.parse(str(call), "backbone") == call
        assert Arguments.parse(str(call.arguments), "dataset_options") == call.arguments
