"""Wrong command lines: each ends in one clear line and status 2, and leaves nothing on disk."""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cli.commands import NAMES, load, write_embedder, write_noise
from tests.cli.conftest import TINY

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Photos, and files that commands read."""
    photos, files = tmp_path_factory.mktemp("photos"), tmp_path_factory.mktemp("files")
    write_noise(photos, "ab", 4)
    write_embedder(files / "embedder.keras")
    vectors = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    np.savez(files / "vectors.npz", embeddings=vectors, labels=np.arange(8) // 2)
    return {"photos": photos, "files": files}


# Values that have been the end of many a program. None names what a command could write to.
NASTY = [
    "", "nan", "inf", "-inf", "-1", "0", "1", "1e400", "-0.5", "99999999999999999999", "true",
    "maybe", "none", "é",
    "a\udcff", "x" * 300, "a,b", ",", "(", "[1]", "x(y=z)", "%s", "{}", "'", "\n", "rest://localhost:1/x",
    "/no/folder/x",
]  # fmt: skip
# What else a command is given; with them it writes nothing, or nothing but what is asked for here.
BASE = {
    "train": [*TINY, "--run_dir=run", "--dry_run"],
    "evaluate": ["--model={files}/vectors.npz"],
    "prepare": ["--dataset=folder", "--data_dir={photos}", "--check_only"],
    "search": ["--gallery={files}/vectors.npz", "--queries={files}/vectors.npz"],
    "export": ["--run_dir={files}/no_run", "--out=models"],
    # What these read is not there, as they would write a folder, or serve.
    "embed": ["--model={files}/none", "--dataset=folder", "--data_dir={photos}", "--out=out"],
    "index": ["--embeddings={files}/none.npz", "--to=lancedb://{files}/gallery"],
    "audit": ["--embeddings={files}/none.npz", "--out=audit"],
    "cluster": ["--embeddings={files}/none.npz", "--held_out={files}/none.npz", "--out=out.csv"],
    "demo": ["--model={files}/embedder.keras", "--gallery={files}/none.npz", "--port=0"],
    "serve": ["--model={files}/none"],
}


@given(st.sampled_from(sorted(NAMES)), st.data())
@settings(
    max_examples=150, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
def test_any_flag_with_any_value_ends_in_one_line_or_is_accepted(
    commands, places, tmp_path, monkeypatch, command, data
):
    monkeypatch.chdir(tmp_path)
    names = sorted(set(load(command).flags) - {"dry_run"})
    chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    arguments = [f"--{name}={data.draw(st.sampled_from(NASTY))}" for name in chosen]
    before = set(os.listdir())
    base = [word.format(**places) for word in BASE[command]]
    status, _, errors = commands.run(command, *base, *arguments)
    if status:
        lines = errors.strip().splitlines()
        assert status == 2, errors
        assert lines[-1].startswith(f"{command}: error: "), errors
        assert sum("error: " in line for line in lines) == 1, errors
    asked = {
        argument.split("=", 1)[1]
        for argument in arguments
        if argument.startswith(("--json=", "--report="))
    }
    assert set(os.listdir()) - before <= asked
