"""What ends when hosts of a cluster are lost, by a Ray that is none."""

import types

import pytest

from tfdml.cluster.ray_session import as_user_error, first_ready
from tfdml.errors import UserError


def test_work_that_no_host_can_do_ends():
    def cluster(*waits, hosts):
        """As the module `ray`: waits for nothing, and has hosts of so many CPUs, or None of one that is lost."""
        ready = iter([*waits, *[[]] * 9])
        nodes = [{"Alive": cpus is not None, "Resources": {"CPU": cpus or 0}} for cpus in hosts]
        return types.SimpleNamespace(wait=lambda *_, **options: (next(ready), []), nodes=lambda: nodes)

    with pytest.raises(UserError, match="no host of the cluster has 2 CPUs; start `ray start` there again"):
        first_ready(cluster(hosts=[0, None, 1]), ["x"], cpus=2)
    # Hosts that can do it have all the time.
    assert first_ready(cluster([], [], [], ["x"], hosts=[None, 1]), ["x"]) == "x"


def test_an_error_of_a_worker_is_told_from_others():
    assert as_user_error(types.SimpleNamespace(cause=UserError("no such folder"))).args == ("no such folder",)
    assert as_user_error(types.SimpleNamespace(cause=KeyError("x"))) is None
