"""What is right for a query: `Relevance`, the checked queries of a search, and the protocols of
data sets."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdml.errors import UserError
from tfdml.labels import integer_labels
from tfdml.names import CLASS, clean
from tfdml.retrieval.exact import check_embeddings, check_sides

if TYPE_CHECKING:
    from scipy import sparse

    from tfdml.data.dataset import ImageDataset


def check_labels(labels: Any, count: int, what: str = "labels") -> np.ndarray:
    """`labels` as (count,) int64.

    Raises:
        UserError: Not one per embedding, or refused by `tfdml.labels.integer_labels`.
    """
    array = integer_labels(labels, what)
    if array.shape != (count,):
        raise UserError(
            f"{what} must be one class id per embedding, {count}; got shape {array.shape}"
        )
    return array


def are_names(labels: Any) -> bool:
    """Whether labels are names of classes, or names among ids, and not class ids alone."""
    # As objects, since NumPy makes one text of a number next to a text.
    types = set(map(type, np.asarray(labels, object).flat))
    return any(issubclass(each, (str, bytes)) for each in types)


def ids_or_names(labels: Any, count: int, what: str = "labels") -> np.ndarray:
    """As `check_labels`; names of classes are accepted, too, and made plain by `tfdml.names.clean`.

    Returns:
        (count,) int64 class ids, or objects: strings of a fixed width would all take the memory of
        the longest.
    """
    if not are_names(labels):
        return check_labels(labels, count, what)
    values = np.asarray(labels, object)
    if values.shape not in ((count,), (count, 1)):
        raise UserError(f"{what} must be one name per embedding, {count}; got shape {values.shape}")
    return np.array(clean(values.reshape(-1), CLASS, what), object)


def joined_labels(*sides: np.ndarray) -> np.ndarray:
    """Labels of `ids_or_names` one after the other.

    Raises:
        UserError: Some are ids and others names.
    """
    if len({side.dtype.kind in "iu" for side in sides}) > 1:
        raise UserError(
            "labels are ids (integers) of some images and names of others: give ids of all, or "
            "names of all"
        )
    return np.concatenate(sides)


@dataclasses.dataclass(frozen=True, eq=False)
class _Shared:
    """The gallery rows of each query: those under one of its keys, such as its class or its labels.

    Attributes:
        keys: (N, C) 1 where a query has a key.
        images: (C, G) 1 where a gallery row is under a key.
    """

    keys: sparse.csr_array
    images: sparse.csr_array

    @classmethod
    def of_ids(cls, queries: np.ndarray, gallery: np.ndarray, junk: np.ndarray) -> _Shared:
        """Keys are ids from 0, one for each query and for each gallery row that is not junk."""
        count, rows = 1 + max(queries.max(), gallery.max()), np.flatnonzero(~junk)
        keys = _ones(np.arange(len(queries)), queries, (len(queries), count))
        return cls(keys, _ones(gallery[rows], rows, (count, len(gallery))))

    @classmethod
    def of_lists(cls, lists: Sequence[Any], what: str) -> _Shared:
        """Each query has a key of its own, and a list of gallery rows under it."""
        parts = [np.zeros(0, np.int64)]
        for query, rows in enumerate(lists):
            array = np.asarray(rows)
            if array.size and (array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0):
                raise UserError(
                    f"{what} of query {query} must be rows of the gallery, integers of at least 0"
                )
            parts.append(np.unique(array).astype(np.int64))
        row, own = np.concatenate(parts), np.arange(len(lists))
        key = np.repeat(own, [len(rows) for rows in parts[1:]])
        size = int(row.max(initial=0)) + 1
        return cls(_ones(own, own, (len(lists), len(lists))), _ones(key, row, (len(lists), size)))

    @functools.cached_property
    def _of_image(self) -> sparse.csr_array:
        return self.images.T.tocsr()

    def counts(self) -> np.ndarray:
        if np.diff(self.keys.indptr).max(initial=0) <= 1:
            return self.keys @ np.diff(self.images.indptr).astype(np.int64)
        return np.array([len(self.rows(query)) for query in range(self.keys.shape[0])])

    def contains(self, block: Any, rows: np.ndarray) -> np.ndarray:
        shared = (rows >= 0) & (rows < self.images.shape[1])
        query, column = np.nonzero(shared)
        keys = self.keys[block][query].multiply(self._of_image[rows[query, column]])
        shared[query, column] = np.diff(keys.tocsr().indptr) > 0
        return shared

    def rows(self, query: int) -> np.ndarray:
        keys = self.keys.indices[slice(*self.keys.indptr[query : query + 2])]
        lists = [self.images.indices[slice(*self.images.indptr[key : key + 2])] for key in keys]
        return (
            lists[0]
            if len(lists) == 1
            else np.unique(np.concatenate([[], *lists]).astype(np.int64))
        )


def _ones(row: np.ndarray, column: np.ndarray, shape: tuple[int, int]) -> sparse.csr_array:
    from scipy import sparse

    return sparse.csr_array((np.ones(len(row), np.int32), (row, column)), shape=shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Relevance:
    """Which gallery images are relevant to each query, and which are ignored: those leave its
    ranking.

    Given to `evaluate_retrieval` and its like, for data whose right answers are more than equal
    labels. Made by:

    - `Relevance.classes`: images of the query's class. Those of its camera may be ignored, and
      junk.
    - `Relevance.lists`: rows of the gallery, for each query.
    - `Relevance.levels`: a hierarchy of classes, each level of which is measured by itself.

    Ignored images are taken out of a ranking before ranks are counted. Metrics are as if the query
    were searched in a gallery without them. Whether a query finds itself is no matter of relevance:
    the search leaves it out.

    Attributes:
        labels: (N,) class ids of the queries; None where there are no classes.
        matches: (N,) int64 R of each query: how many gallery images are relevant and not ignored.
            The query itself counts where it is in the gallery; `RetrievalTask.matches` is without
            it.
        most_ignored: The most images that are ignored for one query. A search goes deeper by as
            many.
        by_level: The relevance of each level, by what follows the name of its metrics: `{"": self}`
            without levels, `{"/0": ..., "/1": ...}` with them.

    Example:
        >>> relevance = Relevance.classes([0, 0, 0, 1], not_same=[7, 7, 8, 7])
        >>> embeddings = np.array([[0.0], [0.1], [0.3], [5.0]])
        >>> tfdml.evaluation.evaluate_retrieval(embeddings, relevance=relevance, ks=[1])["recall@1"]
        1.0
    """

    labels: np.ndarray | None
    matches: np.ndarray
    most_ignored: int
    _relevant: Any = None
    _ignored: Any = None
    _junk: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    _size: int | None = None  # of the gallery, where it is known
    _levels: tuple[Relevance, ...] = ()

    @classmethod
    def classes(
        cls,
        labels: Any,
        gallery_labels: Any = None,
        *,
        not_same: Any = None,
        gallery_not_same: Any = None,
        junk: Any = None,
    ) -> Relevance:
        """Return the relevance of equal classes.

        With groups, a gallery image of the query's class **and** group is ignored: it is too easy,
        such as the next frame of one camera. Images of other classes stay, whatever their group.
        This is the rule of Market-1501, MSMT17 and VeRi-776 (groups are cameras), and what
        torchreid and fast-reid compute. The argument `sequence` of Open Metric Learning ignores all
        images of the query's sequence, of other classes too; it is the same where no sequence holds
        images of two classes.

        Args:
            labels: (N,) class ids of the queries.
            gallery_labels: (G,) class ids of the gallery; None: all-to-all.
            not_same: (N,) integer groups of the queries, such as cameras; None: nothing is ignored
                for its group.
            gallery_not_same: (G,) groups of the gallery, given exactly if `not_same` and
                `gallery_labels` are.
            junk: (G,) bool, gallery images that are ignored for every query, such as those of
                Market-1501 with the id -1: `junk=gallery_labels == -1`. A search goes deeper by as
                many: leave them out of a large gallery.

        Raises:
            UserError: Not integers, of other lengths than the labels, or one side's groups are
                missing.
        """
        labels = check_labels(labels, np.size(labels))
        sides = [labels]
        if gallery_labels is not None:
            sides.append(check_labels(gallery_labels, np.size(gallery_labels), "gallery_labels"))
        ids = _common_ids(sides)
        size = len(sides[-1])
        if not size or not len(labels):
            raise UserError("relevance needs a query and a gallery image; there is none")
        junk = np.zeros(size, bool) if junk is None else np.asarray(junk)
        if junk.shape != (size,) or junk.dtype != bool:
            raise UserError(
                f"junk must be one boolean per gallery image, {size}; got {junk.dtype} {junk.shape}"
            )
        relevant = _Shared.of_ids(ids[0], ids[-1], junk)
        matches = relevant.counts()
        most = int(junk.sum())
        ignored = None
        if (gallery_not_same is None) != (not_same is None or gallery_labels is None):
            raise UserError(
                "gallery_not_same goes with gallery_labels and not_same: give all three or not_same"
            )
        if not_same is not None:
            groups = [check_labels(not_same, len(labels), "not_same")]
            if gallery_labels is not None:
                groups.append(check_labels(gallery_not_same, size, "gallery_not_same"))
            pairs = _pairs_of_ids(ids, _common_ids(groups))
            ignored = _Shared.of_ids(pairs[0], pairs[-1], junk)
            counts = ignored.counts()
            matches = matches - counts
            most += int(counts.max())
        return cls(labels, matches, most, relevant, ignored, np.flatnonzero(junk), size)

    @classmethod
    def lists(cls, positives: Sequence[Any], ignored: Sequence[Any] | None = None) -> Relevance:
        """Return the relevance of listed images, such as those of Revisited Oxford and Google
        Landmarks.

        Args:
            positives: Of each of N queries, the gallery rows that are relevant; a list may be
                empty.
            ignored: Of each query, the gallery rows that are ignored; None: none.

        Raises:
            UserError: Not rows, not as many lists as queries, or a row is relevant and ignored.

        Example:
            >>> Relevance.lists([[4, 2], []], ignored=[[0], [1, 3]]).matches
            array([2, 0])
        """
        relevant = _Shared.of_lists(positives, "positives")
        if ignored is None:
            return cls(None, relevant.counts(), 0, relevant)
        if len(ignored) != len(positives):
            raise UserError(
                f"there are {len(positives)} lists of positives and {len(ignored)} of ignored "
                "images"
            )
        irrelevant = _Shared.of_lists(ignored, "ignored images")
        for query in range(len(positives)):
            if len(both := np.intersect1d(relevant.rows(query), irrelevant.rows(query))):
                raise UserError(
                    f"query {query}: row {both[0]} of the gallery is relevant and ignored"
                )
        return cls(
            None, relevant.counts(), int(irrelevant.counts().max(initial=0)), relevant, irrelevant
        )

    @classmethod
    def sets(cls, labels: Any, gallery_labels: Any = None) -> Relevance:
        """Return the relevance of label sets: images that have a label in common.

        Args:
            labels: (N, L) rows of 0 and 1 of the queries, an array or a sparse array of SciPy.
            gallery_labels: (G, L) rows of the gallery; None: all-to-all.

        Raises:
            UserError: Not such rows.

        Example:
            >>> Relevance.sets([[1, 1, 0], [0, 1, 1], [0, 0, 1]]).matches  # with itself
            array([2, 3, 2])
        """
        from scipy import sparse

        sides = [side for side in (labels, gallery_labels) if side is not None]
        sides = [side if sparse.issparse(side) else _columns(side, "label sets") for side in sides]
        keys, images = (
            sparse.csr_array((side > 0).astype(np.int32)) for side in (sides[0], sides[-1].T)
        )
        relevant = _Shared(keys, images)
        return cls(None, relevant.counts(), 0, relevant, _size=sides[-1].shape[0])

    @classmethod
    def levels(cls, labels: Any, gallery_labels: Any = None) -> Relevance:
        """Return the relevance of a hierarchy. Metrics are computed by level: `recall@1/0`,
        `recall@1/1`, ...

        `of` is graded: the share of the levels at which an image has the query's class. `matches`
        counts the images that share any level, which are those of the coarsest.

        Args:
            labels: (N, L) class ids of the queries, the finest level first.
            gallery_labels: (G, L) class ids of the gallery; None: all-to-all.

        Raises:
            UserError: Not integers of two axes, sides of other levels, or a class lies in two
                coarser ones.

        Example:
            >>> Relevance.levels([[0, 0], [1, 0]]).of(slice(0, 1), np.array([[0, 1]]))
            array([[1. , 0.5]])
        """
        sides = [_columns(labels, "labels")]
        if gallery_labels is not None:
            sides.append(_columns(gallery_labels, "gallery_labels"))
        if sides[0].shape[1] != sides[-1].shape[1]:
            raise UserError(
                f"labels have {sides[0].shape[1]} levels, gallery_labels {sides[-1].shape[1]}"
            )
        every = np.unique(np.concatenate(sides), axis=0)
        for level in range(every.shape[1] - 1):
            finer, parents = np.unique(
                np.unique(every[:, level : level + 2], axis=0)[:, 0], return_counts=True
            )
            if (parents > 1).any():
                label = int(finer[parents > 1][0])
                raise UserError(
                    f"class {label} of level {level} lies in {parents.max()} classes of level "
                    f"{level + 1}"
                )
        parts = []
        for level in range(every.shape[1]):
            columns = [side[:, level] for side in sides]
            parts.append(cls.classes(*columns))
        return dataclasses.replace(parts[-1], labels=parts[0].labels, _levels=tuple(parts))

    @property
    def by_level(self) -> Mapping[str, Relevance]:
        """See the class."""
        return {f"/{level}": part for level, part in enumerate(self._levels)} or {"": self}

    def of(self, block: Any, rows: np.ndarray) -> np.ndarray:
        """How relevant gallery images are, whether they are ignored or not.

        Args:
            block: B of the queries, a slice or indices.
            rows: (B, K) rows of the gallery; -1, no row, is not relevant.

        Returns:
            (B, K) bool; with levels float64 from 0 to 1.
        """
        if self._levels:
            return np.mean([level.of(block, rows) for level in self._levels], axis=0)
        return self._relevant.contains(block, rows)

    def ignored(self, block: Any, rows: np.ndarray) -> np.ndarray:
        """Return whether gallery images are ignored: (B, K) bool, with the arguments of `of`."""
        ignored = (
            np.zeros(rows.shape, bool)
            if self._ignored is None
            else self._ignored.contains(block, rows)
        )
        return ignored | np.isin(rows, self._junk) if len(self._junk) else ignored

    def rows_of(self, query: int) -> np.ndarray:
        """Return the gallery rows that are relevant to a query, ignored ones perhaps among them."""
        return self._relevant.rows(query)

    def ignored_rows(self, query: int) -> np.ndarray:
        """Return the gallery rows that are ignored for a query."""
        return (
            self._junk
            if self._ignored is None
            else np.append(self._ignored.rows(query), self._junk)
        )

    def check(self, queries: int, gallery: int) -> None:
        """Raise a `UserError` where this is not the relevance of as many queries in as many gallery
        images."""
        if len(self.matches) != queries:
            raise UserError(
                f"relevance is of {len(self.matches)} queries; there are {queries} query embeddings"
            )
        if self._size is not None and self._size != gallery:
            raise UserError(f"relevance is of {self._size} gallery images; there are {gallery}")
        for rows in (self._relevant, self._ignored):
            if rows is not None and rows.images.shape[1] > gallery:
                raise UserError(
                    f"relevance names row {rows.images.shape[1] - 1} of a gallery of {gallery} "
                    "images"
                )


def _common_ids(sides: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the ids of all sides as places in their sorted union."""
    places = np.unique(np.concatenate(sides), return_inverse=True)[1]
    return np.split(places, [len(sides[0])][: len(sides) - 1])


