"""A run whose steps alternate between the embedder and RankMI's statistics."""

import json

import numpy as np
import pytest


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_resumed_in_the_middle_of_a_cycle_ends_with_the_same_weights(command, tiny_flags, tmp_path):
    flags = [flag for flag in tiny_flags if not flag.startswith("--objectives")]
    flags += ["--objectives=rank_mi(statistics_steps=2) + 0.5 * contrastive", "--objective_rate=0.01"]
    flags += ["--drop_epochs=1", "--checkpoint_steps=1", "--keep_checkpoints=20", "--noreport"]
    unbroken, resumed = tmp_path / "unbroken", tmp_path / "resumed"
    done = command("train", *flags, f"--run_dir={unbroken}")
    assert done.returncode == 0, done.stderr[-3000:]

    # What a run that is killed after four of its twelve steps leaves.
    (resumed / "checkpoints").mkdir(parents=True)
    for name in ("flags.txt", "environment.json", "checkpoints/step-00000004.npz"):
        (resumed / name).write_bytes((unbroken / name).read_bytes())
    done = command("train", f"--run_dir={resumed}", "--resume")
    assert done.returncode == 0, done.stderr[-3000:]

    expected, actual = (np.load(folder / "checkpoints" / "step-00000012.npz") for folder in (unbroken, resumed))
    assert sorted(actual.files) == sorted(expected.files)
    for name in set(expected.files) - {"state"}:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)
    for before, after in zip(records(unbroken), records(resumed), strict=True):
        assert after.get("train") == before.get("train")
        assert after["test"] == before["test"]
    logged = set(records(unbroken)[-1]["train"])
    assert logged >= {"loss", "rank_mi", "rank_mi_jsd", "rank_mi_beta", "rank_mi_no_root", "contrastive"}
