"""What ends when hosts of a cluster are lost, by a Ray that is none."""

import collections

import pytest

from tfdml.cluster import ray_session
from tfdml.errors import UserError


class Cluster:
    """As the module `ray`: waits for nothing.

    Args:
        ready: What `wait` returns, call by call; nothing from then on.
        hosts: CPUs by address; None of one that is lost.
    """

    def __init__(self, ready, **hosts):
        self.ready, self.hosts = collections.deque(ready), hosts

    def wait(self, references, num_returns, timeout):
        assert timeout <= 60
        return (self.ready.popleft() if self.ready else [])[:num_returns], []

    def nodes(self):
        return [
            {"NodeManagerAddress": address, "Alive": cpus is not None, "Resources": {"CPU": cpus or 0}}
            for address, cpus in self.hosts.items()
        ]


def test_work_that_no_host_can_do_ends_with_the_names_of_those_that_are_lost():
    cluster = Cluster([], head=0, a=None, b=1, c=None)
    with pytest.raises(UserError, match="no host of the cluster has 2 CPUs: the cluster has lost a, c"):
        ray_session.first_ready(cluster, ["x"], cpus=2)
    # Hosts that can do it have all the time.
    assert ray_session.first_ready(Cluster([[], [], [], ["x"]], a=None, b=1), ["x"]) == "x"


def test_a_host_that_came_back_is_not_lost():
    assert ray_session.lost_hosts(Cluster([], a=1)) == ""
    cluster = Cluster([], a=None)
    cluster.nodes = lambda: [*Cluster([], a=None).nodes(), *Cluster([], a=1, b=None).nodes()]
    assert ray_session.lost_hosts(cluster) == "the cluster has lost b"
