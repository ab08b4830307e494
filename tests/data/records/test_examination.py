"""Groups of copies say of all of their images where they lie and how they are labelled."""

import pytest

from tests.data.preparations import made
from tfdml.data import EncodedImages
from tfdml.data.records.examination import describe_duplicates, find_duplicates


def images(split, *labels):
    names = tuple(f"{split}{i}" for i in range(len(labels)))
    return made(EncodedImages((b"",) * len(labels), names), labels, split=split)


@pytest.mark.parametrize(
    ("train", "test", "across", "differ"),
    [("aa", "b", False, False), ("aab", "a", True, True), ("ab", "ca", True, True), ("abb", "c", False, True)],
)
def test_every_image_of_a_group_counts(train, test, across, differ):
    """Where the first two of three copies lie together, the third may still lie across the split."""
    # The images of a split are of the classes 0, 0, 1; those of the test split of 5, 6.
    splits = {"train": (images("train", *[0, 0, 1][: len(train)]), train), "test": (images("test", 5, 6), test)}
    (group,) = find_duplicates({name: (part.take(range(len(of))), of) for name, (part, of) in splits.items()})
    assert group["across_splits"] == across
    assert group["labels_differ"] == differ
    described = "\n".join(describe_duplicates([group]))
    assert ("ACROSS THE TRAIN/TEST SPLIT" in described) == across
    assert ("none lies across" in described) == (not across)
    assert ("with different labels" in described) == differ
