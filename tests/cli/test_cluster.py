"""`tfdml cluster`: a list that `tfdml train` reads, known classes first, and one line for what is
wrong."""

import csv
import json
import re

import numpy as np
import pytest

from tfdml.evaluation import calibrate


def points_of(classes, seed):
    """Vectors near one axis for each class, and the numbers of the classes."""
    numbers = np.repeat(classes, 8)
    noise = np.random.default_rng(seed).normal(size=(len(numbers), 24))
    return np.eye(24)[numbers] + 0.08 * noise, numbers


@pytest.fixture
def folder(tmp_path):
    """Known classes 0 to 7, held-out classes 8 to 15, and new images of 0, 1 and 16 to 19, one of
    which is like no other."""
    for name, classes, seed in (("known", range(8), 0), ("held_out", range(8, 16), 1)):
        vectors, numbers = points_of(list(classes), seed)
        paths = [f"{name}/{row}.jpg" for row in range(len(numbers))]
        names = [f"c{number:02}" for number in numbers]
        np.savez(tmp_path / f"{name}.npz", embedding=vectors, path=paths, **{"class": names})
    vectors, numbers = points_of([0, 1, 16, 17, 18, 19], 2)
    vectors = np.concatenate([vectors, np.eye(24)[23:]])
    paths = [f"new/{row}.jpg" for row in range(len(vectors))]
    np.savez(tmp_path / "new.npz", embedding=vectors, path=paths, labels=[*numbers, 23])
    known = np.load(tmp_path / "known.npz")
    held_out = np.load(tmp_path / "held_out.npz")
    calibration = calibrate(
        np.concatenate([known["embedding"] + 0.01, held_out["embedding"]]),
        np.concatenate([known["class"], held_out["class"]]),
        fpir=0.05,
        gallery=known["embedding"],
        gallery_labels=known["class"],
    )
    text = json.dumps({"calibration": calibration.to_dict()})
    (tmp_path / "threshold.json").write_text(text)
    return tmp_path


def cluster(commands, folder, *flags):
    sides = f"--embeddings={folder}/new.npz", f"--held_out={folder}/held_out.npz"
    return commands.run("cluster", *sides, f"--out={folder}/groups.csv", *flags)


def labels_of(folder):
    with open(folder / "groups.csv", encoding="utf-8-sig") as file:
        return {row["path"]: row["label"] for row in csv.DictReader(file)}


def test_new_images_join_known_classes_first_and_groups_second(commands, folder):
    known = f"--gallery={folder}/known.npz", f"--max_distance={folder}/threshold.json"
    status, output, errors = cluster(commands, folder, *known, "--prefix=new-")
    assert status == 0, errors
    assert "16 of 49 images are of known classes" in output
    assert "4 groups of 32 images, 1 image alone" in output
    assert "left out: 1 image in groups of fewer than 2" in output
    assert "ari             100.0 %" in output
    labels = labels_of(folder)
    wanted = ["c00", "c01", "new-0001", "new-0002", "new-0003", "new-0004"]
    assert list(labels.values()) == np.repeat(wanted, 8).tolist()
    assert list(labels) == [f"new/{row}.jpg" for row in range(48)]


def test_the_list_is_one_that_training_reads(commands, folder):
    from tfdml.data import load

    (folder / "new").mkdir()
    for row in range(49):
        (folder / "new" / f"{row}.jpg").write_bytes(b"")
    status, _, errors = cluster(commands, folder, "--min_images=1", "--expected_classes=6")
    assert status == 0, errors
    train, test = (load("list", str(folder / "groups.csv"), split) for split in ("train", "test"))
    assert [len(train), len(test)] == [24, 25]
    assert {*train.class_names.values()} == {"group-0001", "group-0002", "group-0003"}


def test_what_is_wrong_is_one_line(commands, folder):
    with np.load(folder / "new.npz") as stored:
        columns = dict(stored)
    np.savez(folder / "nameless.npz", embedding=columns["embedding"])
    np.savez(folder / "shared.npz", **columns)
    known = f"--gallery={folder}/known.npz"
    cases = {
        "--embeddings=.*no column path": [f"--embeddings={folder}/nameless.npz"],
        "--held_out=.*has no labels": [f"--held_out={folder}/nameless.npz"],
        "49 of its images are among those to group": [f"--held_out={folder}/shared.npz"],
        "--max_distance: is missing": [f"--gallery={folder}/known.npz"],
        "write a number, calibrated, or a JSON file": [
            f"--gallery={folder}/known.npz",
            "--max_distance=near",
        ],
        "--max_distance=1: has no effect": ["--max_distance=1"],
        "--max_distance=-1: no euclidean distance is below 0": [known, "--max_distance=-1"],
        "--max_distance=calibrated: the gallery has no threshold": [
            known,
            "--max_distance=calibrated",
        ],
        "name a file as": [f"--out={folder}/groups.txt"],
    }
    for message, flags in cases.items():
        status, _, errors = cluster(commands, folder, *flags)
        assert status == 2, flags
        assert len(errors.strip().splitlines()) == 1, errors
        assert re.search(message, errors), errors
    assert not (folder / "groups.csv").exists()
