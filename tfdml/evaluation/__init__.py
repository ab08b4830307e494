"""Measuring embeddings: exact neighbours, retrieval and clustering metrics, and the report page."""

from tfdml.evaluation.by_dataset import evaluate_dataset
from tfdml.evaluation.clustering import clustering_agreement, evaluate_clustering, kmeans, pairwise_f1
from tfdml.evaluation.embedding import embed
from tfdml.evaluation.gallery import dataset_reader
from tfdml.evaluation.neighbours import nearest_neighbours, neighbour_blocks
from tfdml.evaluation.pair_distances import sample_pair_distances
from tfdml.evaluation.report import write_report
from tfdml.evaluation.retrieval import METRICS, evaluate_retrieval

__all__ = [
    "METRICS",
    "clustering_agreement",
    "dataset_reader",
    "embed",
    "evaluate_clustering",
    "evaluate_dataset",
    "evaluate_retrieval",
    "kmeans",
    "nearest_neighbours",
    "neighbour_blocks",
    "pairwise_f1",
    "sample_pair_distances",
    "write_report",
]
