"""Every entrance takes the same labels, and refuses the same ones with the same advice."""

import numpy as np
import pytest

import tfdml
from tfdml import evaluation
from tfdml.callbacks import RetrievalEvaluation
from tfdml.data import ImageDataset
from tfdml.embeddings import read_embeddings
from tfdml.embeddings.files import ImageTable
from tfdml.errors import UserError
from tfdml.losses import ContrastiveLoss
from tfdml.mining import BatchHardMiner
from tfdml.objectives import JointMMD, MetricLoss
from tfdml.pairs import Pairs
from tfdml.retrieval import confusable_classes

LABELS = np.array([0, 1, 0, 1, 1, 0, 0, 1])
POINTS = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
HITS = {"recall@1": np.array([1.0, 0, 1, 1, 0, 1, 0, 0])}


def index_of(labels):
    index = tfdml.Index(lambda x: x)
    index.add(POINTS, labels)
    return index.classify(POINTS, k=3).labels


def archive_of(labels, tmp_path):
    np.savez(tmp_path / "vectors.npz", embeddings=POINTS, labels=labels)
    return read_embeddings(tmp_path / "vectors.npz").labels


MEASURES = {
    "retrieval": lambda y: evaluation.evaluate_retrieval(POINTS, y, metrics=["recall@1", "map@r"]),
    "per query": lambda y: evaluation.retrieval_per_query(POINTS, y, metrics=["map@r"]),
    "callback": lambda y: RetrievalEvaluation(POINTS, y).y,
    "clustering": lambda y: evaluation.evaluate_clustering(POINTS, y),
    "verification": lambda y: evaluation.verification(POINTS, y, fars=[0.5]).to_dict(),
    "calibration": lambda y: evaluation.calibrate(POINTS, y, far=0.5).to_dict(),
}
ENTRANCES = {
    **MEASURES,
    "agreement": lambda y: evaluation.clustering_agreement(y, LABELS),
    "generalization": lambda y: evaluation.evaluate_generalization(POINTS, y),
    "intervals": lambda y: evaluation.confidence_intervals(HITS, y),
    "neighbors": lambda y: evaluation.KNNClassifier(POINTS, y, k=3).classify(POINTS).labels,
    "means": lambda y: (
        evaluation.KNNClassifier(POINTS, y, per_class="mean").classify(POINTS).labels
    ),
    "classification": lambda y: evaluation.evaluate_classification(
        evaluation.KNNClassifier(POINTS, LABELS, k=3), POINTS, y
    ),
    "index": index_of,
    "data set": lambda y: ImageDataset(images=np.zeros((8, 2, 2, 3), np.uint8), labels=y).labels,
    "groups": lambda y: (
        ImageDataset(images=np.zeros((8, 2, 2, 3), np.uint8), labels=LABELS, groups=y).groups
    ),
    "written": lambda y: ImageTable(tuple("abcdefgh"), y, ["test"] * 8).labels,
    "confusable": lambda y: confusable_classes(POINTS, y),
    "loss": lambda y: float(ContrastiveLoss()(y, POINTS)),
    "objective": lambda y: float(MetricLoss(ContrastiveLoss())({"embedding": POINTS}, y)),
    "objective over pairs": lambda y: float(JointMMD("embedding")({"embedding": POINTS}, y)),
    "miner": lambda y: np.array(BatchHardMiner()(Pairs.of_batch(POINTS, y)).negatives),
}
FORMS = {
    "column": LABELS[:, None],
    "whole floats": LABELS.astype("float64"),
    "booleans": LABELS.astype(bool),
    "objects": LABELS.astype(object),
    "uint8": LABELS.astype("uint8"),
}
WRONG = {
    "fractions": LABELS + 0.5,
    "missing": np.where(LABELS, 1, np.nan),
    "large float32": (2**24 + 2 * LABELS).astype("float32"),
    "large float64": 2.0**53 + 2 * LABELS,
    "objects": np.array([None, *LABELS[1:]], object),
    "multi-hot": np.tri(8, 2, dtype=bool),
    "one-hot": np.eye(2)[LABELS],
}


@pytest.mark.parametrize("measure", ENTRANCES.values(), ids=ENTRANCES)
def test_entrances_take_and_refuse_the_same_labels(measure):
    expected = measure(LABELS)
    for form in FORMS.values():
        np.testing.assert_equal(measure(form), expected)
    for labels in WRONG.values():
        with pytest.raises(UserError, match=r"must be integers|must have shape|takes one label"):
            measure(labels)


def test_files_of_vectors_take_and_refuse_the_same_labels(tmp_path):
    for form in ("column", "whole floats", "booleans", "uint8"):
        np.testing.assert_array_equal(archive_of(FORMS[form], tmp_path), LABELS)
    np.testing.assert_array_equal(archive_of(np.array(list("ab"))[LABELS], tmp_path), LABELS)
    for wrong in ("fractions", "missing", "large float32", "one-hot"):
        with pytest.raises(UserError, match=r"vectors\.npz: labels must"):
            archive_of(WRONG[wrong], tmp_path)


@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_one_class_is_not_measured(measure):
    with pytest.raises(UserError, match="class"):
        measure(np.full(8, 5))


@pytest.mark.parametrize("names", [["b", "a"], np.array(["b", "a"], object)])
def test_classifiers_take_names(names):
    gallery = np.array(names)[LABELS]
    by_name = evaluation.KNNClassifier(POINTS, gallery, k=3).classify(POINTS).labels
    by_id = evaluation.KNNClassifier(POINTS, LABELS, k=3).classify(POINTS).labels
    np.testing.assert_array_equal(by_name, np.array(names)[by_id])
    np.testing.assert_array_equal(index_of(gallery[:, None]), by_name)
