"""Rules of the layout that no linter has: `python -m tools.house`, a part of `make lint`.

- A folder of `tfdml` has at most 12 modules, and the package at most `MOST_MODULES` and `MOST_LINES` of code.
- No module changes the meaning of others by a `ContextVar`.
- A module serves more than one other module, or is one that a reader looks for by itself (`SINGLE_USE`).
- Tests mirror the package: `tests/<path>/test_<module>.py` is the test of `tfdml/<path>/<module>.py`, or one of several
  (`OF_SEVERAL`).
- Text has the words of the field, and none of `WORDS`.
- Pages have the numbers of `docs/numbers` (`tools/numbers.py`).
"""

from __future__ import annotations

import ast
import collections
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator

from tools import numbers

ROOT = pathlib.Path(__file__).resolve().parents[1]
MOST_IN_A_FOLDER = 12
MOST_MODULES = 230
MOST_LINES = 23_800

#: Modules that one other module imports, and what a reader looks for in them.
SINGLE_USE = {
    **dict.fromkeys(
        ["tfdml.backbones.networks"],
        "a network",
    ),
    **dict.fromkeys(
        ["tfdml.data.readers.glyphs", "tfdml.data.readers.official_archives"],
        "data sets of one kind",
    ),
    "tfdml.cluster.bulk_embedding": "the entry of embedding over Ray",
    "tfdml.cluster.serving": "the entry of serving",
    "tfdml.cluster.training": "the entry of training over Ray",
    "tfdml.data.download": "archives from their publishers",
    "tfdml.export.search_graph": "the part of a retriever that TensorFlow alone runs",
    "tfdml.models.gradient_cache": "batches beyond the memory",
    "tfdml.report.queries": "queries with their neighbors, classes and confusions",
    "tfdml.training.run.dry_run": "the entry of `--dry_run`",
}
#: Tests of several modules at once.
OF_SEVERAL = frozenset(
    {
        *("test_configs.py", "test_distribution.py", "test_jax.py", "test_labels.py", "test_package.py"),
        *("test_packaging.py", "test_studies.py", "test_tensorflow.py"),
        *("backbones/test_jax.py", "losses/test_backends.py", "losses/test_replicas.py"),
        *(
            "cli/test_heads.py",
            "data/test_orientation.py",
            "cli/test_broken_files.py",
            "cli/test_wrong_commands.py",
        ),
        *(
            "embeddings/test_backends_onnx.py",
            "evaluation/test_published_scripts.py",
            "io/test_object_store.py",
            "io/test_stores.py",
        ),
        *("demo/test_browser.py", "export/test_client.py", "export/test_hub_networks.py", "export/test_load.py"),
        *("export/test_plain_environments.py", "export/test_serving_files.py"),
        *("training/distributed/test_jax_processes.py", "training/distributed/test_worker_runs.py"),
        *("training/run/test_kills.py", "training/run/test_random_kills.py", "training/run/test_recall_improves.py"),
        "training/run/test_seeds.py",
        *("training/test_rows_of_the_papers.py",),
    }
)
#: Folders whose text is read for `WORDS`.
WORDED = ("benchmarks", "bin", "docs", "export", "tests", "tfdml", "tfdml_command", "tools")
#: Words that the project does not use, and what it uses.
WORDS = {
    r"\bgo(es)? on (with|from|where)\b": "resumes, continues",
    r"\bwent on\b": "resumed",
    r"\banew\b": "again",
    r"\ba second time\b": "again",
    r"\bunbroken run\b": "uninterrupted run",
    r"\bat the least\b": "at least",
    r"\bat will\b": "(leave it out)",
    r"\bshall\b": "must",
    r"\bworked out\b": "computed",
    r"\brivals?\b": "baseline, alternative",
    r"\bhears? of\b": "receives",
    r"\bwhat lies\b": "the files in it",
    r"\bgoes on\b": "resumes, continues",
    r"\btells?\b": "prints, reports, returns",
    r"(?<!\{)\btold\b": "printed, reported, returned",
    r"\bhas it\b": "(name where it is)",
    r"\bhad (from|by)\b": "comes from",
    r"(?<![-\w{])\bbeside\b(?!:)": "next to, compared with",
    r"\bunbroken\b": "uninterrupted",
    r"\bof which the last\b": "(write a second sentence)",
    r"\b(page|line|column|disk|docstring)s? (says?|hears?)\b": "shows, prints, contains",
    r"\bby seed and machine\b": "depending on seed and machine",
    r"\bgives 0 of\b": "returns 0 for",
    r"\bideas?\b": "regularizer, objective, method",
    r"\bthere whole or not at all\b": "written atomically",
}


