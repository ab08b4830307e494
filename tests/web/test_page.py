"""The web application: what it answers, and each request that it refuses, with one line."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from starlette.testclient import TestClient

from tests.data.preparations import png
from tests.web.pages import COLORS, EVIL, embed, encoded, small_gallery
from tfdml.evaluation import calibrate
from tfdml.web.application import application
from tfdml.web.lanes import Lanes
from tfdml.web.page import Demo, page_routes
from tfdml.web.settings import WebSettings


def application_of(demo, token=""):
    return application(page_routes(demo, Lanes(WebSettings(max_request_mb=0.5))), token)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    gallery = small_gallery(tmp_path_factory.mktemp("colors"))
    codes = np.unique(gallery.classes, return_inverse=True)[1]
    calibration = calibrate(gallery.embeddings, codes, far=0.2, distance="euclidean")
    return Demo(gallery, embed, "models/colors", calibration)


@pytest.fixture(scope="module")
def client(demo):
    return TestClient(application_of(demo), "http://localhost:8765", raise_server_exceptions=False)


def results(answer):
    """The part of a page with the neighbors."""
    return answer.text.partition('id="results"')[2].partition("</section>")[0]


def test_an_upload_finds_its_neighbors_with_class_distance_and_threshold(client, demo):
    answer = client.post("/?k=6", content=encoded((250, 0, 0), kind="JPEG"))
    text = results(answer)
    assert answer.status_code == 200
    assert text.count("<li") == 6
    assert text.count('class="same"') == text.count("within the threshold</p>") == 4
    assert "Found: red, within" in text
    assert f"{demo.calibration.threshold:.4g}" in text
    assert EVIL not in answer.text
    far = results(client.post("/", content=encoded((255, 255, 255))))
    assert f"Nobody within {demo.calibration.threshold:.4g}" in far
    assert 'class="same"' not in far
    undecided = TestClient(application_of(Demo(demo.gallery, embed)), "http://localhost")
    assert "no calibrated threshold" in results(undecided.post("/", content=encoded((250, 0, 0))))


def test_words_find_images_and_no_threshold_of_images_judges_them(client, demo):
    words = dataclasses.replace(
        demo, embed_texts=lambda texts: np.array([embed(encoded(COLORS[t])) for t in texts])
    )
    page = TestClient(application_of(words), "http://localhost")
    text = results(page.get("/?text=red&k=3"))
    assert text.count("<li") == text.count('<p class="class">red</p>') == 3
    assert "The nearest images to these words" in text
    assert "threshold" not in text
    assert 'name="text"' in page.get("/").text
    assert 'name="text"' not in client.get("/").text
    refused = client.get("/?text=red")
    assert refused.status_code == 400
    assert "models/colors embeds images alone" in refused.text


def test_a_click_searches_by_an_image_without_itself(client, demo):
    rows = [row for row, _ in demo.gallery.search(demo.gallery.embeddings[4], 3, 4)]
    assert 4 not in rows
    text = results(client.get("/?row=4&k=3&first=6"))
    assert [text.index(f'src="/image/{row}"') for row in rows] == sorted(
        text.index(f'src="/image/{row}"') for row in rows
    )
    assert 'href="/?row=0&amp;k=3&amp;first=6"' not in text
    assert "images 7 to 12 of 12" in client.get("/?first=6").text
    assert client.get("/image/11").headers["content-type"] == "image/jpeg"


def test_what_is_no_image_is_refused(client):
    for body, status in (
        (b"", 400),
        (b"<svg onload=alert(1)>", 400),
        (encoded((1, 2, 3))[:-20], 400),
        (png(40_000, 40_000, pixels=b""), 400),
        (png(40, 40, pixels=b""), 400),
        (b"x" * 2**20, 413),
    ):
        answer = client.post("/", content=body)
        assert (answer.status_code, "<svg" in answer.text) == (status, False)


def test_numbers_that_are_none_are_refused(client):
    for number in ("-1", "x", "1.5", "201", "²", "9" * 5000):
        for name in ("k", "first", "row"):
            assert client.get("/", params={name: number}).status_code == 400, (name, number)
        assert client.get(f"/image/{number}").status_code == 404


def test_pages_from_elsewhere_are_refused_and_nothing_of_elsewhere_is_loaded(client):
    for site in ("cross-site", "same-site"):
        assert (
            client.post(
                "/", content=encoded((1, 2, 3)), headers={"sec-fetch-site": site}
            ).status_code
            == 403
        )
    for path in (
        "/",
        "/files/search.js",
        "/files/search.css",
        "/files/page.css",
        "/image/0",
        "/image/99",
    ):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]


def test_another_host_needs_the_token(demo):
    def client():
        return TestClient(application_of(demo, "secret"), "http://10.1.2.3:8765")

    for asked in (
        {},
        {"params": {"token": "secre"}},
        {"params": {"token": "sécret"}},
        {"cookies": {"tfdml_token": "x"}},
    ):
        assert client().get("/image/0", **asked).status_code == 401
    visitor = client()
    assert visitor.get("/?token=secret", follow_redirects=False).headers["location"] == "/"
    assert visitor.get("/image/0").status_code == 200
