"""The page in a real browser: an upload, its neighbors, a click on one of them."""

import shutil

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("playwright", reason="Playwright is not installed: pip install playwright")

from playwright import sync_api
from playwright.sync_api import expect

from tests.web.pages import EVIL, embed, encoded, small_gallery
from tfdml.evaluation import calibrate
from tfdml.web.application import application
from tfdml.web.lanes import Lanes
from tfdml.web.page import Demo, page_routes
from tfdml.web.server import address_of, listen, serving
from tfdml.web.settings import WebSettings

expect.set_options(timeout=60_000)  # of a busy machine
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_upload_and_click(tmp_path):
    gallery, faults = small_gallery(tmp_path, each=30), []
    codes = np.unique(gallery.classes, return_inverse=True)[1]
    calibration = calibrate(gallery.embeddings, codes, far=0.2, distance="euclidean")
    demo = Demo(gallery, embed, "models/colors", calibration)
    app = application(page_routes(demo, Lanes(WebSettings())))
    with (
        listen("127.0.0.1", 0) as opened,
        serving(app, opened),
        sync_api.sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: faults.append(dialog.message))
        page.goto(address_of(opened))
        page.fill("input[name=k]", "8")
        page.set_input_files(
            "#file", {"name": EVIL, "mimeType": "image/png", "buffer": encoded((250, 0, 0))}
        )
        expect(page.locator("#results li.same")).to_have_count(8)
        expect(page.locator(".verdict")).to_contain_text("Found: red")
        page.fill("input[name=k]", "3")
        page.click("form button")
        expect(page.locator("#results li")).to_have_count(3)
        page.locator("#results a").first.click()
        page.wait_for_url("**/?row=*")
        expect(page.locator("#results li")).to_have_count(3)
        assert page.locator("#query").get_attribute("src").startswith("/image/")
        page.get_by_text("Next").click()
        expect(page.locator("h2")).to_have_text("Gallery, images 25 to 48 of 90")
        page.set_input_files(
            "#file", {"name": "a.png", "mimeType": "image/png", "buffer": b"<svg onload=alert(1)>"}
        )
        expect(page.get_by_role("alert")).to_contain_text("not a JPEG")
        assert not faults
        browser.close()
