"""The page in a real browser: an image is dropped on it, with a gallery of every kind."""

import contextlib
import dataclasses
import shutil
import threading

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("playwright", reason="Playwright is not installed: pip install playwright")

from playwright import sync_api
from playwright.sync_api import expect

from tests.embeddings.folders import write_folder
from tests.export.networks import small_embedder
from tests.web.pages import COLORS, EVIL, Colors, embed, encoded, small_gallery
from tfdml.data import load
from tfdml.embeddings.files import ImageTable
from tfdml.evaluation import calibrate
from tfdml.export import Retriever, write_saved_model
from tfdml.retrieval import open_gallery
from tfdml.web.application import application
from tfdml.web.lanes import Lanes
from tfdml.web.page import Demo, page_routes
from tfdml.web.pictures import pictures_of, pictures_of_gallery
from tfdml.web.server import address_of, listen, serving
from tfdml.web.settings import WebSettings

expect.set_options(timeout=60_000)  # of a busy machine
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
# It asks no server of its maker.
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
OPTIONS += ["--disable-background-networking", "--disable-component-update"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def demo(tmp_path):
    """Ninety pictures of three colors, and the threshold of a model that sees colors."""
    gallery = small_gallery(tmp_path, each=30)
    codes = np.unique(gallery.classes, return_inverse=True)[1]
    calibration = calibrate(gallery.embeddings, codes, far=0.2, distance="euclidean")
    return Demo(gallery, embed, "models/colors", calibration)


@contextlib.contextmanager
def shown(browser, demo, refused=0, **screen):
    """The page of a demo in a new window.

    Its console stays empty but for as many refusals of the server, and it breaks no rule of its
    Content-Security-Policy.
    """
    faults = []
    app = application(page_routes(demo, Lanes(WebSettings())))
    with listen("127.0.0.1", 0) as opened, serving(app, opened):
        page = browser.new_page(**screen)
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: faults.append(dialog.message))
        page.goto(address_of(opened))
        yield page
        page.close()
    refusals = [fault for fault in faults if "the server responded with a status of 400" in fault]
    assert len(refusals) == refused
    assert faults == refusals


def drop(page, path):
    """Drop a file on the page, as the operating system does."""
    page.locator("#drop").scroll_into_view_if_needed()
    box = page.locator("#drop").bounding_box()
    point = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    client = page.context.new_cdp_session(page)
    for kind in ("dragEnter", "dragOver", "drop"):
        client.send("Input.dispatchDragEvent", {"type": kind, "data": data, **point})


def write(path, color, **options):
    path.write_bytes(encoded(color, **options))
    return path


def are_painted(pictures):
    """Whether the browser has decoded each of some pictures."""
    script = "images => images.every(image => image.complete && image.naturalWidth > 0)"
    return pictures.evaluate_all(script)


def stored(gallery, folder):
    """The same gallery as embeddings that `tfdml embed` wrote."""
    names = ("blue", "green", "red")
    codes = [names.index(name) for name in gallery.classes]
    table = ImageTable(tuple(gallery.names), codes, ["test"] * len(gallery), dict(enumerate(names)))
    about = {"model": {"fingerprint": Colors().fingerprint()}}
    write_folder(folder / "embeddings", {}, table, gallery.embeddings, about)
    return pictures_of(str(folder / "embeddings"), Colors(), gallery.folder)


def in_database(gallery, folder):
    """The same gallery in LanceDB."""
    pytest.importorskip("lancedb")
    address = f"lancedb://{folder}/galleries"
    with open_gallery(address) as database:
        columns = {"path": gallery.names, "class": gallery.classes}
        database.add(gallery.names, gallery.embeddings, columns, model=Colors().fingerprint())
    return pictures_of(address, Colors(), gallery.folder)


@pytest.mark.parametrize("convert", [stored, in_database])
def test_a_dropped_image_finds_its_neighbors_and_a_stranger_finds_nobody(
    browser, demo, tmp_path, convert
):
    demo = dataclasses.replace(demo, gallery=convert(demo.gallery, tmp_path))
    threshold = f"{demo.calibration.threshold:.4g}"
    with shown(browser, demo) as page:
        drop(page, write(tmp_path / "query.png", (250, 0, 0)))
        expect(page.locator("#message")).to_have_text(f"Found: red, within {threshold}")
        neighbors = page.locator("#results li")
        expect(neighbors.locator(".class")).to_have_text(["red"] * 12)
        accepted = page.locator("#results li.same")
        expect(accepted).to_have_count(8)
        expect(neighbors.first).to_contain_text("within the threshold")
        names = neighbors.locator("img").evaluate_all("images => images.map(each => each.alt)")
        assert names == [f"red{number}.png" for number in range(12)]
        neighbors.last.scroll_into_view_if_needed()
        page.wait_for_load_state("networkidle")
        assert are_painted(neighbors.locator("img"))
        assert are_painted(page.locator("#query"))
        drop(page, write(tmp_path / "stranger.jpg", (255, 255, 255), kind="JPEG"))
        expect(page.locator("#message")).to_have_text(f"Nobody within {threshold}")
        expect(neighbors).to_have_count(12)
        expect(accepted).to_have_count(0)


