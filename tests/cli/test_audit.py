"""`tfdml audit`: the files that it writes, of images and of embeddings alone."""

import csv

import numpy as np
from PIL import Image

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
    np.savez(tmp_path / "x.npz", embeddings=vectors, labels=[0, 0, 0, 1, 1, 1], names=names)
    flags = [f"--embeddings={tmp_path / 'x.npz'}", "--pick=2", f"--out={tmp_path / 'out'}"]
    status, said, errors = commands.run("audit", *flags, f"--data_dir={tmp_path / 'photos'}")
    assert status == 0, errors
    assert "1 groups of near-duplicates, 1 across classes, 0 across the split\n" in said
    found = rows_of(tmp_path / "out" / "audit.csv")
    assert {row["image"] for row in found[:2]} == {"'" + HOSTILE, "5.png"}
    assert [(row["action"], row["across"], row["score"]) for row in found[:2]] == [
        ("keep", "class", "1.0000"),
        ("drop", "class", "1.0000"),
    ]
    assert len(rows_of(tmp_path / "out" / "images.csv")) == 6
    assert len(rows_of(tmp_path / "out" / "picks.csv")) == 2
    page = (tmp_path / "out" / "audit.html").read_text(encoding="utf-8")
    assert "<img src=x" not in page
    assert "=a&lt;img src=x onerror=alert(1)&gt;.png" in page
    assert page.count("data:image/jpeg") >= 4
    # An edited file is not written again, and another command's folder is refused.
    (tmp_path / "out" / "audit.csv").write_text("mine")
    assert "is finished already" in commands.run("audit", *flags, f"--data_dir={tmp_path / 'photos'}")[1]
    assert (tmp_path / "out" / "audit.csv").read_text() == "mine"
    assert "was begun with something else" in commands.run("audit", *flags[::2])[2]

    without = commands.run("audit", flags[0], f"--out={tmp_path / 'other'}")
    assert "0 groups of near-duplicates, 0 across classes, 0 across the split, by distance alone" in without[1]
    assert "no images were compared" in (tmp_path / "other" / "audit.html").read_text(encoding="utf-8")
    gone = commands.run("audit", flags[0], f"--out={tmp_path / 'third'}", f"--data_dir={tmp_path}")
    assert gone[0] == 2
    assert "cannot be read as an image" in gone[2]


def test_wrong_commands_are_refused_before_any_work(commands, tmp_path):
    out = f"--out={tmp_path / 'out'}"
    for flags, message in (
        ([], "--out is missing"),
        ([out], "--dataset is missing"),
        (["--embeddings=x.npz", "--model=y", out], "name one of them"),
        (["--embeddings=none.npz", out], "none.npz cannot be read as .npz: No such file"),
        (["--embeddings=x.npz", "--backbone=resnet50", out], "--backbone=resnet50 has no effect"),
    ):
        status, _, errors = commands.run("audit", *flags)
        assert status == 2
        assert message in errors
