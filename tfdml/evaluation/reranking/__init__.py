"""What is done with embeddings before or after a search: whitening, expansion, re-ranking, and what that gains."""

from tfdml.evaluation.reranking.chain import measure_chains
from tfdml.evaluation.reranking.csls import csls_densities
from tfdml.evaluation.reranking.expansion import augment_gallery, expand_queries
from tfdml.evaluation.reranking.hubness import hubness
from tfdml.evaluation.reranking.k_reciprocal import k_reciprocal_neighbours
from tfdml.evaluation.reranking.searched import Augmented
from tfdml.evaluation.reranking.steps import STEPS, Sources, steps_of
from tfdml.evaluation.reranking.whitening import Whitening, fit_whitening

__all__ = [
    "STEPS",
    "Augmented",
    "Sources",
    "Whitening",
    "augment_gallery",
    "csls_densities",
    "expand_queries",
    "fit_whitening",
    "hubness",
    "k_reciprocal_neighbours",
    "measure_chains",
    "steps_of",
]
