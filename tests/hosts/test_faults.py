"""Runs on two hosts that fail."""

import pytest

from tests.hosts import faults, network

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(network.reason_against()), reason=network.reason_against() or "none"),
]


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    return faults.Trial(tmp_path_factory.mktemp("hosts"))


@pytest.mark.parametrize("name", ["kill_chief", "cut_in_checkpoint", "other_version"])
def test_every_host_ends_with_a_line_and_the_run_resumes_to_the_same_end(trial, name):
    fault, seen = faults.FAULTS[name], trial.run(name)
    for status, line, wanted in zip(seen["statuses"], seen["lines"], fault.lines, strict=True):
        assert status == (-9 if wanted is None else 2), seen
        if wanted is not None:
            assert line.startswith("train: error: "), line
            assert wanted in line
    if fault.resumed:
        assert seen["resumed"] == [0] * fault.resumed, seen
        assert seen["difference"] < 1e-5
