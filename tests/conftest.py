"""What every part of the suite shares: fixtures, which cases are slow, and memory that is given back."""

import gc
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

# Two workers with as many threads each wait for one another in every loop of faiss.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """The folder with `data/` and `weights/`: TFDML_TEST_DATA, or `shared` beside the repository."""
    named = os.environ.get("TFDML_TEST_DATA")
    folder = pathlib.Path(named) if named else pathlib.Path(__file__).resolve().parents[2] / "shared"
    if not (folder / "data").is_dir():
        pytest.skip("no folder with data/ and weights/: set TFDML_TEST_DATA")
    return folder


@pytest.fixture
def small_disk(tmp_path):
    """Makes a disk of so many bytes and returns its folder; where that is not allowed, the test is skipped."""
    made = []

    def make(size):
        folder = tmp_path / f"disk {len(made)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("only an administrator can make a small disk")
        made.append(folder)
        return folder

    yield make
    for folder in made:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the cases of a test that XLA compiles (`mode` is `"xla"`), the first is quick; the others are slow.

    A compilation takes a second or two and its program stays in memory until the process ends.
    """
    compiled = set()
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(isinstance(value, str) and value == "xla" for value in parameters):
            test = item.nodeid.partition("[")[0]
            if test in compiled:
                item.add_marker(pytest.mark.slow)
            compiled.add(test)


def pytest_collection_finish():
    """What is imported by now stays: the collector need not go through it after every file."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _hear_signals():
    """Tests send signals to themselves and to children: `nohup` has them ignore SIGHUP, a `&` of a shell SIGINT."""
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    for number, handler in handlers.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="module", autouse=True)
def _forget_models():
    """Give back what a file's models and graphs took."""
    yield
    if "keras" in sys.modules:
        sys.modules["keras"].backend.clear_session()  # collects garbage too
