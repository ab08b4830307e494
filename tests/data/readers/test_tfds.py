import importlib
import io
import sys

import numpy as np
import pytest
from PIL import Image

from tfdml.data import catalogue
from tfdml.data.readers import tfds
from tfdml.errors import UserError

library = pytest.importorskip("tensorflow_datasets")


class TfdmlSmallBirds(library.core.GeneratorBasedBuilder):
    """Twelve images of four classes, one of them without a label, the same classes in train and test."""

    VERSION = library.core.Version("1.0.0")

    def _info(self):
        features = library.features
        return library.core.DatasetInfo(
            builder=self,
            features=features.FeaturesDict(
                {
                    "image": features.Image(shape=(None, None, 3), encoding_format="png"),
                    "label": features.ClassLabel(names=["ant", "bee", "cat", "dog"]),
                    "number": np.int64,
                    "text": features.Text(),
                }
            ),
        )

    def _split_generators(self, manager):
        return {"train": self._generate_examples(0, 8), "test": self._generate_examples(8, 12)}

    def _generate_examples(self, start, stop):
        for i in range(start, stop):
            image = np.full((4, 5, 3), i, np.uint8)
            yield i, {"image": image, "label": -1 if i == 3 else i % 4, "number": i, "text": "x"}


class TfdmlTwoPictures(library.core.GeneratorBasedBuilder):
    """One example with two images."""

    VERSION = library.core.Version("1.0.0")

    def _info(self):
        image = library.features.Image(shape=(2, 2, 3))
        features = library.features.FeaturesDict({"left": image, "right": image, "text": library.features.Text()})
        return library.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, manager):
        return {"pairs": self._generate_examples()}

    def _generate_examples(self):
        yield 0, {"left": np.zeros((2, 2, 3), np.uint8), "right": np.ones((2, 2, 3), np.uint8), "text": "x"}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    library.builder("tfdml_small_birds", data_dir=folder).download_and_prepare()
    library.builder("tfdml_two_pictures", data_dir=folder).download_and_prepare()
    return folder


def _load(prepared, split="train", **options):
    return catalogue.load("tfds", prepared, split, **{"name": "tfdml_small_birds", **options})


def _values(dataset):
    """The value of every image's pixels, which is its number."""
    return [int(np.asarray(Image.open(io.BytesIO(data)))[0, 0, 0]) for data in dataset.images.data]


def test_classes_of_all_splits_are_divided(prepared):
    train, test = _load(prepared), _load(prepared, "test")
    assert train.class_names == {0: "ant", 1: "bee"}
    assert test.class_names == {2: "cat", 3: "dog"}
    assert sorted(_values(train)) == [0, 1, 4, 5, 8, 9]
    assert sorted(_values(test)) == [2, 6, 7, 10, 11]  # 3 has no label
    for dataset in (train, test):
        assert [value % 4 for value in _values(dataset)] == dataset.labels.tolist()


def test_the_order_and_the_names_are_the_same_every_time(prepared):
    first, second = _load(prepared), _load(prepared)
    assert first.images == second.images
    assert first.images.names[0].startswith("tfdml_small_birds/train/")
    assert len({*first.images.names}) == 6


def test_share_of_the_classes(prepared):
    assert _load(prepared, "test", test_fraction=0.25).class_names == {3: "dog"}


def test_own_splits_and_their_shared_classes(prepared, caplog):
    with caplog.at_level("WARNING", logger="absl"):
        train, test = _load(prepared, by_class=False), _load(prepared, "test", by_class=False)
    assert sorted(_values(train)) == [0, 1, 2, 4, 5, 6, 7]
    assert sorted(_values(test)) == [8, 9, 10, 11]
    assert "4 classes are in both train and test of tfdml_small_birds" in caplog.text


def test_integer_labels(prepared):
    test = _load(prepared, "test", label="number", by_class=False)
    assert sorted(test.labels.tolist()) == [8, 9, 10, 11]
    assert test.labels.tolist() == _values(test)
    assert test.class_names[8] == "8"


def test_prepare_when_asked(tmp_path):
    with pytest.raises(UserError, match=rf"tfdml_small_birds is not prepared in {tmp_path}\S*: run `tfds build"):
        _load(tmp_path)
    assert len(_load(tmp_path, download=True)) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "text"}, r"has no integer feature 'text'; choose one of: label, number"),
        ({"image": "text"}, r"has no image feature 'text'; its image features are image"),
        ({"name": "tfdml_two_pictures"}, r"has not one image feature; its image features are left, right"),
        (
            {"name": "tfdml_two_pictures", "image": "left"},
            r"no integer feature 'label'; choose a data set that has one",
        ),
        ({"name": "tfdml_no_such_birds"}, r"knows no data set 'tfdml_no_such_birds'"),
        ({"name": "tfdml_small_birds:9.0.0"}, r"'tfdml_small_birds:9\.0\.0' cannot be opened: .*only: 1\.0\.0"),
        ({"name": "no name"}, r"'no name' cannot be opened"),
        ({"test_fraction": 1.0}, r"test_fraction must lie between 0 and 1"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(prepared, options, message):
    with pytest.raises(UserError, match=message) as raised:
        _load(prepared, **options)
    assert len(str(raised.value).splitlines()) == 1


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    importlib.reload(tfds)
    with pytest.raises(UserError, match=r"not installed; pip install 'tfdml\[tfds\]'"):
        tfds.read(name="cifar100")
