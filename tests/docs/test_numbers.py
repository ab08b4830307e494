"""Pages state the numbers of `docs/numbers`: those of results are written whole, others state what
`benchmarks/pages/stated.json` lists."""

import json

import pytest

from tools import numbers

PAGES = json.loads((numbers.TEMPLATES / "stated.json").read_text())
METHODS = ("JRD", "HORDE", "ECAML", "DML-DA", "RankMI")
DATA_SETS = ("cars196", "omniglot", "glyphs")
# Which numbers a page states.
PAGES = {
    "README.md": [
        *(f"study/gains/{method}, {dataset}/gain" for method in METHODS for dataset in DATA_SETS),
        "training/table/a step, ms, in turns/tfdml",
        "training/table/a step, ms, in turns/PyTorch",
        "losses/shares/4,096/most",
        "losses/shares/128/least",
        "losses/shares/128/most",
        "evaluation/exact/`recall` at 1, 2, 4, 8/seconds",
        "coverage_pairs/Cars-196/pairs, far=0.01: far/in its interval",
    ],
    "docs/audit.md": [
        f"audit/{name}"
        for name in ("labels", "identical", "conflicting", "count", "cpu_seconds", "mb")
    ],
    "docs/distillation.md": ["distillation/table"],
    "docs/evaluation.md": ["evaluation/exact"],
    "docs/export.md": ["phones/table"],
    "docs/generalization.md": ["generalization/table"],
    "docs/install.md": [
        "first_result/steps",
        "installed/required",
        "installed/with four extras",
        "installed/saved by tensorflow-cpu",
        "installed/parts",
    ],
    "docs/large_batches.md": [
        "classes/steps",
        "sampled/sampled",
    ],
    "docs/labels.md": ["label_noise/table"],
    "docs/reranking.md": ["reranking_cars196/table"],
    "docs/training.md": [
        "final_length/table/glyphs, Recall@1/gain",
        "final_length/table/cars196, Recall@1/gain",
    ],
    "docs/two_hosts.md": [
        "two_processes/table/one process/Recall@1",
        "two_processes/table/two processes/Recall@1",
    ],
    "docs/shop.md": ["phone_strangers/table"],
    "docs/upgrading.md": ["upgrade/table"],
    "docs/verification.md": [
        "spread/spread",
        "identities/table",
        "weeks/table",
        "coverage_pairs/Omniglot/pairs, far=0.01: far/in its interval",
        "coverage_searches/Cars-196/searches of a gallery, fpir=0.05: fpir/in its interval",
        "coverage_sizes/Omniglot/searches of galleries of other sizes, fpir=0.05: "
        "fpir in 0.5 times the size/in its interval",
    ],
}


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
