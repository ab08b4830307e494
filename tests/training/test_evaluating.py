"""What cannot be measured is refused before training."""

import dataclasses

import numpy as np
import pytest

from tests.training.runs import noise
from tfdml.errors import UserError
from tfdml.training.building import Splits
from tfdml.training.evaluating import check_measurable


def check(split, ks, name="test"):
    train = noise("train", 2, 0)
    splits = Splits(train, None, split) if name == "test" else Splits(train, split, noise("test", 6, 0))
    check_measurable(splits, ks)


def test_as_many_gallery_images_as_the_largest_k_are_needed():
    split = noise("test", 2, 0)
    check(split, (1, 7))
    with pytest.raises(UserError, match=r"--ks=1,7,8: recall@8 of the test images .* there are 7; .* e.g. --ks=1,7$"):
        check(split, (1, 7, 8))


def test_queries_are_counted_against_their_gallery():
    split = dataclasses.replace(noise("test", 2, 0), is_query=np.arange(8) % 4 > 0)
    check(split, (1, 2))
    with pytest.raises(UserError, match="there are 2"):
        check(split, (4,))


def test_someone_must_have_a_match():
    with pytest.raises(UserError, match="the validation images of noise cannot be measured: no query shares"):
        check(noise("train", 5, 0, images_per_class=1), (1,), "validation")