def test_a_retriever_embeds_and_finds_what_is_dropped(browser, demo, tmp_path):
    photos = tmp_path / "photos"
    for number, name in enumerate(demo.gallery.names[::10]):
        folder = photos / demo.gallery.classes[10 * number]
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / name, folder)
    write_saved_model(small_embedder(), tmp_path / "embedder" / "1")
    images = load("folder", photos, "all")
    where = {"directory": str(photos), "calibration": "none"}
    Retriever.build(tmp_path / "embedder", images, tmp_path / "retriever", **where)
    retriever = open_gallery(str(tmp_path / "retriever"))
    pictures = pictures_of_gallery(retriever, str(photos), retriever.about.model)
    demo = Demo(pictures, lambda data: retriever.embed(data)[0], "retriever")
    with shown(browser, demo) as page:
        drop(page, photos / "green" / "green10.png")
        expect(page.locator("#message")).to_contain_text("no calibrated threshold")
        first = page.locator("#results li").first
        expect(first.locator(".class")).to_have_text("green")
        expect(first).to_contain_text("euclidean 0")
        expect(first.locator("img")).to_have_attribute("alt", "green/green10.png")
        page.wait_for_load_state("networkidle")
        assert are_painted(page.locator("#results img"))


def test_the_page_is_used_by_keyboard_on_a_small_screen(browser, demo):
    screen = {"viewport": {"width": 360, "height": 640}, "has_touch": True, "is_mobile": True}
    with shown(browser, demo, refused=1, **screen) as page:
        file = {"name": EVIL, "mimeType": "image/png", "buffer": encoded((250, 0, 0))}
        page.set_input_files("#file", file)
        expect(page.locator(".verdict")).to_contain_text("Found: red")
        page.locator("#file").focus()
        page.keyboard.press("Tab")
        page.keyboard.type("3")  # in place of 12, which is selected
        page.keyboard.press("Enter")
        expect(page.locator("#results li")).to_have_count(3)
        width = "document.documentElement.scrollWidth"
        assert page.evaluate(width) == 360
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Search"
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_url("**/?row=*")
        expect(page.locator("#results li")).to_have_count(3)
        assert page.locator("#query").get_attribute("src").startswith("/image/")
        page.get_by_text("Next").focus()
        page.keyboard.press("Enter")
        expect(page.locator("h2")).to_have_text("Gallery, images 25 to 48 of 90")
        no_image = {**file, "buffer": b"<svg onload=alert(1)>"}
        page.set_input_files("#file", no_image)
        expect(page.get_by_role("alert")).to_contain_text("not a JPEG")
        expect(page.locator("#query")).to_be_hidden()
        expect(page.locator("#results li")).to_have_count(0)
        assert page.evaluate(width) == 360


def test_words_find_images(browser, demo):
    def embed_texts(texts):
        return np.array([embed(encoded(COLORS[text])) for text in texts])

    with shown(browser, dataclasses.replace(demo, embed_texts=embed_texts)) as page:
        page.get_by_label("Words").fill("green")
        page.keyboard.press("Enter")
        expect(page.locator("#message")).to_have_text("The nearest images to these words")
        expect(page.locator("#results .class")).to_have_text(["green"] * 12)


def test_the_answer_is_that_of_the_last_image(browser, demo, tmp_path):
    """Also where that of another is late, and where something else than the page answers."""
    has_begun, is_late, is_answered = threading.Event(), threading.Event(), threading.Event()

    def embed_late(data):
        color = embed(data)
        if color[0] > 0.5:
            has_begun.set()
            is_late.wait(60)
            is_answered.set()
        return color

    slow, fast = write(tmp_path / "a.png", (250, 0, 0)), write(tmp_path / "b.png", (0, 0, 250))
    with shown(browser, dataclasses.replace(demo, embed=embed_late)) as page:
        drop(page, slow)
        expect(page.locator("#message")).to_have_text("Searching ...")
        # The page drops a request that another follows: one that no server reads is not answered.
        assert has_begun.wait(60)
        drop(page, fast)
        expect(page.locator("#message")).to_contain_text("Found: blue")
        is_late.set()
        assert is_answered.wait(60)
        page.wait_for_timeout(1000)
        expect(page.locator("#message")).to_contain_text("Found: blue")
        page.route("**/?k=*", lambda route: route.fulfill(status=200, body="plain <b>words</b>"))
        drop(page, fast)
        expect(page.locator("#message")).to_have_text("plain words")
