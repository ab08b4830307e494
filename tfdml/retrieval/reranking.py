"""Before and after a search: whitening, query expansion, k-reciprocal re-ranking."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from scipy import sparse

from tfdml.arguments import integer, number
from tfdml.errors import UserError
from tfdml.retrieval import exact

# Numbers of the gathered neighbors that are held at once: 64 MB.
_GATHERED_AT_ONCE = 2**24


def _unit_sides(queries: Any, gallery: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return queries and gallery, checked and of length 1, and the gallery row of each query; None
    with a gallery."""
    queries, gallery, _ = exact.check_sides(queries, gallery)
    if gallery is not None:
        return exact.unit_rows(queries), exact.unit_rows(gallery), None
    if len(queries) < 2:
        raise UserError("one image has no other to be compared with")
    queries = exact.unit_rows(queries)
    return queries, queries, np.arange(len(queries))


def _nearest(
    queries: np.ndarray, gallery: np.ndarray, own: np.ndarray | None, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (N, m) rows and cosines of the k nearest of every query, all where they are fewer."""
    k = min(k, len(gallery) - (own is not None))
    rows, distances = exact.nearest_neighbors(
        queries, gallery, k=k, distance="cosine", own_rows=own
    )
    return rows, 1 - distances


def blocks(count: int, numbers_each: int) -> list[slice]:
    """Slices that cover `count` rows, few enough in each for what they gather, `numbers_each` a
    row.

    Example:
        >>> blocks(5, 2**23)
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return exact.row_blocks(count, max(1, _GATHERED_AT_ONCE // max(numbers_each, 1)))


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
        """(N, D) -> (N, d) float32 of length 1; the embeddings are scaled to length 1 first, as in
        the fit.

        Raises:
            UserError: They are not (N, D) finite numbers.
        """
        embeddings = exact.check_embeddings(embeddings)
        if embeddings.shape[1] != len(self.mean):
            raise UserError(
                f"embeddings have {embeddings.shape[1]} dimensions, the whitening {len(self.mean)}"
            )
        return exact.unit_rows((exact.unit_rows(embeddings) - self.mean) @ self.components)


def fit_whitening(
    embeddings: Any, dim: int = 0, *, power: float = 1.0, shrinkage: float = 0.0
) -> Whitening:
    """Fit a PCA whitening: z_i = <x - mean, u_i> / v_i^(power / 2), the first d of the principal
    components u_i.

    x are the embeddings scaled to length 1, and the `Whitening` scales z to length 1 as well.
    v_i = (1 - shrinkage) s_i^2 + shrinkage mean_j s_j^2, with s_i^2 the variance along u_i.
    What it is fitted to must be embeddings of training classes: fitted to the gallery, it would
    have seen the test.

    Args:
        embeddings: (M, D) of the training images.
        dim: d; 0: all D.
        power: 1 whitens, 0 only projects, 0.5 is half-way.
        shrinkage: 0 .. 1.

    Raises:
        ValueError: `power` or `shrinkage` is out of range.
        UserError: There are not more embeddings than components, or `dim` exceeds their
            dimensions.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> whitening = fit_whitening(rng.normal(size=(50, 4)), dim=2)
        >>> whitening(rng.normal(size=(3, 4))).shape
        (3, 2)

    Source: Jegou and Chum, "Negative Evidences and Co-occurences in Image Retrieval", ECCV 2012,
    sec. 2; powers below 1: Mukundan et al., "Understanding and Improving Kernel Local Descriptors",
    IJCV 2019, sec. 4.3.
    """
    embeddings = exact.unit_rows(exact.check_embeddings(embeddings, "training embeddings"))
    dim = int(dim) or embeddings.shape[1]
    if dim > embeddings.shape[1] or dim >= len(embeddings):
        raise UserError(f"training embeddings {embeddings.shape} have fewer components", dim=dim)
    from tfdml.layers import PrincipalComponents  # Keras, which a search does without

    layer = PrincipalComponents(dim, whiten=True, power=power, shrinkage=shrinkage)
    layer.adapt(embeddings)
    return Whitening(np.asarray(layer.mean), np.asarray(layer.components))


def expand_queries(
    queries: Any, gallery: Any = None, *, k: int = 10, alpha: float = 3.0
) -> np.ndarray:
    """Alpha query expansion: q' = q + sum_{i <= k} max(<q, g_i>, 0)^alpha g_i, scaled to length 1.

    g_1 .. g_k are the query's nearest gallery images, all vectors of length 1. With alpha = 0 all
    weigh as much as the query: average query expansion. All-to-all a query's own row is not among
    them: it counts once, as the query.

    The source takes k = 50 and alpha = 3, for landmarks with many images each. The default here is
    k = 10, because classes of metric learning are often smaller: neighbors beyond the class pull
    the query away from it.

    Args:
        queries: (N, d) embeddings.
        gallery: (G, d) what they are searched in; None: each in all others.
        k: How many neighbors; all where there are fewer.
        alpha: The exponent, at least 0.

    Returns:
        (N, d) float32. They are to be searched in the gallery as it was.

    Raises:
        ValueError: `k` or `alpha` is out of range.
        UserError: As `nearest_neighbors`.

    Example:
        >>> expand_queries(np.array([[1.0, 0.0]]), np.array([[0.6, 0.8], [-1.0, 0.0]]), k=1,
        ...     alpha=0).round(3)
        array([[0.894, 0.447]], dtype=float32)

    Source: Radenovic, Tolias and Chum, "Fine-tuning CNN Image Retrieval with No Human Annotation",
    TPAMI 2019, sec. 3.4; alpha = 0: Chum et al., "Total Recall", ICCV 2007.
    """
    k, alpha = integer("k", k, at_least=1), number("alpha", alpha, at_least=0)
    queries, gallery, own = _unit_sides(queries, gallery)
    rows, similarities = _nearest(queries, gallery, own, k)
    result = np.empty_like(queries)
    for part in blocks(len(rows), rows.shape[1] * queries.shape[1]):
        weights = (np.maximum(similarities[part], 0) ** np.float32(alpha)).astype(np.float32)
        sums = np.einsum("bmd,bm->bd", gallery[rows[part]], weights)
        result[part] = exact.unit_rows(queries[part] + sums)
    return result


@dataclasses.dataclass(frozen=True)
class Reciprocal:
    """What k-reciprocal re-ranking keeps of all images; `encode` makes it.

    Args:
        codes: (n, n) sparse, row i the vector V_i of image i.
        sums: (n,) the sum of each row.
    """

    codes: sparse.csr_array
    sums: np.ndarray

    def jaccard(self, image: int, others: np.ndarray, scratch: np.ndarray) -> np.ndarray:
        """Jaccard distances of an image to others, 1 - sum_j min(V_ij, V_gj) / sum_j max(V_ij,
        V_gj).

        Args:
            image: i.
            others: (m,) the g.
            scratch: (n,) zeros, which it leaves as they were.

        Returns:
            (m,) float32.
        """
        mine, theirs = slice(*self.codes.indptr[image : image + 2]), self.codes[others]
        scratch[self.codes.indices[mine]] = self.codes.data[mine]
        # No row is empty: an image is its own neighbor.
        least = np.add.reduceat(
            np.minimum(scratch[theirs.indices], theirs.data), theirs.indptr[:-1]
        )
        scratch[self.codes.indices[mine]] = 0
        return 1 - least / (self.sums[image] + self.sums[others] - least)


def encode(images: np.ndarray, k1: int, k2: int) -> Reciprocal:
    """Return the vectors V of all images.

    L_i lists image i itself and then its nearest others. With k-reciprocal neighbors
    R(i, k) = {j in the first k + 1 of L_i : i in the first k + 1 of L_j}:

    1. R*(i) = R(i, k1), joined with R(j, k1 / 2) of each j in it that shares two thirds of it:
       |R(i, k1) and R(j, k1 / 2)| >= 2/3 |R(j, k1 / 2)|.
    2. V_ij = exp(-d(i, j)) for j in R*(i), else 0, divided by their sum; d is the squared Euclidean
       distance.
    3. Each V_i becomes the mean of V_j over the first k2 of L_i (local query expansion).

    Args:
        images: (n, d) of length 1.
        k1: k1, at most n - 1; half of it is rounded down.
        k2: k2, at most n.
    """
    count = len(images)
    rows, _ = exact.nearest_neighbors(images, k=max(k1, k2 - 1, 1), distance="cosine")
    lists = np.concatenate([np.arange(count)[:, None], rows], axis=1)
    codes = _weighted(images, _expanded(lists, k1))
    if k2 > 1:
        codes = _listed(lists[:, :k2], np.float32(1 / k2)) @ codes
    return Reciprocal(codes, np.asarray(codes.sum(axis=1), np.float32).ravel())


def _expanded(lists: np.ndarray, k1: int) -> sparse.csr_array:
    """Return the sets R* of step 1 of `encode`, (n, n) sparse with numbers above 0."""
    near = _mutual(lists[:, : k1 + 1])
    half = _mutual(lists[:, : k1 // 2 + 1])
    sizes = half.sum(axis=1)
    parts = []
    for part in blocks(len(lists), 2 * (k1 + 1) * (k1 // 2 + 1)):
        own = near[part]
        # Of each j in R(i, k1), how much of R(j, k1 / 2) is in R(i, k1).
        overlap = own.multiply(own @ half.T).tocoo()
        joins = 3 * overlap.data >= 2 * sizes[overlap.col]
        places = (overlap.row[joins], overlap.col[joins])
        joined = sparse.csr_array((overlap.data[joins], places), shape=own.shape)
        parts.append(own + joined @ half)
    members = sparse.vstack(parts, format="csr")
    members.sort_indices()
    return members


def _weighted(images: np.ndarray, members: sparse.csr_array) -> sparse.csr_array:
    """Return the vectors V of step 2 of `encode`, (n, n) sparse, from the sets R*."""
    count = len(images)
    row = np.repeat(np.arange(count), np.diff(members.indptr))
    column = members.indices
    weights = np.empty(len(row), np.float32)
    for part in blocks(len(row), 2 * images.shape[1]):
        squares = np.square(images[row[part]] - images[column[part]])
        weights[part] = np.exp(-squares.sum(axis=1))
    weights /= np.bincount(row, weights, count)[row]
    return sparse.csr_array((weights, column, members.indptr), shape=(count, count))


def _listed(lists: np.ndarray, value: Any) -> sparse.csr_array:
    """(n, n) sparse, `value` at (i, j) for each j in the list of i; lists (n, k)."""
    count, size = lists.shape
    starts = np.arange(count + 1, dtype=np.int32) * size
    data = np.full(count * size, value)
    return sparse.csr_array((data, lists.ravel().astype(np.int32), starts), shape=(count, count))


def _mutual(lists: np.ndarray) -> sparse.csr_array:
    """(n, n) sparse, 1 where i and j are in the lists of each other."""
    members = _listed(lists, np.int32(1))
    return members.multiply(members.T).tocsr()


def k_reciprocal_neighbors(
    queries: Any,
    gallery: Any = None,
    *,
    k: int,
    k1: int = 20,
    k2: int = 6,
    weight: float = 0.3,
    top: int = 200,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k nearest images by d* = (1 - weight) d_J + weight d, where d = |q - g|^2 of
    vectors of length 1.

    d_J is the Jaccard distance of the vectors V that `encode` makes, 1 - sum min(V_q, V_g) / sum
    max(V_q, V_g). All-to- all the images are those given, each once: the query is one of them, and
    its own row is left out of its answer. With a gallery they are the queries and the gallery
    together, as in the authors' code: the other queries take part in the lists of neighbors, though
    not in the answer.

    The authors published MATLAB code, and list a version in Python. This function differs from them
    in two places and follows the paper there: both divide each row of d by its largest value, and
    both ask for more than two thirds where eq. 5 has at least two thirds. The paper does not define
    k1 / 2 for odd k1. MATLAB's `round((k1 + 1) / 2)` with the image itself rounds it down, as here;
    Python's `around(k1 / 2)` rounds up where k1 is 3, 7, 11, ...

    What is exact: V is that of all images, and so is d* of each image that is re-ranked. Only the
    `top` nearest of each query by d are; the rest stay behind them in the order of d. With `top` as
    large as the gallery it is the whole re-ranking. Memory grows with n, not with n^2: n (k1 + top)
    for the lists and some 100 numbers an image for V.

    Args:
        queries: (N, d) embeddings.
        gallery: (G, d) what they are searched in; None: each in all others.
        k: How many neighbors; all where there are fewer.
        k1: Neighbors that may be reciprocal.
        k2: Images that the local query expansion takes the mean of; 1: none.
        weight: Of d, the paper's lambda, 0 .. 1.
        top: How many of each query's nearest images are re-ranked.

    Returns:
        (N, k) int64 gallery rows and (N, k) float32 distances d*, infinite for those that were not
        re-ranked.

    Raises:
        ValueError: A number is out of range.
        UserError: As `nearest_neighbors`.

    Example:
        >>> points = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
        >>> k_reciprocal_neighbors(points, k=1, k1=1, k2=1)[0].ravel().tolist()
        [1, 0, 3, 2]

    Source: Zhong, Zheng, Cao and Li, "Re-ranking Person Re-identification with k-reciprocal
    Encoding", CVPR 2017, eq. 1 and 3 to 12.
    """
    k1, k2, top = (
        integer(name, n, at_least=1) for name, n in (("k1", k1), ("k2", k2), ("top", top))
    )
    weight = number("weight", weight, at_least=0, at_most=1)
    queries, gallery, own = _unit_sides(queries, gallery)
    images = np.concatenate([queries, gallery]) if own is None else gallery
    reciprocal = encode(images, min(k1, len(images) - 1), min(k2, len(images)))
    rows, similarities = _nearest(queries, gallery, own, max(k, top))
    first = len(queries) if own is None else 0
    result = np.full(rows.shape, np.inf, np.float32)
    scratch = np.zeros(len(images), np.float32)
    for query, (near, cosines) in enumerate(zip(rows[:, :top], similarities[:, :top], strict=True)):
        jaccard = reciprocal.jaccard(query, near + first, scratch)
        distances = (1 - weight) * jaccard + weight * np.maximum(2 - 2 * cosines, 0)
        order = np.lexsort((near, distances))
        rows[query, :top], result[query, :top] = near[order], distances[order]
    return rows[:, :k], result[:, :k]
