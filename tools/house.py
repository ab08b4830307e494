"""Rules of the layout that no linter has: `python -m tools.house`, a part of `make lint`.

- The package has at most `MOST_LINES` of code in `MOST_MODULES` modules; a commit that raises one
  gives its reason.
- A folder of the package has at most 12 modules.
- No module changes the meaning of others by a `ContextVar`.
"""

from __future__ import annotations

import ast
import collections
import pathlib
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
MOST_IN_A_FOLDER = 12
MOST_MODULES = 137
MOST_LINES = 20_163


def code_lines(text: str) -> int:
    """Count the lines of code, without blanks, comments and docstrings."""
    lines = text.splitlines()
    skipped = {
        i for i, line in enumerate(lines, 1) if not line.strip() or line.strip().startswith("#")
    }
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            skipped.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines) - len(skipped)


def faults() -> Iterator[str]:
    """Yield a line for each breach of a rule."""
    paths = sorted((ROOT / "tfdml").rglob("*.py"))
    texts = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}
    lines = sum(map(code_lines, texts.values()))
    if len(texts) > MOST_MODULES or lines > MOST_LINES:
        yield (
            f"{len(texts)} modules and {lines:,} lines of code; at most {MOST_MODULES} and "
            f"{MOST_LINES:,}"
        )
    # The top of the package holds what all packages stand on.
    folders = collections.Counter(
        path.parent for path in texts if path.name != "__init__.py" and len(path.parts) > 2
    )
    for folder, count in folders.items():
        if count > MOST_IN_A_FOLDER:
            yield f"{folder}: {count} modules; at most {MOST_IN_A_FOLDER}"
    for path, text in texts.items():
        if "ContextVar" in text:
            yield f"{path}: no ContextVar; hand over an argument"


if __name__ == "__main__":
    breaches = list(faults())
    print("\n".join(breaches))
    sys.exit(bool(breaches))
