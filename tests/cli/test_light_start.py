"""What commands import before their work, in processes of their own."""

import socket

import numpy as np
import pytest

from tests.support.processes import run_python
from tfdml import cli

# Each takes from a tenth of a second to ten.
HEAVY = ("faiss", "jax", "keras", "numpy", "pyarrow", "scipy", "sklearn", "tensorflow")
PROGRAM = f"""
import contextlib, io, sys
from tfdml import cli
for words in {{commands}}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            cli.main(words)
        except SystemExit as end:
            status = end.code
    print(words[0], status, sorted(set({HEAVY}) & set(sys.modules)))
"""


def imported(*commands):
    """What each command line ends with, and what is imported by then."""
    return run_python("-c", PROGRAM.format(commands=list(commands))).stdout.splitlines()


@pytest.mark.parametrize(
    ("flag", "status"), [("--help", 0), ("--nosuchflag=1", 2), ("--flagfile=no/such.flags", 2)]
)
def test_help_and_wrong_flags_import_nothing_heavy(flag, status):
    commands = [[name, flag] for name in cli.STAGES]
    assert imported(*commands) == [f"{name} {status} []" for name in cli.STAGES]


def test_wrong_values_import_nothing_heavy():
    commands = [["train", "--epochs=many"], ["search", "--k=0"], ["index", "--truncate_dim=x"]]
    assert imported(*commands) == ["train 2 []", "search 2 []", "index 2 []"]


@pytest.fixture
def stored(tmp_path):
    """A file of stored embeddings."""
    vectors = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    path = tmp_path / "vectors.npz"
    np.savez(path, embeddings=vectors, labels=np.arange(12) // 3)
    return path


def test_a_search_of_stored_vectors_imports_no_tensorflow(stored):
    line = imported(["search", f"--gallery={stored}", f"--queries={stored}", "--k=2"])
    assert line == ["search 0 ['numpy', 'pyarrow', 'scipy']"]


def test_indexing_of_stored_vectors_imports_no_tensorflow(stored, tmp_path):
    pytest.importorskip("lancedb")
    gallery = f"lancedb://{tmp_path}"
    index = ["index", f"--embeddings={stored}", f"--to={gallery}"]
    search = ["search", f"--gallery={gallery}", f"--queries={stored}", "--k=2"]
    for line in imported(index, search):
        assert " 0 " in line
        assert not {"tensorflow", "keras", "jax"} & set(line.split("'"))


def test_servers_say_what_they_load_before_they_import_keras(tmp_path):
    """The version of a model, what a gallery is, and whether the port is free, take no Keras."""
    pytest.importorskip("starlette")
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "saved_model.pb").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"--port={taken.getsockname()[1]}"
        serve = ["serve", f"--model={tmp_path}", port]
        demo = ["demo", f"--model={tmp_path}", f"--gallery={tmp_path}", port]
        for line in imported(serve, demo):
            assert " 2 " in line
            assert not {"tensorflow", "keras", "jax"} & set(line.split("'"))
