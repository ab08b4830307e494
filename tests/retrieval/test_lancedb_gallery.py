"""Indexes of LanceDB: built as the address says, and used."""

import numpy as np
import pytest

from tfdml.errors import UserError


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("ivf_pq", "this index needs 256 rows at least, and there are 2"),
        ("ivf&lists=3", "this index needs 3 rows at least, and there are 2"),
        ("hnsw&lists=3", "this index needs 3 rows at least, and there are 2"),
    ],
)
def test_too_few_rows_for_the_index_are_refused(index, says, databases):
    with databases.gallery("lancedb", index=index) as gallery:
        gallery.upsert(["a", "b"], np.eye(2, 4))
        with pytest.raises(UserError, match=says):
            gallery.optimize()
