"""Images, models, embeddings and results behind URLs, in an S3 server."""

import io
import json
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.export import models_on_disk
from tests.support.processes import run_python
from tfdml.data import EvaluationTransform, ImageDataset, evaluation_batches
from tfdml.data.images import FileImages
from tfdml.data.pipeline import readable_views
from tfdml.embeddings.passes import images_of
from tfdml.errors import UserError
from tfdml.io import files

RUN = "s3://photos/runs/cars"
KEYS = ["a/0.jpg", "a/b/1 %20#.jpg", "a/b/2.jpg", "c/3.jpg", "a/note.txt"]


@pytest.mark.slow
def test_images_are_listed_and_read(s3):
    objects = {
        key: models_on_disk.pictures().images.encoded(number) for number, key in enumerate(KEYS)
    }
    objects["a/b/2.jpg"] = objects["a/b/2.jpg"][:100]
    objects["list.csv"] = b"path,label\na/0.jpg,x\ns3://photos/c/3.jpg,y\n"
    for key, data in objects.items():
        s3.put(key, data)
    paths = list(images_of("s3://photos/a/**/*.jpg").names)
    assert paths == ["s3://photos/a/0.jpg", "s3://photos/a/b/1 %20#.jpg", "s3://photos/a/b/2.jpg"]
    assert list(files.find("s3://photos/*/?.jpg")) == ["s3://photos/a/0.jpg", "s3://photos/c/3.jpg"]
    assert files.read_bytes(paths[1]) == objects[KEYS[1]]
    with pytest.raises(UserError, match="there is no folder"):
        list(files.find("s3://photos/nowhere/*.jpg"))
    images = FileImages((*paths, "s3://photos/missing.jpg"))
    transform = EvaluationTransform(**models_on_disk.VIEW)
    ((rows, views),) = readable_views(images, transform, 8)
    assert rows.tolist() == [0, 1]
    readable = ImageDataset("x", "test", images.take(rows), np.zeros(2, int), {0: ""})
    ((expected, _),) = evaluation_batches(readable, transform, 8)
    np.testing.assert_array_equal(views, expected.numpy())
    listed = images_of("s3://photos/list.csv")
    assert (listed.names, listed.labels.tolist()) == (
        ("s3://photos/a/0.jpg", "s3://photos/c/3.jpg"),
        [0, 1],
    )


def test_local_copies(s3, tmp_path):
    """Downloaded once and whole; files name the URL and not the copy."""
    addresses = (
        "s3://b/k",
        "memory://k",
        "http://h/v1",
        "lancedb:///data",
        "pgvector://h",
        "runs/cars",
    )
    assert [files.in_store(address) for address in addresses] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert files.local_copy("runs/cars") == "runs/cars"
    s3.put("runs/cars/flags.txt", b"--seed=1")
    s3.put("runs/cars/checkpoints/1.npz", b"1" * 1000)
    s3.put("runs/cars2/flags.txt", b"of another run")
    copy = Path(files.local_copy(f"{RUN}/"))
    assert sorted(path.name for path in copy.rglob("*")) == ["1.npz", "checkpoints", "flags.txt"]
    assert (copy / "checkpoints" / "1.npz").read_bytes() == b"1" * 1000
    assert Path(files.local_copy(f"{RUN}/flags.txt")).read_bytes() == b"--seed=1"
    s3.delete("runs/cars/flags.txt")
    assert (Path(files.local_copy(RUN)) / "flags.txt").exists()
    assert not os.path.exists(files.local_copy("s3://photos/none"))
    files.write_json(tmp_path / "card.json", {"model": str(copy)})
    assert f'"{RUN}"' in (tmp_path / "card.json").read_text()
    assert files.as_named(f"{copy}: no model") == f"{RUN}: no model"


@pytest.mark.parametrize(
    ("name", "message"), [("../../evil", "outside its folder"), ("half", "0 of 9 bytes")]
)
def test_what_leads_out_of_the_folder_or_comes_in_part_is_no_copy(name, message, monkeypatch):
    class Store:
        def find(self, there, detail):
            return {f"{there}/{name}": {"size": 9}}

        def get_file(self, there, target):
            Path(target).touch()

    monkeypatch.setattr(files, "filesystem_of", lambda url: (Store(), "photos/runs"))
    with pytest.raises(UserError, match=message):
        files.local_copy(f"s3://photos/{name}")


# What the commands below need of a run of a second.
TINY = [
    *(
        "--backbone=conv4(width=8)",
        "--batch_norm=train",
        "--image_size=28",
        "--resize=32",
        "--flip=false",
    ),
    *(
        "--embedding_dim=8",
        "--objectives=contrastive",
        "--classes_per_batch=4",
        "--images_per_class=2",
    ),
    *("--epochs=5", "--steps_per_epoch=5", "--checkpoint_steps=1", "--seed=3"),
]


@pytest.mark.slow
def test_data_and_models_are_read_from_the_store(s3, tmp_path):
    """Data, flags, embeddings, gallery and results lie in the bucket, and a copy of the run."""
    rows = ["path,label,split"]
    for number in range(48):
        label = number // 4
        path = tmp_path / "image.png"
        Image.fromarray(np.random.default_rng(number).integers(0, 255, (32, 32, 3), np.uint8)).save(
            path
        )
        s3.put(f"images/{number}.png", path.read_bytes())
        rows.append(f"images/{number}.png,{label},{'train' if label < 8 else 'test'}")
    s3.put("list.csv", "\n".join(rows).encode())
    data = ["--dataset=list", "--data_dir=s3://photos/list.csv"]

    def done(name, *flags):
        ended = run_python("-m", "tfdml", name, *flags)
        assert "/tfdml-" not in ended.stdout + ended.stderr  # no path of a copy
        return ended.stdout

    run, vectors, local = "s3://photos/runs/a", "s3://photos/vectors", tmp_path / "run"

    done("train", *TINY, *data, f"--run_dir={local}")
    for file in filter(Path.is_file, local.rglob("*")):
        s3.put(f"runs/a/{file.relative_to(local)}", file.read_bytes())
    done(
        "evaluate",
        f"--model={run}",
        "--json=s3://photos/metrics.json",
        "--report=s3://photos/reports/a.html",
    )
    measured = json.loads(s3.get("metrics.json"))
    assert measured["model"] == run
    trained = json.loads(s3.get("runs/a/result.json"))["metrics"]
    assert measured["recall@1"] == pytest.approx(trained["recall@1"])
    done("embed", f"--model={run}", f"--out={vectors}")
    assert "is finished already" in done("embed", f"--model={run}", f"--out={vectors}")
    assert json.loads(s3.get("vectors/manifest.json"))["model"]["source"].startswith(run)
    searched = (
        "--queries=s3://photos/images/4?.png",
        "--k=2",
        "--out=s3://photos/neighbors.parquet",
    )
    done("search", f"--gallery={vectors}", f"--model={run}", *searched)
    assert pq.read_table(io.BytesIO(s3.get("neighbors.parquet"))).num_rows == 16
