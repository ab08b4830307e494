"""A data set with roles is measured query against gallery, any other all-to-all."""

import numpy as np
import pytest

from tfdml.data import ArrayImages, ImageDataset
from tfdml.errors import UserError
from tfdml.evaluation import retrieval_per_query
from tfdml.evaluation.retrieval import dataset_protocol, evaluate_dataset, evaluate_retrieval


def make(is_query):
    images = ArrayImages(np.zeros((6, 4, 4, 3), np.uint8), tuple("abcdef"))
    labels = np.array([0, 0, 1, 1, 1, 0])
    return ImageDataset("made", "test", images, labels, {0: "zero", 1: "one"}, is_query=is_query)


EMBEDDINGS = np.array([[0.0], [0.1], [5.0], [5.2], [0.3], [4.9]])


def test_roles_decide_the_protocol():
    query = np.array([True, False, True, False, True, False])
    found = evaluate_dataset(EMBEDDINGS, make(query), ks=(1,), metrics=("recall",))
    # Query 0 finds row 1 (its class); query 2 finds row 5 (another); query 4 finds row 1 (another).
    assert found["recall@1"] == 1 / 3
    assert (found["num_queries"], found["num_gallery"]) == (3, 3)
    everything = evaluate_dataset(EMBEDDINGS, make(None), ks=(1,), metrics=("recall",))
    assert everything == evaluate_retrieval(EMBEDDINGS, make(None).labels, ks=(1,), metrics=("recall",))
    assert everything["num_gallery"] == 5


def test_values_per_query_by_the_same_protocol():
    query = np.array([True, False, True, False, True, False])
    values = retrieval_per_query(**dataset_protocol(EMBEDDINGS, make(query)), metrics=["recall@1"])
    assert values["recall@1"].tolist() == [1.0, 0.0, 0.0]
    assert len(retrieval_per_query(**dataset_protocol(EMBEDDINGS, make(None)), metrics=["recall@1"])["recall@1"]) == 6
    with pytest.raises(UserError, match="5 embeddings for the 6 images of made"):
        dataset_protocol(EMBEDDINGS[:5], make(query))