def modules() -> dict[str, pathlib.Path]:
    """Return the package's modules by dotted name."""
    files = {}
    for path in sorted((ROOT / "tfdml").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def code_lines(text: str) -> int:
    """Count the lines of code, without blanks, comments and docstrings."""
    lines = text.splitlines()
    skipped = {i for i, line in enumerate(lines, 1) if not line.strip() or line.strip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            skipped.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines) - len(skipped)


def importers(files: dict[str, pathlib.Path]) -> dict[str, set[str]]:
    """Return the modules that import each module."""
    users = collections.defaultdict(set)
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [full if full in files else node.module for full in names]
            else:
                continue
            for full in names:
                users[full].add(name)
    return users


def faults() -> Iterator[str]:
    """Yield a line for each breach of a rule."""
    files = modules()
    texts = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    lines = sum(code_lines(text) for text in texts.values())
    if len(files) > MOST_MODULES or lines > MOST_LINES:
        yield f"tfdml: {len(files)} modules and {lines:,} lines of code; at most {MOST_MODULES} and {MOST_LINES:,}"
    folders = collections.Counter(path.parent for path in files.values() if path.name != "__init__.py")
    # The top of the package holds what all packages stand on.
    for folder, count in folders.items():
        if count > MOST_IN_A_FOLDER and folder != ROOT / "tfdml":
            yield f"{folder.relative_to(ROOT)}: {count} modules; at most {MOST_IN_A_FOLDER}"
    for name, text in texts.items():
        if "ContextVar" in text:
            yield f"{name}: no ContextVar; hand over an argument"
    users = importers(files)
    for name, path in files.items():
        others = users[name] - {name.rpartition(".")[0]}
        if path.name != "__init__.py" and len(users[name]) == 1 and others and name not in SINGLE_USE:
            yield f"{name}: only {others.pop()} imports it; merge them, or name the reason in SINGLE_USE"
    for name in SINGLE_USE:
        if name not in files or len(users[name]) != 1:
            yield f"{name}: in SINGLE_USE, and not imported by one module"
    yield from _unmirrored()
    yield from _words()
    yield from numbers.faults()


def _unmirrored() -> Iterator[str]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        place = path.relative_to(ROOT / "tests")
        if place.parts[0] in ("command", "docs", "hosts", "parity", "tools") or place.as_posix() in OF_SEVERAL:
            continue
        module = place.with_name(place.name.removeprefix("test_"))
        if not (ROOT / "tfdml" / module).is_file() and not (ROOT / "tfdml" / module.with_suffix("")).is_dir():
            yield f"tests/{place}: there is no tfdml/{module}; move it, or name it in OF_SEVERAL"


def _words() -> Iterator[str]:
    patterns = {re.compile(pattern, re.IGNORECASE): instead for pattern, instead in WORDS.items()}
    paths = [path for part in WORDED for path in (ROOT / part).rglob("*") if path.is_file()]
    for path in sorted([*paths, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]):
        if path.suffix == ".md":
            lines = list(enumerate(path.read_text(encoding="utf-8").splitlines(), 1))
        elif path.suffix == ".py":
            lines = list(_prose(path.read_text(encoding="utf-8")))
        else:
            continue
        for number, line in lines:
            for pattern, instead in patterns.items():
                if match := pattern.search(line):
                    yield f"{path.relative_to(ROOT)}:{number}: not {match.group()!r} but {instead}"


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of comments and strings."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) or token.type == getattr(tokenize, "FSTRING_MIDDLE", -1):
            for i, line in enumerate(token.string.splitlines()):
                yield token.start[0] + i, line


if __name__ == "__main__":
    broken = list(faults())
    print("\n".join(broken))
    sys.exit(bool(broken))
