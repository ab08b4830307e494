"""Draws docs/images/code_map.svg: the packages in their layers, and which imports which. Run by `make code-map`.

The layers are those that `make lint` checks, read from pyproject.toml; the arrows are the imports of the code. An arrow
that follows from others is left out: where a imports b and b imports c, none goes from a to c.
"""

from __future__ import annotations

import ast
import html
import pathlib
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "code_map.svg"
WIDTH, BOX_WIDTH, BOX_HEIGHT, ROW = 1230, 190, 46, 88
# The middle of each box, and what it says: the mathematics to the left, images and files to the right.
BOXES = {
    "cli": (740, "the subcommands of tfdml"),
    "cluster": (620, "work of many machines, by Ray"),
    "demo": (900, "a gallery in the browser"),
    "export": (620, "SavedModel, LiteRT, ONNX, retriever"),
    "retrieval": (740, "exact search, indexes, databases"),
    "training": (740, "from settings to a run folder"),
    "report": (900, "HTML pages of runs"),
    "callbacks": (225, "retrieval metrics within fit"),
    "index": (430, "a gallery for notebooks"),
    "explain": (935, "heat maps of similarity"),
    "audit": (1130, "duplicates and doubtful labels"),
    "evaluation": (740, "metrics, intervals, generalization"),
    "embeddings": (740, "computed, stored, read; backends"),
    "models": (620, "Embedder, MetricLearner"),
    "objectives": (505, "the terms of a training loss"),
    "backbones": (730, "networks by name, weights"),
    "data": (980, "data sets, views, samplers, batches"),
    "losses": (225, "stateless losses on a batch"),
    "mining": (375, "choosing pairs and triplets"),
    "layers": (640, "layers with weights"),
    "kernels": (520, "reproducing kernels"),
    "pairs": (300, "anchors and their references"),
    "replicas": (105, "what others hold; shared work"),
    "pairwise": (375, "distances, masks, reductions"),
    "memory": (845, "what is free, and refusals"),
    "io": (1125, "files, locks, manifests"),
    "saving": (105, "objects and their configs"),
    "effects": (303, "when a flag has an effect"),
    "arguments": (500, "checks of numbers"),
    "errors": (700, "errors of one line"),
    "version": (900, "versions of packages"),
    "workarounds": (1110, "private parts of libraries"),
}


def layers() -> list[list[str]]:
    """Return the packages, from the top layer to the ground."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rows = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    named = [[name.strip(" ()") for name in row.split("|")] for row in rows]
    return [[name for name in row if source_of(name)] for row in named]


def source_of(package: str) -> pathlib.Path | None:
    """Return the file that holds a package's docstring; None where there is no such package."""
    for path in (ROOT / "tfdml" / package / "__init__.py", ROOT / "tfdml" / f"{package}.py"):
        if path.is_file():
            return path
    return None


def imports() -> set[tuple[str, str]]:
    """Return (importer, imported) of every two packages of which the first imports from the second."""
    dependencies = set()
    for path in (ROOT / "tfdml").rglob("*.py"):
        importer = path.relative_to(ROOT / "tfdml").parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tfdml":
                module = f"{node.module}."
                names = [module + alias.name for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                parts = name.split(".")
                if parts[0] == "tfdml" and len(parts) > 1 and source_of(parts[1]) and parts[1] != importer:
                    dependencies.add((importer, parts[1]))
    return {edge for edge in dependencies if edge[0] != "__init__"}


def reduced(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the edges that do not follow from others."""

    def reaches(start: str, end: str, without: tuple[str, str]) -> bool:
        after = {b for a, b in edges if a == start and (a, b) != without}
        return end in after or any(reaches(b, end, without) for b in after)

    return {edge for edge in edges if not reaches(*edge, without=edge)}


def draw() -> str:
    """Return the picture, as SVG."""
    rows = layers()
    where = {}
    for row, packages in enumerate(rows):
        for package in packages:
            where[package] = (BOXES[package][0], 20 + row * ROW)
    height = 20 + len(rows) * ROW - (ROW - BOX_HEIGHT) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" role="img">',
        "<title>The packages of tfdml in their layers, and what each imports</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#5c6b8a"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    arrows = reduced(imports())
    for importer, imported in sorted(arrows):
        # Straight down from a place of its own, and to the side only just above the box that it points to.
        beside = sorted((b for a, b in arrows if a == importer), key=lambda name: where[name][0])
        x = where[importer][0] + 24 * (beside.index(imported) - (len(beside) - 1) / 2)
        y, (to_x, to_y) = where[importer][1] + BOX_HEIGHT, where[imported]
        turn = max(y, to_y - (ROW - BOX_HEIGHT))
        lines.append(
            f'<path data-imports="{importer} {imported}" fill="none" stroke="#5c6b8a" stroke-width="1.4" '
            f'd="M{x:g} {y}V{turn}C{x:g} {to_y - 12} {to_x} {turn + 8} {to_x} {to_y - 1}" marker-end="url(#tip)"/>'
        )
    for package, (x, y) in where.items():
        about = html.escape(BOXES[package][1])
        lines += [
            f'<rect x="{x - BOX_WIDTH // 2}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" '
            'fill="#eef1fb" stroke="#3f51b5"/>',
            f'<g text-anchor="middle"><text x="{x}" y="{y + 19}" font-size="15" font-weight="600" fill="#1b2559">'
            f'{package}</text><text x="{x}" y="{y + 36}" font-size="10.5" fill="#333">{about}</text></g>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw())
    print(PICTURE)
