"""The site: pages, links and the notebook."""

import json
import re

import pytest

from tests.docs.examples import PAGES, ROOT
from tests.processes import run_python

_LINK = re.compile(r"\]\((?!https?:|mailto:|data:)([^)#\s]*)(#[^)\s]+)?\)")
_HEADING = re.compile(r"^#+ (.+?)\s*$", re.MULTILINE)
DOCS = ROOT / "docs"


def _anchors(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return {
        re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())
        for heading in _HEADING.findall(text)
    }


NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
LINKING = [*PAGES, ROOT / "CHANGELOG.md", *NOTEBOOKS]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for path, anchor in _LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        target = (page.parent / path).resolve() if path else page
        # A page of the site that is made of a notebook.
        exists = target.exists() or target.with_suffix(".ipynb").exists()
        assert exists, f"{page.name}: {path}"
        if anchor and target.suffix == ".md" and target.exists():
            assert anchor[1:] in _anchors(target), f"{page.name}: {path}{anchor}"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    for page in DOCS.rglob("*.md"):
        assert page.relative_to(DOCS).as_posix() in navigation


def test_every_public_package_has_a_page_of_its_reference():
    packages = {
        *re.findall(
            r"^    from tfdml import (\w+)",
            (ROOT / "tfdml" / "__init__.py").read_text(),
            re.MULTILINE,
        )
    }
    assert packages == {page.stem for page in (DOCS / "api").glob("*.md")} - {"index"}


def run_notebook(path):
    """Run the cells of a notebook on the backend of this process."""
    import matplotlib

    matplotlib.use("agg")
    names = {}
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] == "code":
            # Two thirds of the longest training show the gain.
            code = "".join(cell["source"]).replace("epochs=15", "epochs=10")
            exec(compile(code, f"{path.name}, cell {number}", "exec"), names)
    assert names["recall"] > names["recall_before"] + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_notebook(path)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_the_notebook_on_plain_keras_runs_on_other_backends(backend, tmp_path):
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    code = (
        "from tests.docs.test_site import DOCS, run_notebook; run_notebook(DOCS / 'notebooks' / "
        "'plain_keras.ipynb')"
    )
    # Threads of PyTorch that wait for each other take many times as long on a machine that does
    # other work.
    environment = {
        "KERAS_BACKEND": backend,
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    run_python("-c", code, environment=environment, cwd=tmp_path)
