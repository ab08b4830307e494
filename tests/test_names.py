"""What comes from outside is alike wherever it enters, and each change is counted."""

import re

import numpy as np
import pytest

from tfdml import names
from tfdml.errors import UserError
from tfdml.names import CLASS, ID, PATH, ROLE, TEXT, class_names_of, clean

DECOMPOSED = "cafe\u0301"
WORDS = ("NA", "N/A", "#N/A", "NULL", "null", "none", "NaN", "<NA>")


@pytest.fixture
def notes(monkeypatch):
    texts = []
    monkeypatch.setattr(names, "warn", texts.append)
    return texts


@pytest.mark.parametrize(
    ("kind", "values", "plain"),
    [
        (CLASS, [b"bus ", "\ufeffbus", 7, np.int64(8)], ["bus", "bus", "7", "8"]),
        (CLASS, [DECOMPOSED, "caf\u00e9"], ["caf\u00e9"] * 2),
        (CLASS, np.array(["caf\u00e9".encode()]), ["caf\u00e9"]),
        (TEXT, [" two\nlines\u2028 "], ["two\nlines"]),
        (TEXT, ["a\u2028b\x85c\x0bd"], ["a\u2028b\x85c\x0bd"]),
        (ROLE, ["query", None, "NA", "<na>", " "], ["query", "", "", "", ""]),
        (PATH, [DECOMPOSED + " ", "NA"], [DECOMPOSED + " ", "NA"]),
        (ID, [b" 1", 1], [" 1", "1"]),
        (CLASS, [], []),
    ],
)
def test_a_name_is_made_plain_by_its_kind(kind, values, plain, notes):
    assert clean(values, kind, "list") == plain


@pytest.mark.parametrize(
    ("kind", "values", "note"),
    [
        (CLASS, ["bus", "bus "], "1 of the classes are texts with white space.*'bus '"),
        (CLASS, ["bus", b"bus"], "1 of the classes are written in several ways.*'bus'"),
        (CLASS, [DECOMPOSED, "caf\u00e9"], "1 of the classes are written in several ways"),
        *((CLASS, [word], "1 of the classes are words") for word in ("NA", "N/A", "#N/A", "NULL")),
        *(
            (CLASS, [word], "1 of the classes are words")
            for word in ("null", "none", "NaN", "<NA>")
        ),
        (CLASS, ["1", "1.0", "01", "2"], "2 of the classes are numbers that others are, too"),
        (TEXT, ["nan"], "1 of the texts are words"),
        (ROLE, ["NA", "query"], "1 of the roles are words.*left out"),
    ],
)
def test_what_is_changed_or_kept_against_appearance_is_counted(kind, values, note, notes):
    clean(values, kind, "list.csv, column label")
    assert any(re.search(note, text) for text in notes), notes
    assert all(text.startswith("list.csv, column label: ") for text in notes)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (CLASS, ["bus", "van", 7, "cars of 1.5", "1e3", "1000"]),
        (PATH, ["NA", " a", DECOMPOSED, "caf\u00e9"]),
        (ID, ["1", "1.0"]),
        (ROLE, ["", None]),
    ],
)
def test_nothing_is_noted_of_what_stays(kind, values, notes):
    clean(values, kind, "list")
    assert notes == []


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (CLASS, ["bus", 0.5], "list, line 4: must be a text or an integer, it is 0.5"),
        (ID, ["a", True], "list, line 4: must be a text or an integer, it is True"),
        (CLASS, ["bus", ["van"]], r"list, line 4: must be a text or an integer, it is \['van'\]"),
        (CLASS, ["bus", " "], "list, line 4: is empty"),
        (PATH, ["bus", None], "list, line 4: is empty"),
        (TEXT, ["bus", b"\xff"], r"list, line 4: is no UTF-8: b'\\xff'"),
        (CLASS, ["bus", "a\nb"], "list, line 4: must be text without control characters"),
        (TEXT, ["bus", "a\x00"], "list, line 4: must be text without control characters"),
        (PATH, ["bus", "\udcff"], "list, line 4: must be text without control characters"),
    ],
)
def test_what_is_no_name_is_refused_with_its_place(kind, values, message):
    with pytest.raises(UserError, match=message):
        clean(values, kind, "list", lambda row: f"line {row + 3}")


@pytest.mark.parametrize("values", [[b"NA", "bus"], ["NA ", "bus"], ["1.0", "1", "01"]])
def test_a_name_is_noted_once_however_many_entrances_it_passes(values, notes):
    plain = clean(values, CLASS, "list.csv, column label")
    notes.clear()
    class_names = class_names_of(dict(enumerate(sorted(plain))), "list: class_names")
    rows = np.array(list(class_names.values()), object)[:2]
    assert clean(rows, CLASS, "class_names") == sorted(plain)[:2]
    assert notes == []
    clean(list(map(str, plain)), CLASS, "another list")
    assert len(notes) == 1
