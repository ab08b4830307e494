"""The web application: what it answers, and each request that it refuses, with one line."""

import socket
import threading

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from starlette.testclient import TestClient

from tests.data.preparations import png
from tests.demo.pages import EVIL, embed, encoded, small_gallery
from tfdml.demo import Demo, application, serve
from tfdml.errors import UserError
from tfdml.evaluation import calibrate


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    gallery = small_gallery(tmp_path_factory.mktemp("colors"))
    calibration = calibrate(gallery.embeddings, gallery.columns["class"].codes, far=0.2, distance="euclidean")
    return Demo(gallery, embed, "models/colors", {"recall@1": 0.75}, calibration)


@pytest.fixture(scope="module")
def client(demo):
    return TestClient(application(demo), "http://localhost:8765", raise_server_exceptions=False)


def search(client, **asked):
    return client.post("/api/search", json=asked)


def test_an_image_is_searched_by(client, demo):
    answer = client.post("/api/embed", content=encoded((250, 0, 0), kind="JPEG"))
    neighbors = search(client, positives=[answer.json()], k=6).json()["neighbors"]
    assert [image["attributes"]["class"] == "red" for image in neighbors] == [True] * 4 + [False] * 2
    assert [image["same"] for image in neighbors] == [True] * 4 + [False] * 2
    assert neighbors[3]["name"] == EVIL
    assert client.get("/image/11").headers["content-type"] == "image/jpeg"
    about = client.get("/api/about").json()
    assert about["columns"] == {"class": ["blue", "green", "red"], "parity": ["0", "1"]}
    assert about["calibration"]["far"] == pytest.approx(list(demo.calibration.far))


def test_examples_filters_and_rows(client):
    near = search(client, positives=[{"row": 4}], k=3, where={"parity": "1"}).json()["neighbors"]
    assert [image["name"] for image in near] == ["green1.png", "green3.png", "blue3.png"]
    # Between red and blue; away from blue.
    mixed = [{"vector": [0.6, 0, 0.55]}]
    blue = [{"row": row} for row in range(4)]
    assert search(client, positives=mixed, k=1).json()["neighbors"][0]["attributes"]["class"] == "red"
    pushed = search(client, positives=[{"row": 8}, {"row": 0}], negatives=blue[1:], k=9).json()["neighbors"]
    assert pushed[0]["attributes"]["class"] == "red"
    assert not {image["row"] for image in pushed} & {0, 1, 2, 3, 8}
    listed = client.get("/api/rows?class=red&start=1&count=2").json()
    assert (listed["total"], [image["row"] for image in listed["images"]]) == (4, [9, 10])
    assert [image["row"] for image in client.get("/api/rows?rows=7,2").json()["images"]] == [7, 2]
    codes = np.frombuffer(client.get("/api/codes/parity?class=green").content, "<i4")
    assert codes.tolist() == [-1] * 4 + [0, 1] * 2 + [-1] * 4


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 415, "empty file"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 415, "not a JPEG, PNG or WebP"),
        (encoded((1, 2, 3))[:-20], 415, "truncated"),
        (png(40_000, 40_000, pixels=b""), 415, "pixels"),
        (png(40, 40, pixels=b""), 400, "decode"),
        (b"x" * (20 * 2**20 + 1), 413, "larger than the limit of 20 MB"),
    ],
    ids=["empty", "svg", "truncated", "bomb", "damaged", "large"],
)
def test_what_is_no_image_is_refused(client, body, status, says):
    answer = client.post("/api/embed", content=body)
    assert answer.status_code == status
    assert says in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ([], "a search has positives"),
        ({"positives": [{"row": 0}], "limit": 3}, "a search has positives"),
        ({"positives": []}, "at least one"),
        ({"positives": "0"}, "list of at most 64"),
        ({"positives": [{"row": 0}] * 65}, "list of at most 64"),
        ({"positives": [0]}, "object with a row"),
        ({"positives": [{"path": "/etc/passwd"}]}, "object with a row"),
        ({"positives": [{"row": 12}]}, "there is no image 12"),
        ({"positives": [{"row": -1}]}, "row"),
        ({"positives": [{"row": "0"}]}, "row"),
        ({"positives": [{"row": True}]}, "row"),
        ({"positives": [{"vector": [1, 0]}]}, "3 numbers"),
        ({"positives": [{"vector": [1, 0, None]}]}, "vector of numbers"),
        ({"positives": [{"vector": [1, 0, 1e300]}]}, "infinite"),
        ({"positives": [{"row": 0}], "k": -1}, "k"),
        ({"positives": [{"row": 0}], "k": 201}, "k"),
        ({"positives": [{"row": 0}], "where": {"size": "3"}}, "no attribute 'size'"),
        ({"positives": [{"row": 0}], "where": {"class": 3}}, "a text for each"),
        ({"positives": [{"row": 0}], "where": "class"}, "a text for each"),
    ],
)
def test_searches_that_mean_nothing_are_refused(client, asked, says):
    answer = search(client, **asked) if isinstance(asked, dict) else client.post("/api/search", json=asked)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/image/12", 404),
        ("GET", "/image/-1", 404),
        ("GET", "/image/..%2f..%2fetc%2fpasswd", 404),
        ("GET", "/../demo.js.map", 404),
        ("GET", "/api/rows?start=-1", 400),
        ("GET", "/api/rows?count=x", 400),
        ("GET", "/api/rows?rows=99", 400),
        ("GET", "/api/rows?size=3", 400),
        ("GET", "/api/codes/size", 404),
        ("GET", "/api/map", 404),
        ("GET", "/api/search", 405),
        ("POST", "/api/about", 405),
    ],
)
def test_addresses_that_are_none_are_refused(client, method, path, status):
    answer = client.request(method, path)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]


