"""Settings: their rules, texts, choices and what has no effect."""

import dataclasses
import importlib
import pathlib
import pickle
import subprocess
import sys

import pytest
from absl import flags
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdml.errors import UserError
from tfdml.expressions import Terms
from tfdml.options import (
    Choice,
    Color,
    Settings,
    changed,
    choice,
    condition,
    define_flags,
    fields_of,
    flag_file,
    flag_text,
    from_flag_texts,
    holds,
    in_words,
    option,
    unmet,
)
from tfdml.training import choices
from tfdml.training.settings import Experiment

ROOT = pathlib.Path(__file__).parents[1]
FAMILIES = [
    choices.Sampling,
    choices.HoldoutSampling,
    choices.Augmentation,
    choices.Head,
    choices.TextBackbone,
]


class Drink(Choice):
    """A family."""

    hot: bool = False


@choice("tea", "With leaves.")
@dataclasses.dataclass(frozen=True)
class Tea(Drink):
    """One of it."""

    hot = True
    minutes: int = option(3, at_least=1, help="How long.")
    herbs: tuple[str, ...] | None = option(None, help="Which.")


@choice("water", "Without.")
@dataclasses.dataclass(frozen=True)
class Water(Drink):
    """Another."""


@dataclasses.dataclass(frozen=True)
class Table(Settings):
    """Settings of every type."""

    title = "A table"

    name: str = option(help="Its name.")
    seats: int = option(4, at_least=1, help="How many.")
    height: float = option(0.7, above=0, below=2, help="In meters.")
    tilt: float = option(-1.0, at_least=0, also=-1, help="In degrees; -1: none.")
    wood: str = option("oak", words=("oak", "pine"), help="Of which.")
    folds: bool = option(False, help="Whether it does.")
    hinges: int = option(2, requires="folds", help="How many.")
    ids: tuple[int, ...] = option((1, 2), at_least=1, help="Numbers.")
    drink: Drink = option(Tea(), help="What is on it.")
    cups: int = option(1, requires="drink.hot and no glass", help="How many.")
    glass: bool = option(False, help="Whether there is one.")
    color: Color = option(Color((0, 0, 0)), requires="wood=pine or is_wide", help="Its color.")
    terms: Terms | None = option(None, help="A sum.")

    @condition("more than 6 --seats")
    def is_wide(self):
        """Whether it is."""
        return self.seats > 6


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"seats": 0}, "seats=0: must be at least 1"),
        ({"seats": 2.5}, "seats=2.5: must be an integer"),
        ({"seats": True}, "seats=true: must be an integer"),
        ({"seats": 2**31}, "seats=2147483648: must be an integer of at most"),
        ({"height": 0}, "height=0: must be above 0"),
        ({"height": 2}, "height=2: must be below 2"),
        ({"height": float("nan")}, "height=nan: must be a finite number"),
        ({"height": 10**400}, "height=1.*: must be a finite number"),
        ({"tilt": -2}, "tilt=-2: must be at least 0"),
        ({"wood": "ok"}, "wood=ok: must be one of oak, pine"),
        ({"folds": 1}, "folds=1: must be true or false"),
        ({"ids": "1,x"}, "ids=1,x: must be integers with commas"),
        ({"ids": "1,0"}, "ids=1,0: must be at least 1"),
        ({"name": "a\udcff"}, "must be UTF-8 text"),
        ({"name": "https://me:secret@host"}, "name=https://host: has a user or password"),
        ({"drink": "teas"}, "drink=teas: unknown choice 'teas'; did you mean 'tea'"),
        ({"drink": "tea(minute=2)"}, "unknown option 'minute' of tea; did you mean 'minutes'"),
        ({"drink": "tea(minutes=0)"}, r"drink=tea\(minutes=0\): minutes=0: must be at least 1"),
        ({"drink": "tea(2)"}, "must be written name=value"),
        ({"drink": 3}, "drink=3: must be text"),
        ({"color": "1,2"}, "color=1,2: write black"),
        ({"terms": "a +"}, "terms=a +: it cannot be read"),
    ],
)
def test_a_value_that_breaks_the_rules_is_refused_by_name(given, fault):
    with pytest.raises(UserError, match=fault.replace("+", r"\+")) as error:
        Table(**{"name": "a", **given})
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    with pytest.raises(UserError):
        Table.draft(given)


