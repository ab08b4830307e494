import numpy as np
import pytest

from tfdml.data.readers import glyphs
from tfdml.errors import UserError


@pytest.fixture(scope="module")
def test_split():
    return glyphs.read(split="test")


def test_splits_partition_the_classes():
    train, test = glyphs.split_characters().values()
    assert sorted(train + test) == list(glyphs.CHARACTERS)
    assert (len(train), len(test)) == (213, 107)


def test_the_split_read(test_split):
    _, characters = glyphs.split_characters().values()
    assert test_split.images.data.shape == (107 * 20, 64, 64, 3)
    assert len({image.tobytes() for image in test_split.select_classes([250]).images.data}) == 20
    np.testing.assert_array_equal(test_split.classes, np.arange(213, 320))
    assert np.bincount(test_split.labels)[213:].tolist() == [20] * 107
    assert "".join(test_split.class_names.values()) == characters
    assert test_split.images.name(21) == f"U+{ord(characters[1]):04X}/1"
    train = glyphs.read(images_per_class=1, size=16)
    np.testing.assert_array_equal(train.classes, np.arange(213))


def test_an_image_depends_on_seed_character_and_instance_alone(test_split):
    character = test_split.class_names[220]
    row = (220 - 213) * 20 + 13
    drawn = glyphs.draw(character, 13)
    np.testing.assert_array_equal(drawn, test_split.images.data[row])
    fewer = glyphs.read(split="test", images_per_class=3)
    np.testing.assert_array_equal(fewer.images.data[:3], test_split.images.data[:3])
    np.testing.assert_array_equal(fewer.images.data[3:6], test_split.images.data[20:23])
    assert (glyphs.draw(character, 13, seed=1) != drawn).any()
    assert (glyphs.draw(character, 12) != drawn).any()


@pytest.mark.parametrize("option", [{"images_per_class": 0}, {"size": 15}, {"seed": -1}])
def test_options_that_are_none_are_refused(option):
    with pytest.raises(UserError, match=next(iter(option))):
        glyphs.read(**option)


def test_images_of_named_letters_have_their_names_as_texts():
    train, test = (
        glyphs.read(split=split, texts=True, images_per_class=2, size=16)
        for split in ("train", "test")
    )
    assert test.class_names[test.labels[0]] == "LATIN SMALL LETTER E WITH MACRON"
    assert list(test.texts) == [test.class_names[label] for label in test.labels]
    assert not {*train.class_names} & {*test.class_names}
