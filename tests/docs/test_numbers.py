"""Pages state the numbers of `docs/numbers`: those of results are written whole, others state what
`benchmarks/pages/stated.json` lists."""

import json

import pytest

from tools import numbers

PAGES = json.loads((numbers.TEMPLATES / "stated.json").read_text())


@pytest.mark.parametrize(
    "template", sorted(numbers.TEMPLATES.glob("*.md")), ids=lambda path: path.stem
)
def test_a_page_of_results_is_written_from_its_numbers(template):
    page = numbers.ROOT / "docs" / template.name
    assert page.read_text() == numbers.page(template), "run python -m tools.numbers"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_states_measured_numbers(page):
    text = (numbers.ROOT / page).read_text()
    for key in PAGES[page]:
        assert numbers.render(numbers.lookup(key)) in text, key
