"""Pictures of triplets and the projector's files."""

import numpy as np
import pytest
from PIL import Image

from tfdml.training.watching.pictures import PicturedTriplet, triplet_sheet, write_projector


@pytest.mark.parametrize("size", [(28, 28), (300, 90), (1, 1)])
def test_each_image_of_a_triplet_is_in_its_column(size):
    colours = np.array([[200, 0, 0], [0, 200, 0], [0, 0, 200]], np.uint8)
    images = [np.broadcast_to(colour, (*size, 3)) for colour in colours]
    triplet = PicturedTriplet(7, images, ["a" * 500, "é", "名"], ["owl", "crow"], 1.25, 0.5)
    sheet = np.asarray(triplet_sheet([triplet, triplet]))
    assert triplet.violation == 0.75
    for column, colour in enumerate(colours):
        rows, columns = np.nonzero((sheet == colour).all(axis=-1))
        assert len(rows) > 1
        assert columns.min() == 6 + column * 230
        # The second triplet stands below the first.
        assert rows.max() > 112


def test_names_of_classes_cannot_break_the_table(tmp_path):
    embeddings = np.array([[0.5, -1e-9], [1, 2], [3, 4]])
    reads = [np.full((60, 20, 3), value, np.uint8) for value in (0, 100, 200)]
    write_projector(tmp_path, embeddings, np.array([0, 1, 5]), {0: "an\towl\n", 1: "crow"}, reads.__getitem__)
    assert (tmp_path / "classes.tsv").read_text() == "an owl\ncrow\n5\n"
    assert (tmp_path / "vectors.tsv").read_text() == "0.5\t-1e-09\n1\t2\n3\t4\n"
    with Image.open(tmp_path / "thumbnails.png") as sheet:
        assert sheet.size == (2 * 48, 2 * 48)
        assert [sheet.getpixel(place)[0] for place in ((2, 2), (50, 2), (2, 50), (90, 90))] == [0, 100, 200, 255]
