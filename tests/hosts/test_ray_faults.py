"""A Ray of several hosts that loses one; `python -m tests.hosts.ray_faults` tries more faults, and prints a table."""

import pytest

from tests.hosts import network, ray_faults

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(network.reason_against()), reason=network.reason_against() or "none"),
]


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    pytest.importorskip("ray", reason="pip install 'tfdml[ray]'")
    folder = tmp_path_factory.mktemp("hosts")
    with ray_faults.RayCluster(folder) as cluster:
        yield ray_faults.RayTrial(folder, cluster)


@pytest.mark.parametrize("name", ["train_node_back", "embed_node_cut"])
def test_a_command_ends_as_stated_and_with_the_result_of_one_process(trial, name):
    fault, seen = ray_faults.FAULTS[name], trial.run(name)
    assert seen["status"] == fault.status, seen
    assert fault.line in seen["log"]
    assert seen.get("resumed", 0) == 0, seen
    assert seen["difference"] < 1e-5