def test_texts_are_read_once_and_written_back():
    table = Table(
        "a", height=1, tilt=-1, ids="3, 4", drink="tea(herbs=[mint, sage])", color="white"
    )
    assert (table.height, table.ids, table.drink.herbs) == (1.0, (3, 4), ("mint", "sage"))
    assert isinstance(table.height, float)
    texts = dict(line[2:].split("=", 1) for line in flag_file(table).splitlines())
    assert texts["drink"] == "tea(herbs=[mint, sage])"
    assert (texts["color"], texts["terms"], texts["folds"]) == ("white", "", "false")
    assert Table(**from_flag_texts(Table, texts)) == table
    for wrong in ({"seats": "x"}, {"folds": "maybe"}, {"legs": "4"}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            from_flag_texts(Table, wrong)


def test_a_setting_without_an_effect_is_named_with_what_it_needs():
    draft = Table.draft({"hinges": 3, "drink": "water", "cups": 2, "color": "white"})
    found = {name: error.message for name, error in unmet(draft, ["hinges", "cups", "color"])}
    assert "it needs --folds;" in found["hinges"]
    assert "it needs --drink=tea and no --glass;" in found["cups"]
    assert "it needs --wood=pine or more than 6 --seats;" in found["color"]
    other = Table("a", folds=True, seats=7)
    assert not list(unmet(other, fields_of(Table)))


def test_settings_that_inherit_a_field_may_change_its_rules():
    @dataclasses.dataclass(frozen=True)
    class Desk(Table):
        seats: int = changed(Table, "seats", default=1, requires="no folds")

    assert Desk("a").seats == 1
    assert [name for name, _ in unmet(Desk("a", folds=True), ["seats"])] == ["seats"]
    with pytest.raises(UserError, match="at least 1"):
        Desk("a", seats=0)


def test_a_name_belongs_to_one_choice_and_a_reloaded_module_replaces_its_own():
    choice("water", "Again.")(Water)
    with pytest.raises(UserError, match=r"'water' is .*Water"):
        choice("water", "Another.")(dataclasses.dataclass(frozen=True)(type("Ice", (Drink,), {})))


def test_flags_have_the_defaults_and_the_help():
    values = flags.FlagValues()
    define_flags(Table, values)
    values(["x", "--drink=tea(minutes=5)", "--nofolds", "--ids=7"])
    assert (values.drink, values.folds, values.ids) == ("tea(minutes=5)", False, "7")
    assert (
        "tea(minutes=3, herbs=none): With leaves.\n    minutes: How long." in values["drink"].help
    )
    assert values["wood"].help == "Of which. One of oak, pine."


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_every_choice_reads_back_from_its_text(data):
    family = data.draw(st.sampled_from(FAMILIES))
    kind = family.choices[data.draw(st.sampled_from(sorted(family.choices)))]
    values = {"preset": st.sampled_from(["siglip-base", "/a/b c"]), "path": st.text(max_size=9)}
    values |= {"cut": st.sampled_from([None, ("a",), ("pool3", "inception_4e")])}
    given = {}
    for name, field in fields_of(kind).items():
        rules = field.metadata["rules"]
        if name in values:
            given[name] = data.draw(values[name])
        elif rules.words:
            given[name] = data.draw(st.sampled_from(rules.words))
        elif isinstance(field.default, bool):
            given[name] = data.draw(st.booleans())
        elif isinstance(field.default, int):
            given[name] = data.draw(st.integers(1, 2**31 - 1))
        elif field.default is None or isinstance(field.default, float):
            given[name] = data.draw(st.floats(0.001, 1))
    made = kind(**given)
    assert family.parse(str(made), "choice") == made


def every_settings():
    """All settings of the package."""
    for name in ("cli.train", "cli.evaluate", "cli.export", "cli.serve", "cli.audit", "cli.demo"):
        importlib.import_module(f"tfdml.{name}")
    kinds = [Settings]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [kind for kind in kinds if kind.__module__.startswith("tfdml.") and fields_of(kind)]


def test_what_settings_require_can_be_asked_and_said():
    assert len(every_settings()) > 20
    for kind in every_settings():
        whole = Experiment if issubclass(Experiment, kind) else kind
        for name, field in fields_of(kind).items():
            rules = field.metadata["rules"]
            assert rules.help.endswith("."), (kind, name)
            if rules.requires:
                assert holds(rules.requires, whole.draft({})) in (True, False)
                assert in_words(rules.requires, whole)
            if field.default is not dataclasses.MISSING:
                assert flag_text(field.default) is not None


def test_settings_import_nothing_heavy():
    heavy = "{'numpy', 'keras', 'tensorflow', 'pyarrow', 'fsspec', 'PIL'}"
    code = f"import sys, tfdml.training.settings; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr
