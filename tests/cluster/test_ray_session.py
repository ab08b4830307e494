"""What ends when hosts of a cluster are lost, by a Ray that is none."""

import types

import pytest

from tfdml.cluster.ray_session import as_user_error, next_result
from tfdml.errors import UserError


class Pool:
    """Waits for nothing: it has no result so many times, and then `x`."""

    def __init__(self, waits):
        self.waits = waits

    def get_next_unordered(self, timeout):
        self.waits -= 1
        if self.waits >= 0:
            raise TimeoutError
        return "x"


def test_work_that_no_host_can_do_ends():
    def cluster(*hosts):
        """As the module `ray`, with hosts of so many CPUs, or None of one that is lost."""
        nodes = [{"Alive": cpus is not None, "Resources": {"CPU": cpus or 0}} for cpus in hosts]
        return types.SimpleNamespace(nodes=lambda: nodes, exceptions=types.SimpleNamespace(RayError=KeyError))

    with pytest.raises(UserError, match="no host of the cluster has 2 CPUs; start `ray start` there again"):
        next_result(cluster(0, None, 1), Pool(9), cpus=2)
    # Hosts that can do it have all the time.
    assert next_result(cluster(None, 1), Pool(3)) == "x"


def test_an_error_of_a_worker_is_told_from_others():
    assert as_user_error(types.SimpleNamespace(cause=UserError("no such folder"))).args == ("no such folder",)
    assert as_user_error(types.SimpleNamespace(cause=KeyError("x"))) is None
