"""A hook of MkDocs: pages of the site whose source lies outside docs/, or is no Markdown."""

from __future__ import annotations

import json
import pathlib
import re

from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Page of the site: file of the repository.
ELSEWHERE = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "index.md": "README.md",
    "serving.md": "export/README.md",
}


def on_files(files: Files, config) -> Files:
    """Add the pages."""
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for notebook in sorted((ROOT / "docs").rglob("*.ipynb")):
        page = notebook.relative_to(ROOT / "docs").with_suffix(".md").as_posix()
        files.append(
            File.generated(config, page, content=markdown_of(json.loads(notebook.read_text())))
        )
    return files


def on_page_markdown(markdown: str, **_) -> str:
    """Turn links to files that are pages here into links to these pages."""
    markdown = markdown.replace("](../docs/", "](").replace("](docs/", "](")
    for page, source in ELSEWHERE.items():
        markdown = markdown.replace(f"](../{source}", f"]({page}").replace(
            f"]({source}", f"]({page}"
        )
    return markdown


def on_page_content(html: str, **_) -> str:
    """Keep the name of a flag on one line, as browsers break after hyphens; break code in tables
    between its words."""
    html = re.sub(
        r"<td.*?</td>",
        lambda cell: re.sub(r"<code>.*?</code>", _breakable, cell[0]),
        html,
        flags=re.DOTALL,
    )
    return re.sub(r"(<code>|&quot;|[ '])(--[a-z_]+=?)", r'\1<span class="flag">\2</span>', html)


def _breakable(code: re.Match) -> str:
    """Name the places of code where a narrow column may break it."""
    return re.sub(r"(?<=[(_])(?=\w)|(?<=[a-z]\.)(?=[a-z])|(?<=[a-z])(?=[A-Z])", "<wbr>", code[0])


def markdown_of(notebook: dict) -> str:
    """A notebook as a page: its text, its code, and what the code printed and drew."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(
                    f"![]({'data:image/png;base64,' + ''.join(data['image/png']).strip()})"
                )
            elif text := "".join(output.get("text", data.get("text/plain", ""))):
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
