"""Pages taken apart, and small data sets to write them of."""

import html.parser
import itertools

import numpy as np

from tfdml.data.dataset import ImageDataset
from tfdml.data.images import ArrayImages

VOID = {"meta", "link", "img", "br", "hr", "input", "line", "circle", "polygon", "polyline", "path"}
EVIL = "<script>alert(\"1\")</script> & 'co' <!-- ${title} {{ title }}"


class Page(html.parser.HTMLParser):
    """Every element with its attributes and text; fails on tags that do not nest."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.elements = [], []
        self.feed(str(text))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "text": "", **dict(attrs)}
        assert len(dict(attrs)) == len(attrs), f"an attribute of {tag} comes twice"
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.elements.append({"tag": tag, "text": "", **dict(attrs)})

    def handle_endtag(self, tag):
        assert self.open[-1]["tag"] == tag, f"</{tag}> closes <{self.open[-1]['tag']}>"
        self.open.pop()

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag, **attributes):
        attributes = {key.rstrip("_"): value for key, value in attributes.items()}
        return [e for e in self.elements if e["tag"] == tag and attributes.items() <= e.items()]

    def section(self, name):
        (section,) = self.all("section", id=name)
        return section["text"]


def rows_of(text, caption):
    """The cells of the table with this caption, row by row, as text."""
    for part in text.split("<table")[1:]:
        table = "<table" + part.split("</table>")[0] + "</table>"
        page = Page(table)
        if page.all("caption")[0]["text"] == caption:
            body = table[table.index("<tbody>") + 7 : table.index("</tbody>")]
            rows = [Page("<tr" + row) for row in body.split("<tr")[1:]]
            return [[e["text"] for e in row.elements if e["tag"] in ("th", "td")] for row in rows]
    raise AssertionError(f"no table is called {caption!r}")


def embedded(seed=0, classes=6, per_class=7, spread=0.6):
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), per_class) * 11
    return rng.normal(size=(classes, 4))[labels // 11] + spread * rng.normal(
        size=(len(labels), 4)
    ), labels


def made(labels, name="toys", names=None, pixels=None, **fields):
    """Images whose gray value is their index, unless other pixels are given."""
    if pixels is None:
        pixels = np.stack([np.full((20, 30, 3), 5 * i % 256, np.uint8) for i in range(len(labels))])
    names = names or {int(c): f"class {c}" for c in np.unique(labels)}
    images = ArrayImages(pixels, tuple(f"{i}.png" for i in range(len(labels))))
    return ImageDataset(name, "test", images, labels, names, **fields)


def check_page(text):
    """What holds of every page: nothing is loaded, no script is there, and it can be read aloud."""
    page = Page(text)
    for element in page.elements:
        assert not [a for a in element if a.startswith("on")], element
        assert element.get("src", "data:").startswith("data:")
        assert element.get("href", "#").startswith(("#", "data:"))
    assert not page.all("script")
    assert page.all("html")[0]["lang"] == "en"
    assert [len(page.all(tag)) for tag in ("header", "main", "nav", "footer", "h1", "title")] == [
        1
    ] * 6
    assert all(e.get("alt") is not None for e in page.all("img"))
    assert all(e.get("alt") for e in page.all("img") if "hidden" not in e)
    assert all(e.get("scope") in ("row", "col") for e in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(e.get("aria-label") for e in page.all("svg") if e.get("role") == "img")
    assert all(e.get("role") == "img" or e.get("aria-hidden") == "true" for e in page.all("svg"))
    levels = [int(e["tag"][1]) for e in page.elements if e["tag"] in ("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    ids = [e["id"] for e in page.elements if "id" in e]
    assert len(ids) == len(set(ids))
    assert {e["href"][1:] for e in page.all("a")} <= set(ids)
    assert {e["aria-labelledby"] for e in page.elements if "aria-labelledby" in e} <= set(ids)
    assert "prefers-color-scheme: dark" in text
    return page