def _pairs_of_ids(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return an id for each pair of two ids, of one side and of another, if there is one."""
    count = max(int(ids.max()) for ids in second) + 1
    pairs = zip(first, second, strict=True)
    return _common_ids([ids * count + others for ids, others in pairs])


def _columns(labels: Any, what: str) -> np.ndarray:
    array = np.asarray(labels)
    if array.ndim != 2 or not array.shape[1]:
        raise UserError(f"{what} of a hierarchy must be (images, levels); got shape {array.shape}")
    return np.stack([integer_labels(column, what) for column in array.T], axis=1)


@dataclasses.dataclass(frozen=True)
class RetrievalTask:
    """Checked queries and what they are searched in; made by `retrieval_task`.

    Attributes:
        queries: (N, d).
        labels: (N,) class ids of the queries; None where there are no classes.
        gallery: (G, d) what is searched; the queries themselves for all-to-all.
        own_rows: (N,) the gallery row of each query itself, which is left out of its ranking; None:
            there is none.
        relevance: What is relevant.
    """

    queries: np.ndarray
    labels: np.ndarray | None
    gallery: np.ndarray
    own_rows: np.ndarray | None
    relevance: Relevance

    @property
    def all_to_all(self) -> bool:
        """Whether the queries search one another."""
        return self.gallery is self.queries and self.own_rows is not None

    @property
    def available(self) -> int:
        """How many images a query is compared with."""
        return len(self.gallery) - (self.own_rows is not None)

    @functools.cached_property
    def matches(self) -> np.ndarray:
        """(N,) R of every query: how many images there are to find, neither ignored nor the query
        itself."""
        if self.own_rows is None:
            return self.relevance.matches
        every, own = slice(None), self.own_rows[:, None]
        itself = (self.relevance.of(every, own) > 0) & ~self.relevance.ignored(every, own)
        return self.relevance.matches - itself[:, 0]

    @property
    def answerable(self) -> np.ndarray:
        """(N,) bool: queries with an image of their class to find."""
        return self.matches > 0

    @functools.cached_property
    def by_level(self) -> dict[str, RetrievalTask]:
        """The task of each level by what follows the name of its metrics; this one, where there are
        no levels."""
        levels = self.relevance.by_level
        if "" in levels:
            return {"": self}
        return {
            end: dataclasses.replace(self, relevance=one, labels=one.labels)
            for end, one in levels.items()
        }

    def depth_with_ignored(self, depth: int) -> int:
        """How many neighbors to search, so that `depth` are left without those that are ignored."""
        return min(depth + self.relevance.most_ignored, self.available)


def retrieval_task(
    embeddings: Any,
    labels: Any = None,
    gallery: Any = None,
    gallery_labels: Any = None,
    own_rows: Any = None,
    relevance: Relevance | None = None,
) -> RetrievalTask:
    """Return the arguments of `evaluate_retrieval`, checked.

    Raises:
        UserError: As `evaluate_retrieval`, for its arrays.
    """
    if relevance is None and labels is None:
        raise UserError("nothing defines what is relevant: give labels, or a Relevance")
    if relevance is None and (gallery is None) != (gallery_labels is None):
        raise UserError(
            "gallery and gallery_labels go together: give both (query/gallery) or none (all-to-all)"
        )
    embeddings, gallery, own_rows = check_sides(embeddings, gallery, own_rows)
    if gallery is None:
        gallery, own_rows = embeddings, np.arange(len(embeddings))
    if labels is not None:
        labels = check_labels(labels, len(embeddings))
    if relevance is None:
        if gallery_labels is not None:
            gallery_labels = check_labels(gallery_labels, len(gallery), "gallery_labels")
        relevance = Relevance.classes(labels, gallery_labels)
    relevance.check(len(embeddings), len(gallery))
    return RetrievalTask(
        embeddings, relevance.labels if labels is None else labels, gallery, own_rows, relevance
    )


def dataset_roles(dataset: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Which images are queries, and which are searched.

    Args:
        dataset: What has `labels` (N,), and `is_query` (N,) bool or None.

    Returns:
        The rows of the queries and those of the gallery; without roles all rows, and None: each
        against all others.

    Example:
        >>> dataset_roles(train)[1] is None
        True
    """
    if dataset.is_query is None:
        return np.arange(len(dataset.labels)), None
    return np.flatnonzero(dataset.is_query), np.flatnonzero(~dataset.is_query)


def images_to_search(dataset: ImageDataset) -> int:
    """Return how many images of a data set a query is compared with."""
    queries, gallery = dataset_roles(dataset)
    return len(queries) - 1 if gallery is None else len(gallery)


def dataset_protocol(embeddings: Any, dataset: ImageDataset) -> dict[str, Any]:
    """Return the arguments by which `evaluate_retrieval` and `retrieval_per_query` measure a data
    set.

    Args:
        embeddings: (N, d), one row per image of `dataset`, in its order.
        dataset: With query and gallery roles (In-Shop) queries are searched in the gallery, else
            all-to-all. With `groups`, such as cameras, images of the query's class and group are
            ignored. A `protocol` may list what is right.

    Returns:
        `embeddings` and `labels`, with roles `gallery` and `gallery_labels`, and with groups or
        lists `relevance`.

    Raises:
        UserError: Embeddings that are empty or not finite; not as many as images.

    Example:
        >>> protocol = dataset_protocol(embeddings, test)
        >>> values = tfdml.evaluation.retrieval_per_query(**protocol, metrics=["map@r"])
        >>> values["map@r"].shape
        (256,)
    """
    queries, gallery = dataset_roles(dataset)
    if len(embeddings) != len(dataset.labels):
        raise UserError(
            f"{len(embeddings)} embeddings for the {len(dataset.labels)} images of {dataset.name}"
        )
    groups, benchmark = getattr(dataset, "groups", None), getattr(dataset, "protocol", None)
    sets = getattr(dataset, "label_rows", None) if benchmark is None else None
    sides = [queries] if gallery is None else [queries, gallery]

    def by_side(values: np.ndarray, name: str) -> dict[str, np.ndarray]:
        return {
            f"{start}{name}": values[rows]
            for start, rows in zip(("", "gallery_"), sides, strict=False)
        }

    labels = by_side(dataset.labels, "labels")
    protocol: dict[str, Any] = {"embeddings": embeddings, **labels}
    if gallery is not None:
        embeddings = check_embeddings(embeddings)
        protocol["embeddings"] = embeddings[queries]
        protocol["gallery"] = embeddings[gallery]
    if groups is not None:
        protocol["relevance"] = Relevance.classes(**labels, **by_side(groups, "not_same"))
    if sets is not None:
        protocol["relevance"] = Relevance.sets(*(sets[rows] for rows in sides))
    if benchmark is not None and benchmark.lists is not None:
        query_ids, gallery_ids = benchmark.ids[queries], benchmark.ids[sides[-1]]
        rows = [_listed_rows(lists, query_ids, gallery_ids) for lists in benchmark.lists]
        protocol["relevance"] = Relevance.lists(*rows)
    return protocol


def _listed_rows(
    lists: Mapping[int, Sequence[int]], query_ids: np.ndarray, gallery_ids: np.ndarray
) -> list[list[int]]:
    """Return of each query the rows of the gallery whose ids are in its list."""
    row_of = {int(image): row for row, image in enumerate(gallery_ids)}
    listed = []
    for query in query_ids.tolist():
        ids = [int(image) for image in lists.get(int(query), ())]
        listed.append([row_of[image] for image in ids if image in row_of])
    return listed
