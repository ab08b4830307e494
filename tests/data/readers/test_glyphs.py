import collections
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdml.data.readers import glyphs
from tfdml.errors import UserError


@pytest.fixture(scope="module")
def test_split():
    return glyphs.read(split="test")


def test_characters_meet_the_rules_of_choice():
    characters = glyphs.CHARACTERS
    assert len(set(characters)) == len(characters) == 320
    assert list(characters) == sorted(characters)
    for alike in ("cC", "oO0", "AΑА", "sS", "lI", "pр"):
        assert len({*alike} & {*characters}) <= 1, alike
    for character in characters:
        faces = [face for face in glyphs.faces_of(character) if face not in glyphs._COMPUTER_MODERN]
        assert len(faces) >= 6, character
        families = {face.split("-")[0].replace("STIXGeneral", "STIX")[:10] for face in faces}
        assert len(families) >= 2, character
        assert not unicodedata.decomposition(character), character
        width, height = glyphs._render(character, faces[0], 64, 0).size
        assert max(width, height) <= 3 * min(width, height), character


def test_splits_partition_the_classes_and_mix_the_scripts():
    train, test = glyphs.split_characters().values()
    assert sorted(train + test) == list(glyphs.CHARACTERS)
    assert (len(train), len(test)) == (213, 107)
    for part in (train, test):
        scripts = {unicodedata.name(character).split()[0] for character in part}
        assert {"LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "GEORGIAN", "DIGIT"} <= scripts


def test_the_split_read(test_split):
    _, characters = glyphs.split_characters().values()
    assert test_split.images.data.shape == (107 * 20, 64, 64, 3)
    assert test_split.images.data.dtype == np.uint8
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


@settings(max_examples=40, deadline=None)
@given(
    character=st.sampled_from(glyphs.CHARACTERS),
    instance=st.integers(0, 10**6),
    size=st.integers(16, 130),
    seed=st.integers(0, 2**64),
)
def test_any_size_and_seed_can_be_drawn(character, instance, size, seed):
    image = glyphs.draw(character, instance, size=size, seed=seed)
    assert image.shape == (size, size, 3)
    assert image.dtype == np.uint8
    assert image.std() > 5


def test_options_characters_and_fonts_that_are_none_are_named(tmp_path, monkeypatch):
    for option in ({"images_per_class": 0}, {"size": 15}, {"seed": -1}):
        with pytest.raises(UserError, match=next(iter(option))):
            glyphs.read(**option)
    with pytest.raises(UserError, match="no face has the character"):
        glyphs.draw("漢", 0)
    monkeypatch.setattr("matplotlib.get_data_path", lambda: str(tmp_path))
    with pytest.raises(UserError, match=r"DejaVuSans\.ttf is missing: pip install matplotlib"):
        glyphs.font_path("DejaVuSans")


def test_raw_pixels_are_a_poor_embedding_but_better_than_chance(test_split):
    gray = test_split.images.data.astype(np.float32).mean(-1)
    pixels = gray.reshape(-1, 16, 4, 16, 4).mean((2, 4)).reshape(len(gray), -1)
    squares = (pixels**2).sum(1)
    distances = squares[:, None] - 2 * pixels @ pixels.T + squares
    np.fill_diagonal(distances, np.inf)
    labels = test_split.labels
    recall = (labels[distances.argmin(1)] == labels).mean()
    assert 0.05 < recall < 0.25


def test_words_of_test_names_were_seen_in_other_names():
    train, test = glyphs.split_named_letters().values()
    assert sorted(train + test) == sorted(glyphs.NAMED_LETTERS)
    assert (len(train), len(test)) == (293, 146)
    words = [collections.Counter(word for c in part for word in unicodedata.name(c).split()) for part in (train, test)]
    assert min(words[0][word] for word in words[1]) >= 3
    assert all(set(glyphs._DEJAVU_STIX[:12]) <= {*glyphs.faces_of(c)} for c in train + test)


def test_images_of_named_letters_have_their_names_as_texts():
    train, test = (glyphs.read(split=split, texts=True, images_per_class=2, size=16) for split in ("train", "test"))
    assert test.class_names[test.labels[0]] == "LATIN SMALL LETTER E WITH MACRON"
    assert list(test.texts) == [test.class_names[label] for label in test.labels]
    assert not {*train.class_names} & {*test.class_names}
