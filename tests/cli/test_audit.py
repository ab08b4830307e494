"""`tfdml audit`: the files that it writes, of images and of embeddings alone."""

import csv

import numpy as np
from PIL import Image

from tests.report.pages import check_page
from tfdml.data.transforms import EvaluationTransform

HOSTILE = "=a<img src=x onerror=alert(1)>.png"


def rows_of(path):
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def test_images_are_audited_and_names_are_text(commands, tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    pictures = rng.integers(0, 256, (6, 12, 12, 3), np.uint8)
    pictures[5] = pictures[0]
    names = [HOSTILE, *(f"{row}.png" for row in range(1, 6))]
    for name, picture in zip(names, pictures, strict=True):
        Image.fromarray(picture).resize((48, 48)).save(tmp_path / "photos" / name)
    vectors = rng.normal(size=(6, 8))
    vectors[5] = vectors[0] + 0.2
    np.savez(
        tmp_path / "x.npz", embeddings=vectors, labels=[*["<b>cat"] * 3, *["dog"] * 3], names=names
    )
    flags = [f"--embeddings={tmp_path / 'x.npz'}", f"--out={tmp_path / 'out'}"]
    status, said, errors = commands.run("audit", *flags, f"--data_dir={tmp_path / 'photos'}")
    assert status == 0, errors
    assert "1 group of near-duplicates, 1 across classes" in said
    found = rows_of(tmp_path / "out" / "audit.csv")
    assert {row["image"] for row in found[:2]} == {"'" + HOSTILE, "5.png"}
    assert [(row["action"], row["across"], row["score"]) for row in found[:2]] == [
        ("keep", "class", "1.0000"),
        ("drop", "class", "1.0000"),
    ]
    assert sorted((row["class"], row["other_class"]) for row in found[:2]) == [
        ("<b>cat", "dog"),
        ("dog", "<b>cat"),
    ]
    assert len(rows_of(tmp_path / "out" / "images.csv")) == 6
    page = (tmp_path / "out" / "audit.html").read_text(encoding="utf-8")
    check_page(page)
    assert "<img src=x" not in page
    assert "<b>cat" not in page
    assert page.count("data:image/jpeg") >= 4
    # What is there is not written again.
    assert commands.run("audit", *flags, f"--data_dir={tmp_path / 'photos'}")[0] == 2

    without = commands.run("audit", flags[0], f"--out={tmp_path / 'other'}")
    assert "0 groups of near-duplicates" in without[1]
    assert (
        commands.run("audit", flags[0], f"--out={tmp_path / 'third'}", f"--data_dir={tmp_path}")[0]
        == 2
    )


def test_networks_and_views_are_those_of_training(commands, tmp_path, monkeypatch, caplog):
    for name in ("cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 10), (90, 10 * len(name), 0)).save(tmp_path / "photos" / name)
    embedded = []

    def embed(embedder, batches):
        embedded.append((embedder.backbone.output_shape[-1], *batches))
        return np.eye(4)[:2]

    monkeypatch.setattr(
        "tfdml.data.pipeline.evaluation_batches", lambda part, view, size: (view, len(part))
    )
    monkeypatch.setattr("tfdml.embeddings.embed", embed)
    data = "--dataset=folder", f"--data_dir={tmp_path / 'photos'}", f"--out={tmp_path / 'out'}"
    network = "--backbone=conv4(width=4)", "--weights=none", "--image_size=16", "--resize=18"
    status, _, errors = commands.run(
        "audit", *data, *network, "--resize_mode=pad", "--pad_color=white"
    )
    assert status == 0, errors
    assert embedded == [(4, EvaluationTransform(18, 16, "pad", (255, 255, 255)), 2)] * 2
    assert "--weights=none: the network is random" in caplog.text
