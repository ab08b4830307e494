"""Images behind URLs, read from a double of S3."""

import numpy as np
import pytest

from tests.export import models_on_disk
from tests.io import s3_double
from tfdml.cluster.bulk_embedding import images_of
from tfdml.data import EvaluationTransform, ImageDataset, evaluation_batches
from tfdml.data.images import FileImages
from tfdml.data.pipeline import readable_views
from tfdml.errors import UserError
from tfdml.io import files

pytest.importorskip("pyarrow", reason="pip install 'tfdml[ray]'")
KEYS = ["a/0.jpg", "a/b/1 %20#.jpg", "a/b/2.jpg", "c/3.jpg", "a/note.txt"]


@pytest.fixture
def bucket(monkeypatch):
    images = models_on_disk.pictures().images
    objects = {key: images.encoded(number) for number, key in enumerate(KEYS)}
    objects["a/b/2.jpg"] = objects["a/b/2.jpg"][:100]
    with s3_double.serving(objects) as address:
        for name, value in (
            ("AWS_ENDPOINT_URL", address),
            ("AWS_ACCESS_KEY_ID", "a"),
            ("AWS_SECRET_ACCESS_KEY", "b"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
            ("AWS_EC2_METADATA_DISABLED", "true"),
        ):
            monkeypatch.setenv(name, value)
        files._arrow.cache_clear()
        yield objects
        files._arrow.cache_clear()


def test_listed_and_read(bucket):
    found = images_of("s3://photos/a/**/*.jpg")["path"].to_pylist()
    assert found == ["s3://photos/a/0.jpg", "s3://photos/a/b/1 %20#.jpg", "s3://photos/a/b/2.jpg"]
    assert list(files.find("s3://photos/*/?.jpg")) == ["s3://photos/a/0.jpg", "s3://photos/c/3.jpg"]
    assert files.read_bytes(found[1]) == bucket[KEYS[1]]
    with pytest.raises(UserError, match="there is no folder"):
        list(files.find("s3://photos/nowhere/*.jpg"))
    images = FileImages((*found, "s3://photos/missing.jpg"))
    transform = EvaluationTransform(**models_on_disk.VIEW)
    ((rows, views),) = readable_views(images, transform, 8)
    assert rows.tolist() == [0, 1]
    kept = ImageDataset("x", "test", images.take(rows), np.zeros(2, int), {0: ""})
    ((expected, _),) = evaluation_batches(kept, transform, 8)
    np.testing.assert_array_equal(views, expected.numpy())


def test_a_list_in_the_store(bucket):
    lines = [["path", "label"], ["a/0.jpg", "x"], ["s3://photos/c/3.jpg", "y"]]
    bucket["list.csv"] = "\n".join(",".join(line) for line in lines).encode()
    images = images_of("s3://photos/list.csv")
    assert images["path"].to_pylist() == ["s3://photos/a/0.jpg", "s3://photos/c/3.jpg"]
    assert images["label"].to_pylist() == [0, 1]
