"""The page in a real browser: upload, click, filter, examples, selection, errors, width, keyboard, names of parts."""

import shutil
import threading
import time

import pytest

pytest.importorskip("starlette")
pytest.importorskip("playwright", reason="Playwright is not installed: pip install playwright")

from playwright import sync_api
from playwright.sync_api import expect

from tests.demo.pages import EVIL, embed, encoded, small_gallery
from tfdml.demo import Demo, application
from tfdml.evaluation import calibrate

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The demo of a small gallery, served in a thread."""
    import uvicorn

    folder = tmp_path_factory.mktemp("colors")
    gallery = small_gallery(folder, each=30)
    calibration = calibrate(gallery.embeddings, gallery.columns["class"].codes, far=0.2, distance="euclidean")
    demo = Demo(gallery, embed, "models/colors", {"recall@1": 0.75}, calibration, str(folder))
    server = uvicorn.Server(uvicorn.Config(application(demo), port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    demo.compute_map()
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = server.force_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser, address):
    """The page, loaded; what goes wrong in its script fails the test."""
    faults = []
    context = browser.new_context(viewport={"width": 360, "height": 740}, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(10_000)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: faults.append(dialog.message))
    page.goto(address)
    page.wait_for_selector("#map-body:not([hidden])")
    page.wait_for_selector("#images li")
    yield page
    context.close()
    assert not faults


def classes(page):
    return page.locator("#results .class").all_inner_texts()


def upload(page, data, name="photo.png"):
    page.set_input_files("#file", {"name": name, "mimeType": "image/png", "buffer": data})


def test_upload_click_filter_and_examples(page):
    page.fill("#k", "8")
    upload(page, encoded((0, 250, 0)), EVIL)
    page.wait_for_selector("#results li >> nth=7")
    assert classes(page) == ["green"] * 8
    assert page.locator("#results .decision").first.inner_text() == "✓ same"
    assert page.locator("#status").inner_text().startswith("8 neighbors, 8 of them the same")
    assert page.locator("#positives img").get_attribute("alt") == EVIL

    page.select_option("#column", "class")
    page.fill("#value", "red")
    page.press("#value", "Enter")
    page.wait_for_selector("#results li.different")
    assert classes(page) == ["red"] * 8
    assert page.locator("#page").inner_text() == "1 to 24 of 30"
    page.click("#next")
    expect(page.locator("#page")).to_have_text("25 to 30 of 30")
    last = page.locator("#images li .search-by").last
    assert last.get_attribute("aria-label") == f"Search by red, {EVIL}"
    last.click()
    page.wait_for_selector("#results li.same")
    assert page.locator("#positives li").count() == 1
    assert page.locator("#positives img").get_attribute("alt") == f"red, {EVIL}"

    page.select_option("#column", "")
    expect(page.locator("#page")).to_have_text("1 to 24 of 90")
    page.get_by_role("button", name="Not like").first.click()
    page.wait_for_selector("#negatives li")
    page.get_by_role("button", name="More like").last.click()
    page.wait_for_selector("#positives li >> nth=1")
    page.click("#clear")
    expect(page.locator("#results li")).to_have_count(0)


def test_selection_on_the_map_by_mouse_and_keys(page):
    page.select_option("#mode", "box")
    canvas = page.locator("#canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 1, box["y"] + 60)  # below the rounded corner
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + box["height"] - 60, steps=3)
    page.mouse.up()
    page.wait_for_selector("#selected li")
    assert page.locator("#selected-status").inner_text() == "90 images selected, the first 60 are listed."
    assert page.locator("#selected li").count() == 60
    canvas.focus()
    for _ in range(6):
        page.keyboard.press("+")
    page.keyboard.press("Enter")
    expect(page.locator("#selected-status")).not_to_contain_text("90 ")
    page.keyboard.press("0")
    page.keyboard.press("Enter")
    expect(page.locator("#selected-status")).to_contain_text("90 images")
    painted = page.evaluate(
        "() => { const c = document.getElementById('canvas');"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; return d.some((v) => v > 0); }"
    )
    assert painted


def test_errors_are_shown_and_go_away(page, address):
    upload(page, b"<svg onload=alert(1)>")
    page.wait_for_selector("#error:not([hidden])")
    assert "not a JPEG, PNG or WebP image" in page.locator("#error").inner_text()
    upload(page, encoded((250, 0, 0)))
    page.wait_for_selector("#results li")
    assert page.locator("#error").is_hidden()
    page.context.set_offline(True)
    page.locator("#images .search-by").first.click()
    page.wait_for_selector("#error:not([hidden])")
    assert page.locator("#error").inner_text() == "The demo does not respond. Is it still running?"


def test_a_phone_a_keyboard_and_a_screen_reader(page):
    upload(page, encoded((0, 0, 250)))
    page.wait_for_selector("#results li")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    for role, name in (("region", "Search by image"), ("region", "Gallery"), ("navigation", "Sections")):
        assert page.get_by_role(role, name=name).count() == 1, name
    assert page.locator("button:visible").evaluate_all("all => all.every((b) => b.innerText || b.ariaLabel)")
    assert page.locator("img").evaluate_all("all => all.every((image) => image.hasAttribute('alt'))")
    fields = "all => all.filter((field) => !field.labels.length).map((field) => field.id)"
    assert page.locator("input, select").evaluate_all(fields) == []
    assert page.locator("main > section").evaluate_all("all => all.every((s) => s.getAttribute('aria-labelledby'))")
    page.locator("#clear").focus()
    page.keyboard.press("Tab")  # to the first neighbor
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Search by blue")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    first = page.locator("#positives img").get_attribute("alt")
    page.keyboard.press("Enter")
    expect(page.locator("#positives img")).not_to_have_attribute("alt", first)
