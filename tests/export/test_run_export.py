"""What the export of a run refuses before it begins."""

import pytest

from tfdml.errors import UserError
from tfdml.export.run_export import load_run


def test_a_data_dir_that_does_not_exist_is_refused_also_where_the_data_set_needs_none(tmp_path):
    with pytest.raises(UserError, match=r"`data_dir=.*moved`: there is no such folder"):
        load_run(tmp_path, data_dir=str(tmp_path / "moved"))
