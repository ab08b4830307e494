"""`tfdml demo`: what it opens and serves, and one clear line for what is wrong."""

import json

import numpy as np
import pytest

from tests.cli.commands import write_embedder, write_noise
from tfdml.evaluation import calibrate

pytest.importorskip("starlette")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of 4 dimensions, photos in two class folders, embeddings of 4 and of 5 dimensions,
    and a threshold."""
    folder = tmp_path_factory.mktemp("demo")
    rng = np.random.default_rng(0)
    write_noise(folder / "photos", "ab", 6)
    write_embedder(folder / "model.keras")
    for dimensions in (4, 5):
        np.savez(
            folder / f"{dimensions}.npz",
            embeddings=rng.normal(size=(8, dimensions)),
            labels=np.arange(8) // 4,
        )
    labels = np.repeat(np.arange(6), 4)
    calibration = calibrate(rng.normal(size=(24, 4)), labels, fpir=0.2)
    (folder / "threshold.json").write_text(json.dumps({"calibration": calibration.to_dict()}))
    return folder


@pytest.fixture
def served(monkeypatch):
    """What is served, in place of a server: the demo, its address, and what is printed."""
    from tfdml.web import page, server

    demos, served = [], []
    page_routes = page.page_routes

    def routes(demo, lanes):
        demos.append(demo)
        return page_routes(demo, lanes)

    def serve(app, opened, announcement, lanes):
        served.append((demos[-1], opened.getsockname(), announcement))

    monkeypatch.setattr(page, "page_routes", routes)
    monkeypatch.setattr(server, "serve", serve)
    return served


@pytest.mark.slow
def test_a_folder_of_images_is_embedded_and_served(commands, folder, served):
    flags = [f"--model={folder}/model.keras", f"--gallery={folder}/photos", "--host=0.0.0.0"]
    status, printed, errors = commands.run(
        "demo", *flags, f"--calibration={folder}/threshold.json", "--port=0"
    )
    assert status == 0, errors
    assert printed.startswith("loading ")
    assert "embedding 12 images" in printed
    demo, (host, _), announcement = served[0]
    assert (len(demo.gallery), host) == (12, "0.0.0.0")
    assert len(announcement.partition("/?token=")[2]) >= 32
    assert demo.calibration.basis.images == 24
    image = (folder / "photos" / "b" / "3.png").read_bytes()
    (nearest,) = demo.neighbors(image, 1)
    assert (demo.gallery.names[nearest.row], nearest.is_accepted) == ("b/3.png", True)


def test_this_machine_needs_no_token_and_another_dimension_is_refused(commands, folder, served):
    flags = [f"--model={folder}/model.keras", f"--gallery={folder}/4.npz", "--port=0"]
    status, _, errors = commands.run("demo", *flags)
    assert status == 0, errors
    _, (host, port), announcement = served.pop()
    assert host == "127.0.0.1"
    assert announcement == f"8 images at http://127.0.0.1:{port}/ (Ctrl-C ends the demo)"
    status, _, errors = commands.run("demo", *flags, f"--gallery={folder}/5.npz")
    assert (status, "dimension" in errors, served) == (2, True, []), errors


def test_a_threshold_of_other_models_is_refused(commands, folder, served):
    labels = np.repeat(np.arange(6), 4)
    vectors = np.random.default_rng(0).normal(size=(24, 4))
    two = calibrate(vectors, labels, fpir=0.2).measured_on(model="sha256:1", gallery_model="old")
    (folder / "two.json").write_text(json.dumps({"calibration": two.to_dict()}))
    flags = [f"--model={folder}/model.keras", f"--gallery={folder}/photos", "--port=0"]
    status, _, errors = commands.run("demo", *flags, f"--calibration={folder}/two.json")
    assert (status, served) == (2, []), errors
    assert "the threshold is of" in errors
