"""The order of candidates, and when there are enough of them."""

import numpy as np
import pytest

from tfdml.retrieval.address import Address
from tfdml.retrieval.database import GalleryDatabase
from tfdml.retrieval.ranking import ranked
from tfdml.retrieval.rows import Rows


class Rounding(GalleryDatabase):
    """A database that ranks by |q|^2 + |g|^2 - 2 q g in float32, which far from the origin is noise."""

    def _open(self):
        self.fetched = []

    def _create(self, about):
        pass

    def _upsert(self, rows):
        self.held = rows

    def _nearest(self, vectors, k, conditions):
        self.fetched.append(k)
        lengths = np.einsum("md,md->m", self.held.vectors, self.held.vectors)
        answers = []
        for query in vectors:
            far = np.float32(query @ query) + lengths - np.float32(2) * (self.held.vectors @ query)
            rows = np.argsort(far, kind="stable")[:k]
            answers.append(Rows([self.held.ids[row] for row in rows], self.held.vectors[rows], {}))
        return answers

    def _close(self):
        pass

    _delete = _count = _rows = _indexes = _optimize = None


def test_candidates_as_near_as_the_database_can_tell_are_all_fetched():
    """The nearest is the last of 40 that the database's rounding leaves in any order."""
    far = np.linspace(0.02, 0.01, 40, dtype=np.float32)
    vectors = np.full((41, 2), 1000, np.float32)
    vectors[:40, 0] += far
    vectors[40] = 0
    with Rounding(Address("lancedb", path="/x", distance="euclidean")) as gallery:
        gallery.upsert([f"{row:02d}" for row in range(41)], vectors)
        found = gallery.search(np.full((1, 2), 1000), k=3)
        assert found.ids.tolist() == [["39", "38", "37"]]
        assert gallery.fetched == [7, 14, 28, 56]
        gallery.fetched.clear()
        assert gallery.search(np.zeros((1, 2)), k=1).ids.tolist() == [["40"]]
        assert gallery.fetched == [5]


@pytest.mark.parametrize(("gap", "settled"), [(0.4e-6, False), (4e-6, True)])
def test_settled_is_a_candidate_beyond_the_rounding(gap, settled):
    """Squared distances of 1 and 1 + gap (|q|^2 + |g|^2), of a query of length 1."""
    query = np.array([1.0, 0.0], np.float32)
    near, beyond = (np.array([1.0, np.sqrt(1 + gap * part)], np.float64) for part in (0, 3))
    rows = Rows(["a", "b"], np.stack([near, beyond]).astype(np.float32), {})
    assert ranked(query, rows, 1, "sqeuclidean")[2] is settled
