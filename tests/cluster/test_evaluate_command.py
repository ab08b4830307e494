"""tfdml evaluate --cluster and --quantised."""

import json

import numpy as np
import pytest

from tests.cli.many import run_many
from tests.cluster.test_query_blocks import made


@pytest.mark.slow
def test_the_same_numbers_and_what_a_quantised_gallery_loses(tmp_path):
    pytest.importorskip("ray", reason="pip install 'tfdml[ray]'")
    embeddings, labels = made()
    np.savez(tmp_path / "x.npz", embeddings=embeddings, labels=labels)
    flags = ["--model=x.npz", "--metrics=recall,map@r"]
    one, many, few_bytes, workers, unknown = run_many(
        "evaluate",
        tmp_path,
        [
            [*flags, "--json=one.json"],
            [*flags, "--json=many.json", "--cluster=local", "--workers=2"],
            [*flags, "--json=bytes.json", "--quantised=int8,pq3"],
            [*flags, "--workers=2"],
            [*flags, "--quantised=int3"],
        ],
    )
    for status, _, error in (one, many, few_bytes):
        assert status == 0, error
    assert many[1:] == (one[1].replace("one.json", "many.json"), one[2])
    read = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "many", "bytes")}
    assert read["many"] == read["one"]
    quantised = read["bytes"]["quantised"]
    assert [quantised[kind]["bytes"] for kind in ("float32", "int8", "pq3")] == [48, 12, 3]
    assert quantised["float32"]["recall@1"] == read["one"]["recall@1"]
    assert "recall@1, pq3" in few_bytes[1]
    assert "points lost" in few_bytes[1]
    assert (workers[0], unknown[0]) == (2, 2)
    assert "--workers=2 has no effect" in workers[2]
    assert "unknown quantisation 'int3'" in unknown[2]
