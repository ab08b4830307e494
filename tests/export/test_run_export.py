"""What the export of a run refuses before it begins."""

import pytest

from tfdml.errors import UserError
from tfdml.export.run_export import check_whitening, load_run


def test_a_data_dir_that_does_not_exist_is_refused_also_where_the_data_set_needs_none(tmp_path):
    with pytest.raises(UserError, match=r"`data_dir=.*moved`: there is no such folder"):
        load_run(tmp_path, data_dir=str(tmp_path / "moved"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"dims": 3}, "`whitening` has no argument 'dims'; it has dim, power, shrinkage"),
        ({"dim": -1}, "`whitening`: dim must be an integer of at least 0"),
        ({"power": "full"}, "`whitening`: power must be a number"),
    ],
)
def test_arguments_of_a_whitening_are_checked(arguments, says):
    check_whitening({"dim": 3, "power": 0.5})
    with pytest.raises(UserError, match=says):
        check_whitening(arguments)
