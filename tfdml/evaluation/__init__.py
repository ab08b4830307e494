"""Measuring embeddings: retrieval and clustering metrics, intervals, generalisation, what a search loses."""

from tfdml.embeddings.compute import embed, embed_batches
from tfdml.embeddings.reader import read_embeddings
from tfdml.evaluation.chains import STEPS, Sources, hubness, measure_chains, steps_of
from tfdml.evaluation.classification import (
    CentroidClassifier,
    KNNClassifier,
    evaluate_classification,
)
from tfdml.evaluation.clustering import clustering_agreement, evaluate_clustering, kmeans, pairwise_f1
from tfdml.evaluation.generalisation import (
    GENERALISATION_MEASURES,
    class_density,
    evaluate_divergence,
    evaluate_generalisation,
    evaluate_overlap,
)
from tfdml.evaluation.intervals import (
    Interval,
    confidence_intervals,
    paired_differences,
    seed_difference,
    student_interval,
)
from tfdml.evaluation.per_query import (
    QueryValues,
    average_set_intersection,
    dataset_roles,
    global_average_precision,
    hierarchical_average_precision,
    ndcg,
    neighbor_confidences,
    retrieval_per_query,
)
from tfdml.evaluation.relevance import Relevance
from tfdml.evaluation.results import RetrievalResults
from tfdml.evaluation.retrieval import (
    DEFAULT_METRICS,
    METRICS,
    cmc_curve,
    dataset_protocol,
    evaluate_dataset,
    evaluate_retrieval,
    part_protocol,
    recall_by_size,
    split_into_parts,
)
from tfdml.evaluation.scattering import evaluate_scattering
from tfdml.evaluation.verification import (
    Calibration,
    Verification,
    accepted_rates,
    calibrate,
    evaluate_pairs,
    target_of,
    verification,
    verify_pairs,
)

__all__ = [
    "DEFAULT_METRICS",
    "GENERALISATION_MEASURES",
    "METRICS",
    "STEPS",
    "Calibration",
    "CentroidClassifier",
    "Interval",
    "KNNClassifier",
    "QueryValues",
    "Relevance",
    "RetrievalResults",
    "Sources",
    "Verification",
    "accepted_rates",
    "average_set_intersection",
    "calibrate",
    "class_density",
    "clustering_agreement",
    "cmc_curve",
    "confidence_intervals",
    "dataset_protocol",
    "dataset_roles",
    "embed",
    "embed_batches",
    "evaluate_classification",
    "evaluate_clustering",
    "evaluate_dataset",
    "evaluate_divergence",
    "evaluate_generalisation",
    "evaluate_overlap",
    "evaluate_pairs",
    "evaluate_retrieval",
    "evaluate_scattering",
    "global_average_precision",
    "hierarchical_average_precision",
    "hubness",
    "kmeans",
    "measure_chains",
    "ndcg",
    "neighbor_confidences",
    "paired_differences",
    "pairwise_f1",
    "part_protocol",
    "read_embeddings",
    "recall_by_size",
    "retrieval_per_query",
    "seed_difference",
    "split_into_parts",
    "steps_of",
    "student_interval",
    "target_of",
    "verification",
    "verify_pairs",
]
