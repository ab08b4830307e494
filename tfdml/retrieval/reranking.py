"""Before and after a search: whitening, query expansion, database augmentation, CSLS, k-reciprocal re-ranking."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from scipy import sparse

from tfdml.arguments import integer, number
from tfdml.errors import UserError
from tfdml.layers import PrincipalComponents
from tfdml.retrieval import exact

# Numbers of the gathered neighbours that are held at once: 64 MB.
_GATHERED_AT_ONCE = 2**24


@dataclasses.dataclass(frozen=True)
class Augmented:
    """A gallery whose images were each moved by their neighbours; `augment_gallery` makes it.

    In leave-one-out the query's own image may be such a neighbour. No search of that query may see it: `without`
    gives the images as they are in a gallery that lacks it, the next neighbour in its place.

    Args:
        plain: (G, d) the images before.
        vectors: (G, d) float32 of length 1, the images after.
        neighbours: (G, k + 1) rows of each image's neighbours, one more than it is moved by.
        weights: (G, k + 1) their weights.
        k: How many neighbours an image is moved by.
    """

    plain: np.ndarray
    vectors: np.ndarray
    neighbours: np.ndarray
    weights: np.ndarray
    k: int

    def saw(self, rows: np.ndarray, own: np.ndarray) -> np.ndarray:
        """Whether images `rows` (B, m) were moved by the image `own` (B,) of the query."""
        return (self.neighbours[rows, : self.k] == own[:, None, None]).any(axis=2)

    def without(self, rows: np.ndarray, own: np.ndarray) -> np.ndarray:
        """(P, d) images `rows` (P,), which image `own` (P,) had moved, as they are where it is not in the gallery."""
        result = np.empty((len(rows), self.plain.shape[1]), np.float32)
        for part in blocks(len(rows), self.neighbours.shape[1] * self.plain.shape[1]):
            near = self.neighbours[rows[part]]
            weights = np.where(near == own[part, None], np.float32(0), self.weights[rows[part]])
            result[part] = summed(self.plain[rows[part]], self.plain[near], weights)
        return result

    def seeing(self) -> tuple[np.ndarray, np.ndarray]:
        """For each image the images that it moved: their rows one after another, and (G + 1,) where each begins."""
        moved_by = self.neighbours[:, : self.k].ravel()
        order = np.argsort(moved_by, kind="stable")
        starts = np.searchsorted(moved_by[order], np.arange(len(self.plain) + 1))
        return order // max(self.k, 1), starts


@dataclasses.dataclass(frozen=True)
class Search:
    """Queries and the gallery that they are searched in; made by `search_of`.

    Args:
        queries: (N, d) float32.
        gallery: (G, d) float32.
        leave_one_out: Whether query i is row i of the gallery, and left out of its own search.
        distance: As `nearest_neighbours`; `"cosine"` until a step scores otherwise.
        augmented: How the gallery was moved; None: it was not, or no query lies in it.
        extra_bytes: What a step keeps next to the gallery's vectors.
    """

    queries: np.ndarray
    gallery: np.ndarray
    leave_one_out: bool
    distance: str = "cosine"
    augmented: Augmented | None = None
    extra_bytes: int = 0

    @property
    def available(self) -> int:
        """How many images a query is compared with."""
        return len(self.gallery) - self.leave_one_out

    @property
    def bytes(self) -> int:
        """What is kept to search in: the gallery's vectors and what a step has put next to them."""
        return self.gallery.nbytes + self.extra_bytes

    def neighbours(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the k nearest gallery images of every query, all where they are fewer.

        Returns:
            (N, m) int64 rows and (N, m) float32 similarities: cosines, or what a step scores by.
        """
        k = min(k, self.available)
        if k < 1:
            return np.zeros((len(self.queries), 0), np.int64), np.zeros((len(self.queries), 0), np.float32)
        if self.augmented is not None:
            return self._neighbours_without_own(self.augmented, k)
        own = np.arange(len(self.queries)) if self.leave_one_out else None
        rows, distances = exact.nearest_neighbours(
            self.queries, self.gallery, k=k, distance=self.distance, own_rows=own
        )
        return rows, (-distances if self.distance == "dot" else 1 - distances)

    def vectors(self, part: slice, rows: np.ndarray) -> np.ndarray:
        """(B, m, d) the gallery images `rows` (B, m) as the queries of a part (B of them) may see them."""
        found = self.gallery[rows]
        if self.augmented is not None:
            own = np.arange(part.start, part.start + len(rows))
            query, column = np.nonzero(self.augmented.saw(rows, own))
            found[query, column] = self.augmented.without(rows[query, column], own[query])
        return found

    def _neighbours_without_own(self, augmented: Augmented, k: int) -> tuple[np.ndarray, np.ndarray]:
        """As `neighbours`, where some gallery images differ from query to query.

        Those that a query's own image has moved are measured as they are without it. The rest come from a search that
        ignores them.
        """
        moved, starts = augmented.seeing()
        counts, every = np.diff(starts), np.arange(len(self.queries))
        rows = np.empty((len(every), k), np.int64)
        similarities = np.empty((len(every), k), np.float32)
        unmoved = exact.neighbour_blocks(
            self.queries,
            self.gallery,
            k=k,
            distance="cosine",
            own_rows=every,
            ignored=lambda block, near: augmented.saw(near, every[block]),
            most_ignored=int(counts.max()),
        )
        for block, near, distances in unmoved:
            own = every[block]
            query = np.repeat(np.arange(len(own)), counts[own])
            column = np.arange(len(query)) - np.repeat(np.cumsum(counts[own]) - counts[own], counts[own])
            image = moved[starts[own][query] + column]
            others = np.full((len(own), counts[own].max()), len(self.gallery), np.int64)
            far = np.full(others.shape, np.inf, np.float32)
            others[query, column] = image
            vectors = augmented.without(image, own[query])
            far[query, column] = 1 - np.einsum("pd,pd->p", vectors, self.queries[own[query]])
            near, distances = np.concatenate([near, others], axis=1), np.concatenate([distances, far], axis=1)
            rows[block], distances = exact.nearest_first(near, distances, k)
            similarities[block] = 1 - distances
        return rows, similarities


def search_of(queries: Any, gallery: Any = None) -> Search:
    """Embeddings, checked and scaled to length 1, as what is searched in what.

    Args:
        queries: (N, d) embeddings.
        gallery: (G, d) what is searched; None: each query in all others.

    Raises:
        UserError: As `nearest_neighbours`; there is nothing to search in.

    Example:
        >>> search_of(np.eye(3)).neighbours(2)[0].tolist()
        [[1, 2], [0, 2], [0, 1]]
    """
    queries, gallery, _ = exact.check_sides(queries, gallery)
    if gallery is not None:
        return Search(exact.unit_rows(queries), exact.unit_rows(gallery), False)
    if len(queries) < 2:
        raise UserError("one image has no other to be compared with")
    queries = exact.unit_rows(queries)
    return Search(queries, queries, True)


def summed(own: np.ndarray, near: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(B, d) own + sum_i weights_i near_i, of length 1: own (B, d), near (B, m, d), weights (B, m)."""
    return exact.unit_rows(own + np.einsum("bmd,bm->bd", near, weights))


def weights_of(similarities: np.ndarray, alpha: float) -> np.ndarray:
    """max(s, 0)^alpha of each similarity; 1 for all where alpha is 0."""
    return (np.maximum(similarities, 0) ** np.float32(alpha)).astype(np.float32)


def blocks(count: int, numbers_each: int) -> list[slice]:
    """Slices that cover `count` rows, few enough in each for what they gather, `numbers_each` a row.

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
        """(N, D) -> (N, d) float32 of length 1; the embeddings are scaled to length 1 first, as in the fit.

        Raises:
            UserError: They are not (N, D) finite numbers.
        """
        embeddings = exact.check_embeddings(embeddings)
        if embeddings.shape[1] != len(self.mean):
            raise UserError(f"embeddings have {embeddings.shape[1]} dimensions, the whitening {len(self.mean)}")
        return exact.unit_rows((exact.unit_rows(embeddings) - self.mean) @ self.components)


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
    embeddings = exact.unit_rows(exact.check_embeddings(embeddings, "training embeddings"))
    dim = int(dim) or embeddings.shape[1]
    if dim > embeddings.shape[1] or dim >= len(embeddings):
        raise UserError(f"whitening(dim={dim}): training embeddings {embeddings.shape} have fewer components")
    layer = PrincipalComponents(dim, whiten=True, power=power, shrinkage=shrinkage)
    layer.adapt(embeddings)
    return Whitening(np.asarray(layer.mean), np.asarray(layer.components))


def expand_queries(queries: Any, gallery: Any = None, *, k: int = 10, alpha: float = 3.0) -> np.ndarray:
    """Alpha query expansion: q' = q + sum_{i <= k} max(<q, g_i>, 0)^alpha g_i, scaled to length 1.

    g_1 .. g_k are the query's nearest gallery images, all vectors of length 1. With alpha = 0 all weigh as much as the
    query: average query expansion. All-to-all a query's own row is not among them: it counts once, as the query.

    The source takes k = 50 and alpha = 3, for landmarks with many images each. The default here is k = 10, because
    classes of metric learning are often smaller: neighbors beyond the class pull the query away from it.

    Args:
        queries: (N, d) embeddings.
        gallery: (G, d) what they are searched in; None: each in all others.
        k: How many neighbours; all where there are fewer.
        alpha: The exponent, at least 0.

    Returns:
        (N, d) float32. They are to be searched in the gallery as it was.

    Raises:
        ValueError: `k` or `alpha` is out of range.
        UserError: As `nearest_neighbours`.

    Example:
        >>> expand_queries(np.array([[1.0, 0.0]]), np.array([[0.6, 0.8], [-1.0, 0.0]]), k=1, alpha=0).round(3)
        array([[0.894, 0.447]], dtype=float32)

    Source: Radenovic, Tolias and Chum, "Fine-tuning CNN Image Retrieval with No Human Annotation", TPAMI 2019, sec.
    3.4; alpha = 0: Chum et al., "Total Recall", ICCV 2007.
    """
    return expanded_queries(search_of(queries, gallery), k, alpha)


def expanded_queries(search: Search, k: int, alpha: float) -> np.ndarray:
    """(N, d) the expanded queries of a search; see `expand_queries`."""
    k, alpha = integer("k", k, at_least=1), number("alpha", alpha, at_least=0)
    rows, similarities = search.neighbours(k)
    result = np.empty_like(search.queries)
    for part in blocks(len(rows), rows.shape[1] * search.queries.shape[1]):
        weights = weights_of(similarities[part], alpha)
        result[part] = summed(search.queries[part], search.vectors(part, rows[part]), weights)
    return result


def augment_gallery(gallery: Any, *, k: int = 10, alpha: float = 3.0) -> Augmented:
    """Database-side augmentation: g' = g + sum_{i <= k} max(<g, g_i>, 0)^alpha g_i, scaled to length 1.

    g_1 .. g_k are the nearest other images of the gallery, all vectors of length 1. It is done once, before any
    query; a search then costs what it did. The defaults are those of `expand_queries`.

    Args:
        gallery: (G, d) embeddings.
        k: How many neighbours; all where there are fewer.
        alpha: The exponent; 0: all weigh as much as the image.

    Returns:
        The augmented `vectors` (G, d), and how they would be without one of the images.

    Raises:
        ValueError: `k` or `alpha` is out of range.
        UserError: As `nearest_neighbours`.

    Example:
        >>> augment_gallery(np.array([[1.0, 0.0], [0.6, 0.8]]), k=1, alpha=1).vectors.round(3)
        array([[0.943, 0.333],
               [0.832, 0.555]], dtype=float32)

    Source: Arandjelovic and Zisserman, "Three things everyone should know to improve object retrieval", CVPR 2012,
    sec. 5, where all weigh the same; weighted: Gordo et al., IJCV 2017; these weights: Radenovic et al., TPAMI 2019.
    """
    k, alpha = integer("k", k, at_least=1), number("alpha", alpha, at_least=0)
    search = search_of(gallery)
    # One more, which takes the place of an image that is left out.
    rows, similarities = search.neighbours(k + 1)
    k = min(k, rows.shape[1])
    weights = weights_of(similarities, alpha)
    vectors = np.empty_like(search.gallery)
    for part in blocks(len(rows), k * vectors.shape[1]):
        vectors[part] = summed(search.gallery[part], search.gallery[rows[part, :k]], weights[part, :k])
    return Augmented(search.gallery, vectors, rows, weights, k)


def csls_search(search: Search, k: int) -> Search:
    """Return a search by CSLS: the queries with a 1 behind them, the gallery with -r(g) / 2, compared by their product.

    CSLS(q, g) = 2 cos(q, g) - r(q) - r(g), where r(q) is the mean cosine of the query to its k nearest gallery images,
    r(g) that of the gallery image to its k nearest queries. The product is (CSLS + r(q)) / 2, whose order for each
    query is that of CSLS. All-to-all both sides are all images, and none is its own neighbour.

    Source: Conneau et al., "Word Translation Without Parallel Data", ICLR 2018, eq. 7.
    """
    other_side = Search(search.gallery, search.queries, search.leave_one_out)
    density = other_side.neighbours(integer("k", k, at_least=1))[1].mean(axis=1)
    queries = np.concatenate([search.queries, np.ones((len(search.queries), 1), np.float32)], axis=1)
    gallery = np.concatenate([search.gallery, -density[:, None] / 2], axis=1)
    return Search(queries, gallery, search.leave_one_out, "dot", extra_bytes=search.extra_bytes)


@dataclasses.dataclass(frozen=True)
class Reciprocal:
    """What k-reciprocal re-ranking keeps of all images; `encode` makes it.

    Args:
        codes: (n, n) sparse, row i the vector V_i of image i.
        sums: (n,) the sum of each row.
    """

    codes: sparse.csr_array
    sums: np.ndarray

    @property
    def bytes(self) -> int:
        """What it takes."""
        return self.codes.data.nbytes + self.codes.indices.nbytes + self.codes.indptr.nbytes + self.sums.nbytes

    def jaccard(self, image: int, others: np.ndarray, scratch: np.ndarray) -> np.ndarray:
        """Jaccard distances of an image to others, 1 - sum_j min(V_ij, V_gj) / sum_j max(V_ij, V_gj).

        Args:
            image: i.
            others: (m,) the g.
            scratch: (n,) zeros, which it leaves as they were.

        Returns:
            (m,) float32.
        """
        mine, theirs = slice(*self.codes.indptr[image : image + 2]), self.codes[others]
        scratch[self.codes.indices[mine]] = self.codes.data[mine]
        # No row is empty: an image is its own neighbour.
        least = np.add.reduceat(np.minimum(scratch[theirs.indices], theirs.data), theirs.indptr[:-1])
        scratch[self.codes.indices[mine]] = 0
        return 1 - least / (self.sums[image] + self.sums[others] - least)


def encode(images: np.ndarray, k1: int, k2: int) -> Reciprocal:
    """Return the vectors V of all images.

    L_i lists image i itself and then its nearest others. With k-reciprocal neighbours
    R(i, k) = {j in the first k + 1 of L_i : i in the first k + 1 of L_j}:

    1. R*(i) = R(i, k1), joined with R(j, k1 / 2) of each j in it that shares two thirds of it:
       |R(i, k1) and R(j, k1 / 2)| >= 2/3 |R(j, k1 / 2)|.
    2. V_ij = exp(-d(i, j)) for j in R*(i), else 0, divided by their sum; d is the squared Euclidean distance.
    3. Each V_i becomes the mean of V_j over the first k2 of L_i (local query expansion).

    Args:
        images: (n, d) of length 1.
        k1: k1, at most n - 1; half of it is rounded down.
        k2: k2, at most n.
    """
    count = len(images)
    rows, _ = exact.nearest_neighbours(images, k=max(k1, k2 - 1, 1), distance="cosine")
    lists = np.concatenate([np.arange(count)[:, None], rows], axis=1)
    near, half = _mutual(lists[:, : k1 + 1]), _mutual(lists[:, : k1 // 2 + 1])
    sizes = half.sum(axis=1)
    parts = []
    for part in blocks(count, 2 * (k1 + 1) * (k1 // 2 + 1)):
        own = near[part]
        shared = own.multiply(own @ half.T).tocoo()  # of each j in R(i, k1), how much of R(j, k1 / 2) is in R(i, k1)
        joined = 3 * shared.data >= 2 * sizes[shared.col]
        places = (shared.row[joined], shared.col[joined])
        parts.append(own + sparse.csr_array((shared.data[joined], places), shape=own.shape) @ half)
    members = sparse.vstack(parts, format="csr")
    members.sort_indices()
    row, column = np.repeat(np.arange(count), np.diff(members.indptr)), members.indices
    weights = np.empty(len(row), np.float32)
    for part in blocks(len(row), 2 * images.shape[1]):
        weights[part] = np.exp(-np.square(images[row[part]] - images[column[part]]).sum(axis=1))
    weights /= np.bincount(row, weights, count)[row]
    codes = sparse.csr_array((weights, column, members.indptr), shape=(count, count))
    if k2 > 1:
        codes = _listed(lists[:, :k2], np.float32(1 / k2)) @ codes
    return Reciprocal(codes, np.asarray(codes.sum(axis=1), np.float32).ravel())


def _listed(lists: np.ndarray, value: Any) -> sparse.csr_array:
    """(n, n) sparse, `value` at (i, j) for each j in the list of i; lists (n, k)."""
    count, size = lists.shape
    starts = np.arange(count + 1, dtype=np.int32) * size
    data = np.full(count * size, value)
    return sparse.csr_array((data, lists.ravel().astype(np.int32), starts), shape=(count, count))


def _mutual(lists: np.ndarray) -> sparse.csr_array:
    """(n, n) sparse, 1 where i and j are in the lists of each other."""
    listed = _listed(lists, np.int32(1))
    return listed.multiply(listed.T).tocsr()


def k_reciprocal_neighbours(
    queries: Any,
    gallery: Any = None,
    *,
    k: int,
    k1: int = 20,
    k2: int = 6,
    weight: float = 0.3,
    top: int = 200,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k nearest images by d* = (1 - weight) d_J + weight d, where d = |q - g|^2 of vectors of length 1.

    d_J is the Jaccard distance of the vectors V that `encode` makes, 1 - sum min(V_q, V_g) / sum max(V_q, V_g). All-to-
    all the images are those given, each once: the query is one of them, and its own row is left out of its answer.
    With a gallery they are the queries and the gallery together, as in the authors' code: the other queries take part
    in the lists of neighbours, though not in the answer.

    The authors published MATLAB code, and list a version in Python. This function differs from them in two places and
    follows the paper there: both divide each row of d by its largest value, and both ask for more than two thirds
    where eq. 5 has at least two thirds. The paper does not define k1 / 2 for odd k1. MATLAB's `round((k1 + 1) / 2)`
    with the image itself rounds it down, as here; Python's `around(k1 / 2)` rounds up where k1 is 3, 7, 11, ...

    What is exact: V is that of all images, and so is d* of each image that is re-ranked. Only the `top` nearest of each
    query by d are; the rest stay behind them in the order of d. With `top` as large as the gallery it is the whole
    re-ranking. Memory grows with n, not with n^2: n (k1 + top) for the lists and some 100 numbers an image for V.

    Args:
        queries: (N, d) embeddings.
        gallery: (G, d) what they are searched in; None: each in all others.
        k: How many neighbours; all where there are fewer.
        k1: Neighbours that may be reciprocal.
        k2: Images that the local query expansion takes the mean of; 1: none.
        weight: Of d, the paper's lambda, 0 .. 1.
        top: How many of each query's nearest images are re-ranked.

    Returns:
        (N, k) int64 gallery rows and (N, k) float32 distances d*, infinite for those that were not re-ranked.

    Raises:
        ValueError: A number is out of range.
        UserError: As `nearest_neighbours`.

    Example:
        >>> points = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
        >>> k_reciprocal_neighbours(points, k=1, k1=1, k2=1)[0].ravel().tolist()
        [1, 0, 3, 2]

    Source: Zhong, Zheng, Cao and Li, "Re-ranking Person Re-identification with k-reciprocal Encoding", CVPR 2017, eq. 1
    and 3 to 12.
    """
    return Reranked.of(search_of(queries, gallery), k1, k2, weight, top).neighbours(k)


@dataclasses.dataclass(frozen=True)
class Reranked:
    """A search whose answers are re-ranked; see `k_reciprocal_neighbours`."""

    search: Search
    reciprocal: Reciprocal
    weight: float
    top: int

    @classmethod
    def of(cls, search: Search, k1: int, k2: int, weight: float, top: int) -> Reranked:
        """Encode the images of a search.

        Raises:
            ValueError: A number is out of range.
            UserError: The queries were changed and the gallery was not, or the gallery differs from query to query.
        """
        k1, k2, top = (integer(name, n, at_least=1) for name, n in (("k1", k1), ("k2", k2), ("top", top)))
        weight = number("weight", weight, at_least=0, at_most=1)
        if search.augmented is not None or (search.leave_one_out and search.queries is not search.gallery):
            raise UserError("k_reciprocal cannot follow query_expansion or database_augmentation all-to-all")
        images = search.gallery if search.leave_one_out else np.concatenate([search.queries, search.gallery])
        return cls(search, encode(images, min(k1, len(images) - 1), min(k2, len(images))), weight, top)

    @property
    def bytes(self) -> int:
        """What is kept to search in."""
        return self.search.bytes + self.reciprocal.bytes

    def neighbours(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """(N, k) rows, and distances d*; infinite for those that were not re-ranked."""
        rows, similarities = self.search.neighbours(max(k, self.top))
        first = 0 if self.search.leave_one_out else len(self.search.queries)
        result = np.full(rows.shape, np.inf, np.float32)
        top = min(self.top, rows.shape[1])
        scratch = np.zeros(len(self.reciprocal.sums), np.float32)
        for query in range(len(rows)):
            jaccard = self.reciprocal.jaccard(query, rows[query, :top] + first, scratch)
            plain = np.maximum(2 - 2 * similarities[query, :top], 0)
            distances = (1 - self.weight) * jaccard + self.weight * plain
            order = np.lexsort((rows[query, :top], distances))
            rows[query, :top], result[query, :top] = rows[query, order], distances[order]
        return rows[:, :k], result[:, :k]