def test_json_that_is_none_is_refused(client):
    for body in (b"", b"{", b"\xff", b"[" * 100_000):
        answer = client.post("/api/search", content=body)
        assert (answer.status_code, list(answer.json())) == (400, ["error"])
    assert client.post("/api/search", content=b" " * 2_000_000).status_code == 413


def test_heat_maps_of_a_row_and_of_an_upload(client, demo):
    assert "only a Keras embedder" in client.post("/api/why?row=0&query=1").json()["error"]
    explaining = Demo(demo.gallery, embed, explain=lambda first, second: first + b" and " + second)
    client = TestClient(application(explaining), "http://localhost")
    files = [demo.gallery.encoded(row) for row in (0, 5)]
    assert client.post("/api/why?row=0&query=5").content == files[1] + b" and " + files[0]
    assert client.post("/api/why?row=5", content=files[0]).content == files[0] + b" and " + files[1]
    wrong = {"row=x": 400, "query=1": 400, "row=99&query=1": 400, "row=1&query=-1": 400, "row=1": 415}
    for path, status in wrong.items():
        answer = client.post(f"/api/why?{path}")
        assert (answer.status_code, list(answer.json())) == (status, ["error"])


def test_a_failure_shows_no_trace(demo):
    def broken(data):
        raise RuntimeError("the inside of the model")

    failing = Demo(demo.gallery, broken)
    client = TestClient(application(failing), "http://localhost", raise_server_exceptions=False)
    answer = client.post("/api/embed", content=encoded((1, 2, 3)))
    assert answer.status_code == 500
    assert "inside" not in answer.text
    assert client.get("/api/about").status_code == 200


def test_pages_from_elsewhere_are_refused(client, demo):
    assert client.get("/", headers={"host": "evil.example"}).status_code == 421
    assert client.get("/", headers={"host": "localhost.evil.example:8765"}).status_code == 421
    for host in ("127.0.0.1:8765", "localhost", "[::1]:8765"):
        assert client.get("/", headers={"host": host}).status_code == 200
    for headers in ({"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        answer = client.post("/api/search", json={"positives": [{"row": 0}]}, headers=headers)
        assert (answer.status_code, list(answer.json())) == (403, ["error"])
    same = {"origin": "http://localhost:8765", "sec-fetch-site": "same-origin"}
    assert client.post("/api/search", json={"positives": [{"row": 0}]}, headers=same).status_code == 200
    for path in ("/", "/demo.js", "/demo.css", "/page.css", "/image/0", "/image/99", "/api/about"):
        answer = client.get(path)
        assert answer.status_code == (404 if path == "/image/99" else 200)
        headers = answer.headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]


def test_another_host_needs_the_token(demo):
    def client():
        return TestClient(application(demo, "0.0.0.0", "secret"), "http://10.1.2.3:8765")

    for asked in (
        {},
        {"params": {"token": "secre"}},
        {"params": {"token": "sécret"}},
        {"cookies": {"tfdml_demo": "x"}},
    ):
        assert client().get("/api/about", **asked).status_code == 401
    assert client().get("/image/0").status_code == 401
    assert client().get("/api/about", headers={"authorization": "Bearer secret"}).status_code == 200
    visitor = client()
    assert visitor.get("/?token=secret", follow_redirects=False).headers["location"] == "/"
    assert visitor.get("/api/about").status_code == 200


def test_a_full_queue_is_refused(demo):
    """The model takes one image at a time; eight wait, and the others are sent away."""
    go = threading.Event()
    at_once, most = [], []

    def slow(data):
        at_once.append(1)
        most.append(len(at_once))
        go.wait(10)
        at_once.pop()
        return np.ones(3)

    answers = []
    with TestClient(application(Demo(demo.gallery, slow)), "http://localhost") as client:

        def ask():
            answers.append(client.post("/api/embed", content=encoded((1, 2, 3))))
            if len(answers) == 3:  # of the twelve, while the others wait
                go.set()

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [answer.status_code for answer in answers] == [503] * 3 + [200] * 9
    assert "too many requests" in answers[0].json()["error"]
    assert max(most) == 1


def test_a_taken_port_is_one_line(demo):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match=r"`port=\d+` of 127.0.0.1"):
        serve(demo, "127.0.0.1", taken.getsockname()[1], "")
