"""What a Recall@K does not say: how an embedding that was trained on some classes treats others, and why."""

from tfdml.evaluation.generalisation.density import ClassDensity, class_density
from tfdml.evaluation.generalisation.divergence import evaluate_divergence
from tfdml.evaluation.generalisation.overlap import (
    default_bins,
    evaluate_overlap,
    jensen_shannon_bits,
    overlap_coefficient,
    probability_nearer,
    share_ordered,
)
from tfdml.evaluation.generalisation.pair_histogram import PairHistogram, count_pair_distances, sample_pair_histogram
from tfdml.evaluation.generalisation.scattering import (
    PartialEmbeddings,
    evaluate_scattering,
    partial_embeddings,
    scattering_curve,
)
from tfdml.evaluation.generalisation.scattering_figure import draw_scattering
from tfdml.evaluation.generalisation.summary import GENERALISATION_MEASURES, evaluate_generalisation

__all__ = [
    "GENERALISATION_MEASURES",
    "ClassDensity",
    "PairHistogram",
    "PartialEmbeddings",
    "class_density",
    "count_pair_distances",
    "default_bins",
    "draw_scattering",
    "evaluate_divergence",
    "evaluate_generalisation",
    "evaluate_overlap",
    "evaluate_scattering",
    "jensen_shannon_bits",
    "overlap_coefficient",
    "partial_embeddings",
    "probability_nearer",
    "sample_pair_histogram",
    "scattering_curve",
    "share_ordered",
]
