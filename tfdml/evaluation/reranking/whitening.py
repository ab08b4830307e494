"""PCA whitening, fitted to the embeddings of training classes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation.search.exact import check_embeddings, unit_rows
from tfdml.layers import PrincipalComponents


@dataclasses.dataclass(frozen=True)
class Whitening:
    """z = (x - mean) C, scaled to length 1; made by `fit_whitening`.

    Args:
        mean: (D,) float32.
        components: (D, d) float32.
    """

    mean: np.ndarray
    components: np.ndarray

    def __call__(self, embeddings: Any) -> np.ndarray:
        """(N, D) -> (N, d) float32 of length 1; the embeddings are scaled to length 1 first, as in the fit.

        Raises:
            UserError: They are not (N, D) finite numbers.
        """
        embeddings = check_embeddings(embeddings)
        if embeddings.shape[1] != len(self.mean):
            raise UserError(f"embeddings have {embeddings.shape[1]} dimensions, the whitening {len(self.mean)}")
        return unit_rows((unit_rows(embeddings) - self.mean) @ self.components)


def fit_whitening(embeddings: Any, dim: int = 0, *, power: float = 1.0, shrinkage: float = 0.0) -> Whitening:
    """Fit a PCA whitening: z_i = <x - mean, u_i> / v_i^(power / 2), the first d of the principal components u_i.

    v_i = (1 - shrinkage) s_i^2 + shrinkage mean_j s_j^2, with s_i^2 the variance along u_i. What it is fitted to must
    be embeddings of training classes: fitted to the gallery, it would have seen the test.

    Args:
        embeddings: (M, D) of the training images.
        dim: d; 0: all D.
        power: 1 whitens, 0 only projects, 0.5 is half-way.
        shrinkage: 0 .. 1.

    Raises:
        ValueError: `power` or `shrinkage` is out of range.
        UserError: There are not more embeddings than components, or fewer dimensions.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> whitening = fit_whitening(rng.normal(size=(50, 4)), dim=2)
        >>> whitening(rng.normal(size=(3, 4))).shape
        (3, 2)

    Source: Jegou and Chum, "Negative Evidences and Co-occurences in Image Retrieval", ECCV 2012, sec. 2; powers below
    1: Mukundan et al., "Understanding and Improving Kernel Local Descriptors", IJCV 2019, sec. 4.3.
    """
    embeddings = unit_rows(check_embeddings(embeddings, "training embeddings"))
    dim = int(dim) or embeddings.shape[1]
    if dim > embeddings.shape[1] or dim >= len(embeddings):
        raise UserError(
            f"whitening(dim={dim}): {len(embeddings):,} training embeddings of {embeddings.shape[1]} dimensions have "
            "fewer components"
        )
    layer = PrincipalComponents(dim, whiten=True, power=power, shrinkage=shrinkage)
    layer.adapt(embeddings)
    return Whitening(np.asarray(layer.mean), np.asarray(layer.components))
