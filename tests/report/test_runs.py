"""A run read from its folder, and its metrics in print."""

import json

import numpy as np
import pytest

from tfdml.errors import UserError
from tfdml.report import read_run
from tfdml.results import QueryValues
from tfdml.run_folder import QUERIES_FILE


def write_folder(path, **result):
    path.mkdir(parents=True)
    (path / "flags.txt").write_text("--dataset=cars196\n--seed=0\n")
    (path / "environment.json").write_text(json.dumps({"tfdml": "0.1"}))
    (path / "metrics.jsonl").write_text('{"epoch": 0, "test": {"recall@1": 0.5}}\n\n')
    (path / "result.json").write_text(json.dumps({"metrics": {"recall@1": 0.5}, **result}))
    ids, labels = np.arange(4, dtype=np.uint64), np.array([0, 0, 1, 1])
    QueryValues(ids, labels, "images", {"recall@1": np.full(4, 0.5)}).write(path / QUERIES_FILE)


def test_a_folder_is_read_with_its_seeds(tmp_path):
    write_folder(tmp_path / "run", runs=[{"run": "seed_0"}, {"run": "seed_1"}])
    for seed in range(2):
        write_folder(tmp_path / "run" / f"seed_{seed}")
    run = read_run(tmp_path / "run")
    assert (run.name, run.flags["dataset"], run.environment) == ("run", "cars196", {"tfdml": "0.1"})
    assert run.records("test") == [{"epoch": 0, "recall@1": 0.5}]
    assert [seed.name for seed in run.seeds] == ["seed 0", "seed 1"]
    assert [values.values["recall@1"].mean() for values in run.queries()] == [0.5, 0.5]
    (tmp_path / "run" / "seed_1" / QUERIES_FILE).unlink()
    with pytest.raises(UserError, match="cannot be read"):
        run.queries()


def test_what_is_no_finished_run_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    for content, message in ((None, "no result.json"), ("{", "damaged"), ("{}", "metrics")):
        if content:
            (tmp_path / "run" / "result.json").write_text(content)
        with pytest.raises(UserError, match=message):
            read_run(tmp_path / "run")
