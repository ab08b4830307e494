"""Embedding over Ray: every readable image once, whatever was killed meanwhile."""

import contextlib
import csv
import functools
import json
import os
import signal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.export import models_on_disk
from tests.support.processes import ROOT, descendants, run_python
from tfdml.cluster.bulk_embedding import PartEmbedder, embed_parts
from tfdml.cluster.ray_session import ray_session
from tfdml.data import FileImages, ImageDataset
from tfdml.embeddings import backends, read_embeddings
from tfdml.embeddings.files import EmbeddingFolder
from tfdml.embeddings.passes import EmbeddingPass, images_of
from tfdml.errors import UserError

pytest.importorskip("ray", reason="pip install 'tfdml[ray]'")
COUNT, BROKEN, MISSING = 23, (4, 17), 9


def test_a_list_gives_paths_labels_and_roles(tmp_path):
    rows = {
        "path": ["a.jpg", "/data/b.jpg", "s3://bucket/c d.jpg", "a.jpg"],
        "label": ["oak", "ash", "oak", "elm"],
        "split": ["test", "test", "test", "train"],
        "role": ["query", "gallery", "gallery", ""],
    }
    pq.write_table(pa.table({**rows, "width": [1, 2, 3, 4]}), tmp_path / "list.parquet")
    images = images_of(str(tmp_path / "list.parquet"))
    assert images.names == (
        f"{tmp_path}/a.jpg",
        "/data/b.jpg",
        "s3://bucket/c d.jpg",
        f"{tmp_path}/a.jpg",
    )
    assert (list(images.labels), list(images.classes)) == ([2, 0, 2, 1], rows["label"])
    assert list(images.roles) == ["query", "gallery", "gallery", "train"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return models_on_disk.make(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A list of images, of which two cannot be decoded and one is not there; and the vectors of the
    others."""
    folder = tmp_path_factory.mktemp("photos")
    images = models_on_disk.pictures().images
    rows = [["path", "label", "split"]]
    for number in range(COUNT):
        path = folder / f"{number:02d}.jpg"
        data = images.encoded(number % len(images))
        if number != MISSING:
            path.write_bytes(data[: len(data) // 2] if number in BROKEN else data)
        rows.append([path.name, f"class {number % 5}", "test"])
    with open(folder / "list.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder


@pytest.fixture(scope="module")
def session():
    with ray_session("local", cpus=2, object_store_bytes=2**27) as ray:
        yield ray


def run(
    models,
    photos,
    out,
    form="litert",
    stop_after=None,
    progress=lambda *_: None,
    sizes=(4, 5),
    **cluster,
):
    """Embed what is missing, in this process or over Ray; stopped after some parts as by a kill.

    Returns the manifest, and whether there was something to do.
    """
    model = str(getattr(models, form))
    images = images_of(str(photos / "list.csv"))
    dataset = ImageDataset(
        "input", "all", FileImages(images.names), np.zeros(len(images), np.int64)
    )
    work = EmbeddingPass([dataset], images, *sizes, skip_bad=True)
    folder = EmbeddingFolder(str(out), work.identity(backends.load_backend(model)))
    worker = PartEmbedder(model, 0, folder)

    def here(parts):
        for number, part in enumerate(parts):
            if number == stop_after:
                raise KeyboardInterrupt
            yield worker.embed(part)

    over_ray = functools.partial(embed_parts, model=model, folder=folder, **cluster)
    worked = None
    with contextlib.suppress(KeyboardInterrupt):
        worked = work.run(folder, over_ray if cluster else here, {}, progress)
    return folder.manifest, worked


def good():
    return [number for number in range(COUNT) if number not in (*BROKEN, MISSING)]


@pytest.mark.slow
def test_each_readable_image_has_its_vector(models, photos, tmp_path):
    manifest, _ = run(models, photos, tmp_path / "out", "keras")
    stored = read_embeddings(tmp_path / "out")
    expected = backends.load_backend(str(models.keras)).embed(models_on_disk.pictures(), 4)
    np.testing.assert_allclose(
        stored.embeddings, expected[[n % len(expected) for n in good()]], atol=1e-5
    )
    assert stored.labels.tolist() == [number % 5 for number in good()]
    assert set(stored.roles.tolist()) == {"test"}
    assert stored.names == tuple(f"{photos}/{number:02d}.jpg" for number in good())
    assert (manifest["count"], manifest["bad_images"]) == (COUNT - 3, 3)
    with open(tmp_path / "out" / "bad_images.csv", newline="") as file:
        bad = list(csv.DictReader(file))
    assert [int(row["id"]) for row in bad] == sorted([*BROKEN, MISSING])
    assert all(row["reason"] for row in bad)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *manifest["files"],
        "manifest.json",
    }


@pytest.mark.slow
def test_stopped_and_continued_does_nothing_twice(models, photos, tmp_path):
    whole, _ = run(models, photos, tmp_path / "whole")
    run(models, photos, tmp_path / "broken", stop_after=2)
    with pytest.raises(UserError, match="unfinished"):
        read_embeddings(tmp_path / "broken")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "broken").glob("part-*")}
    assert len(before) == 2
    assert run(models, photos, tmp_path / "broken")[0]["files"] == whole["files"]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    for name in whole["files"]:
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_part_or_a_set_of_bad_images_alone(models, photos, tmp_path):
    """A part leaves no file; of a set it is an error."""
    rows = ["path", *(f"{photos}/{number:02d}.jpg" for number in (*BROKEN, *good()[:3]))]
    (tmp_path / "list.csv").write_text("\n".join(rows))
    manifest, _ = run(models, tmp_path, tmp_path / "some", sizes=(2, 2))
    assert (manifest["count"], manifest["bad_images"]) == (3, 2)
    assert {path.name for path in (tmp_path / "some").glob("part-*")} == {
        "part-000001.parquet",
        "part-000002.parquet",
    }
    (tmp_path / "a.jpg").write_bytes(b"")
    (tmp_path / "list.csv").write_text("path\na.jpg")
    with pytest.raises(UserError, match=r"a\.jpg"):
        run(models, tmp_path, tmp_path / "out")


def test_a_worker_truncates_and_says_that_it_does_not_see_the_folder(models, tmp_path):
    worker = PartEmbedder(str(models.litert), 2, EmbeddingFolder(tmp_path / "unseen", {}))
    assert worker.backend.embed(models_on_disk.pictures(), 4).shape[1] == 2
    with pytest.raises(UserError, match="does not see it"):
        worker.embed(None)


@pytest.mark.slow
@pytest.mark.usefixtures("session")
def test_over_ray_it_is_what_one_process_writes(models, photos, tmp_path):
    """Two actors; begun by an earlier process; a part's actor is killed on the way; then finished
    already."""
    whole, _ = run(models, photos, tmp_path / "whole", "saved_model")
    seen = []

    def progress(done, bad, total):
        seen.append((done, bad, total))
        if len(seen) == 2:
            os.kill(descendants("PartEmbedder")[0], signal.SIGKILL)

    options = {"form": "saved_model", "cluster": "local"}
    manifest, worked = run(models, photos, tmp_path / "out", progress=progress, actors=2, **options)
    assert worked
    assert manifest["files"] == whole["files"]
    assert (seen[0], seen[-1]) == ((0, 0, COUNT), (COUNT, 3, COUNT))
    assert run(models, photos, tmp_path / "out", **options)[1] is False
    with pytest.raises(UserError, match="actors=3"):
        run(models, photos, tmp_path / "many", actors=3, **options)


@pytest.mark.slow
def test_the_command_embeds_on_a_ray_of_its_own(models, photos, tmp_path):
    flags = [
        f"--model={models.saved_model}",
        "--cluster=local",
        f"--input={photos}/list.csv",
        "--actors=1",
    ]
    run_python(ROOT / "bin" / "embed", *flags, f"--out={tmp_path / 'out'}")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["count"] == 20
