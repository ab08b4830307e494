import base64
import html.parser
import io
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tfdml.data.dataset import ArrayImages, EncodedImages, FileImages, ImageDataset
from tfdml.errors import UserError
from tfdml.evaluation import dataset_reader, evaluate_retrieval, sample_pair_distances, write_report
from tfdml.evaluation.figures import distance_histogram, line_chart, ticks
from tfdml.evaluation.gallery import choose_examples

VOID = {"meta", "link", "img", "br", "hr", "input", "line", "circle", "polygon", "polyline"}
EVIL = "<script>alert(\"1\")</script> & 'co'"


class Page(html.parser.HTMLParser):
    """Every element with its attributes and text; fails on tags that do not nest."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.ids = [], [], []
        self.feed(text)
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
        wanted = {key.rstrip("_"): value for key, value in attributes.items()}
        return [e for e in self.elements if e["tag"] == tag and all(e.get(k) == v for k, v in wanted.items())]


def embedded(seed=0, classes=6, per_class=7):
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), per_class) * 11
    return rng.normal(size=(classes, 4))[labels // 11] + 0.6 * rng.normal(size=(len(labels), 4)), labels


def made(labels, name="toys", names=None):
    """Images whose grey value tells their index."""
    data = np.stack([np.full((20, 30, 3), 5 * i % 256, np.uint8) for i in range(len(labels))])
    names = names or {int(c): f"class {c}" for c in np.unique(labels)}
    return ImageDataset(name, "test", ArrayImages(data, tuple(f"{i}.png" for i in range(len(labels)))), labels, names)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    embeddings, labels = embedded()
    dataset = made(labels, names={int(c): f"{c} {EVIL}" for c in np.unique(labels)})
    after = evaluate_retrieval(embeddings, labels)
    before = {**after, "recall@1": 0.1234}
    history = [{"epoch": e, "recall@1": v} for e, v in enumerate((0.31, 0.475, 0.42))] + [{"epoch": 3, "loss": 1.0}]
    path = tmp_path_factory.mktemp("run") / "report" / "index.html"
    write_report(
        path,
        f"Toys {EVIL}",
        before,
        after,
        history,
        dataset,
        embeddings,
        summary="Selected on held-out classes " + EVIL,
        flags={"note": EVIL, "rates": {"backbone": 1e-4}, EVIL: 1},
        environment={"tensorflow": "2.21.0"},
    )
    text = path.read_text("utf-8")
    return {"path": path, "text": text, "page": Page(text), "after": after, "data": (embeddings, labels)}


def test_nothing_is_loaded_and_nothing_runs(report):
    assert not report["page"].all("script")
    assert not re.search(r"https?://|@import|url\((?!#hatch)", report["text"])
    for element in report["page"].elements:
        assert not [a for a in element if a.startswith("on")], element
        assert element.get("src", "data:").startswith("data:")
        assert element.get("href", "#").startswith(("#", "data:"))
    assert len(report["text"]) < 3 * 2**20


def test_names_from_outside_are_text(report):
    """A class name, a title or a flag with markup in it is shown, not obeyed."""
    page = report["page"]
    assert page.all("h1")[0]["text"] == f"Toys {EVIL}"
    assert any(EVIL in e["text"] for e in page.all("span", class_="name"))
    assert any(EVIL in e["alt"] for e in page.all("img"))
    assert {EVIL, "note"} <= {e["text"] for e in page.all("th")}
    assert EVIL in {e["text"] for e in page.all("td")}
    assert '{"backbone": 0.0001}' in {e["text"] for e in page.all("td")}


def test_table_holds_the_metrics_in_percent(report):
    table = report["text"].split('<table class="metrics">')[1].split("</table>")[0]
    body = Page(table[table.index("<tbody>") :])
    cells = iter(e["text"] for e in body.all("td"))
    rows = {e["text"]: [next(cells), next(cells), next(cells)] for e in body.all("th")}
    recall = f"{100 * report['after']['recall@1']:.1f}"
    assert rows["Recall@1"] == ["12.3", recall, f"{float(recall) - 12.3:+.1f}"]
    for key, name in (("map@r", "MAP@R"), ("nmi", "NMI"), ("recall@8", "Recall@8")):
        value = f"{100 * report['after'][key]:.1f}"
        assert rows[name] == [value, value, "+0.0"]
    assert f"{len(report['data'][1])} queries, each compared with 41 images." in report["page"].all("main")[0]["text"]


def test_curve_is_a_figure_and_a_table(report):
    figures = {e["aria-label"] for e in report["page"].all("svg", role="img")}
    assert any("31.0 at epoch 0, best 47.5 at 1, last 42.0" in label for label in figures)
    assert "Epoch" in report["page"].all("details")[0]["text"]
    assert len(report["page"].all("svg")) == 2


def test_hits_and_misses_are_marked_as_they_are(report):
    embeddings, labels = report["data"]
    examples = choose_examples(embeddings, labels)
    assert len(examples) == 10
    assert [e.kind for e in examples] == ["random"] * 4 + ["worst"] * 3 + ["best"] * 3
    items = [e for e in report["page"].all("li") if e.get("class") in ("hit", "miss")]
    shown = items[2:]  # the first two are the key
    hits = np.concatenate([e.hits for e in examples])
    assert [e["class"] == "hit" for e in shown] == hits.tolist()
    assert ["✓" in e["text"] for e in shown] == hits.tolist()
    assert ["✗" in e["text"] for e in shown] == (~hits).tolist()
    assert 0 < hits.sum() < len(hits)
    distances = np.concatenate([e.distances for e in examples])
    assert all(f"{d:.3f}" in e["text"] for d, e in zip(distances, shown, strict=True))
    verdicts = [e["alt"].split(", ")[1].split(":")[0] for e in report["page"].all("img") if "Neighbour" in e["alt"]]
    assert verdicts == np.where(hits, "hit", "miss").tolist()


def test_pictures_are_those_of_the_neighbours(report):
    """Grey value 5 i tells which image a thumbnail was made of."""
    embeddings, labels = report["data"]
    expected = []
    for example in choose_examples(embeddings, labels):
        expected += [example.query, *example.neighbours]
    values = []
    for image in report["page"].all("img"):
        with Image.open(io.BytesIO(base64.b64decode(image["src"].split(",")[1]))) as picture:
            assert picture.size == (30, 20)
            values.append(np.asarray(picture).mean() / 5)
    np.testing.assert_allclose(values, expected, atol=0.3)


def test_headings_landmarks_and_alternatives(report):
    page = report["page"]
    assert page.all("html")[0]["lang"] == "en"
    assert [len(page.all(tag)) for tag in ("header", "main", "nav", "footer", "h1", "title")] == [1] * 6
    assert all(e.get("alt") for e in page.all("img"))
    assert all(e.get("scope") in ("row", "col") for e in page.all("th"))
    ids = [e["id"] for e in page.elements if "id" in e]
    assert len(ids) == len(set(ids))
    named = {e["href"][1:] for e in page.all("a")} | {
        e["aria-labelledby"] for e in page.elements if "aria-labelledby" in e
    }
    assert named <= set(ids)
    assert "prefers-color-scheme: dark" in report["text"]


def test_query_gallery_without_before_or_history(tmp_path):
    queries, labels = embedded(1)
    gallery, gallery_labels = embedded(2)
    dataset, searched = made(labels, "shop"), made(gallery_labels, "shop-gallery")
    after = evaluate_retrieval(queries, labels, gallery, gallery_labels, metrics=["recall", "map@r"])
    seen = []

    def read(index):
        seen.append(index)
        return np.zeros((8, 8, 3), np.uint8)

    write_report(
        tmp_path / "r.html",
        "Shop",
        None,
        after,
        [],
        dataset,
        queries,
        gallery=searched,
        gallery_embeddings=gallery,
        num_queries=4,
        neighbours=3,
        read_image=read,
        distance="cosine",
    )
    page = Page((tmp_path / "r.html").read_text("utf-8"))
    text = page.all("main")[0]["text"]
    examples = choose_examples(queries, labels, gallery, gallery_labels, num_queries=4, neighbours=3, distance="cosine")
    assert seen == [e.query for e in examples]  # the gallery's pictures come from the gallery
    assert len(page.all("img")) == 4 * (1 + 3)
    assert "Nothing was measured during training" in text
    assert "Before" not in text
    assert "queries against a gallery of 42, by cosine distance" in page.all("header")[0]["text"]


def test_a_page_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    embeddings, labels = embedded()
    path = tmp_path / "index.html"
    path.write_text("old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_report(path, "t", None, {"recall@1": 0.5}, [], made(labels), embeddings)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["index.html"]


def test_the_same_arguments_give_the_same_page(tmp_path):
    embeddings, labels = embedded()
    pages = []
    for name in ("a.html", "b.html"):
        write_report(tmp_path / name, "t", None, {"recall@1": 0.5}, [], made(labels), embeddings)
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]


def test_classes_of_one_image_give_a_page_that_says_so(tmp_path):
    labels = np.arange(5)
    write_report(tmp_path / "r.html", "t", None, {"nmi": 1.0}, [], made(labels), np.eye(5))
    text = Page((tmp_path / "r.html").read_text("utf-8")).all("main")[0]["text"]
    assert "No query has another image of its class" in text
    assert "There are not both pairs" in text


def test_bad_arguments(tmp_path):
    embeddings, labels = embedded()
    with pytest.raises(UserError, match="41 rows for the 42 images of toys"):
        write_report(tmp_path / "r.html", "t", None, {}, [], made(labels), embeddings[:41])
    with pytest.raises(UserError, match="go together"):
        write_report(tmp_path / "r.html", "t", None, {}, [], made(labels), embeddings, gallery=made(labels))
    assert not list(tmp_path.iterdir())


def test_worst_and_best_are_what_they_say():
    embeddings, labels = embedded(3, classes=20)
    examples = choose_examples(embeddings, labels, num_queries=10, neighbours=6)
    right = {kind: [e.hits.sum() for e in examples if e.kind == kind] for kind in ("worst", "best")}
    assert max(right["worst"]) < min(right["best"])
    assert len({e.query for e in examples}) == 10
    for kind in ("worst", "best"):
        assert len({labels[e.query] for e in examples if e.kind == kind}) == 3
    for example in examples:
        assert example.query not in example.neighbours
        np.testing.assert_array_equal(example.hits, labels[example.neighbours] == labels[example.query])


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_images_are_read_upright_opaque_and_rgb(tmp_path):
    half = Image.new("RGBA", (4, 2), (255, 0, 0, 0))
    half.putpixel((0, 0), (0, 0, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter clockwise
    wide = Image.fromarray(np.concatenate([np.zeros((16, 16)), np.full((16, 16), 255)], 1).astype(np.uint8))
    files = (encoded(half, "PNG"), encoded(wide, "JPEG", exif=exif), b"not an image")
    paths = [tmp_path / name for name in ("a.png", "b.jpg", "c.jpg")]
    for path, data in zip(paths, files, strict=True):
        path.write_bytes(data)
    names = {0: "x"}
    for images in (FileImages(tuple(map(str, paths))), EncodedImages(files, ("a.png", "b.jpg", "c.jpg"))):
        read = dataset_reader(ImageDataset("demo", "test", images, np.zeros(3, int), names))
        assert read(0)[0].tolist() == [[0, 0, 255], *[[255, 255, 255]] * 3]
        assert read(1).shape == (32, 16, 3)
        assert read(1)[0, 0].max() < 10
        assert read(1)[-1, 0].min() > 245
        with pytest.raises(UserError, match=r"c\.jpg cannot be read as an image"):
            read(2)


def test_pair_distances_are_of_the_right_pairs():
    embeddings, labels = embedded(4, classes=5, per_class=4)
    labels[-1] = 999  # a class of one image has no positive pair
    gaps = np.linalg.norm(embeddings[:, None] - embeddings[None], axis=-1)
    same = labels[:, None] == labels[None]
    positive, negative = sample_pair_distances(embeddings, labels, num_pairs=40_000)
    wanted = gaps[same & ~np.eye(len(labels), dtype=bool)]
    np.testing.assert_allclose(np.unique(positive), np.unique(wanted.astype(np.float32)), rtol=1e-5)
    np.testing.assert_allclose(positive.mean(), wanted.mean(), rtol=0.02)  # pairs are equally likely
    np.testing.assert_allclose(negative.mean(), gaps[~same].mean(), rtol=0.02)
    assert len(np.unique(negative)) == (~same).sum() / 2
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    cosine = sample_pair_distances(embeddings, labels, distance="cosine", num_pairs=500)[1]
    assert np.isin(np.round(cosine, 4), np.round((1 - unit @ unit.T).astype(np.float32), 4)).mean() > 0.98


def test_ticks_are_round_and_inside():
    assert ticks(0, 1) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(31.2, 47.9) == [35.0, 40.0, 45.0]
    assert ticks(2, 2) == [2]


def test_figures_of_degenerate_data_are_finite():
    for svg in (
        line_chart([(3, 50.0)], name="n", x_label="epoch", y_label="y"),
        line_chart([(1, 0.0), (2, 0.0)], name="n", x_label="epoch", y_label="y"),
        distance_histogram(np.zeros(4), np.zeros(4), name="n", x_label="x"),
        distance_histogram(-np.ones(4), -np.ones(2), name="n", x_label="x"),
    ):
        Page(svg)
        assert "nan" not in svg
        assert "inf" not in svg


def test_importing_stays_light():
    """Beyond what Keras itself imports, measuring needs neither clustering, figures nor, on JAX, TensorFlow."""
    code = (
        "import sys, keras; before = set(sys.modules); import tfdml.evaluation; "
        "print({'faiss', 'sklearn', 'matplotlib', 'tensorflow', 'PIL'} & (set(sys.modules) - before))"
    )
    env = {**os.environ, "KERAS_BACKEND": "jax"}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert result.stdout.strip().splitlines()[-1] == "set()"
