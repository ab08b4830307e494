"""Measuring embeddings: exact neighbours, retrieval and clustering metrics, generalisation."""

from tfdml.embeddings.compute import embed, embed_batches
from tfdml.embeddings.reader import read_embeddings
from tfdml.evaluation.clustering import clustering_agreement, evaluate_clustering, kmeans, pairwise_f1
from tfdml.evaluation.disjoint_parts import part_protocol, split_into_parts
from tfdml.evaluation.generalisation import (
    GENERALISATION_MEASURES,
    class_density,
    draw_scattering,
    evaluate_divergence,
    evaluate_generalisation,
    evaluate_overlap,
    evaluate_scattering,
    partial_embeddings,
    scattering_curve,
)
from tfdml.evaluation.intervals import Interval, confidence_intervals
from tfdml.evaluation.pair_distances import sample_pair_distances
from tfdml.evaluation.paired import paired_differences, seed_difference, student_interval
from tfdml.evaluation.per_query import retrieval_per_query
from tfdml.evaluation.query_values import QueryValues
from tfdml.evaluation.retrieval import (
    DEFAULT_METRICS,
    METRICS,
    dataset_protocol,
    dataset_roles,
    evaluate_dataset,
    evaluate_retrieval,
)
from tfdml.evaluation.search.exact import nearest_neighbours, neighbour_blocks
from tfdml.evaluation.search.index import GalleryIndex, build_index, load_index
from tfdml.evaluation.search.recall import IndexRecall, index_recall, least_effort

__all__ = [
    "DEFAULT_METRICS",
    "GENERALISATION_MEASURES",
    "METRICS",
    "GalleryIndex",
    "IndexRecall",
    "Interval",
    "QueryValues",
    "build_index",
    "class_density",
    "clustering_agreement",
    "confidence_intervals",
    "dataset_protocol",
    "dataset_roles",
    "draw_scattering",
    "embed",
    "embed_batches",
    "evaluate_clustering",
    "evaluate_dataset",
    "evaluate_divergence",
    "evaluate_generalisation",
    "evaluate_overlap",
    "evaluate_retrieval",
    "evaluate_scattering",
    "index_recall",
    "kmeans",
    "least_effort",
    "load_index",
    "nearest_neighbours",
    "neighbour_blocks",
    "paired_differences",
    "pairwise_f1",
    "part_protocol",
    "partial_embeddings",
    "read_embeddings",
    "retrieval_per_query",
    "sample_pair_distances",
    "scattering_curve",
    "seed_difference",
    "split_into_parts",
    "student_interval",
]
