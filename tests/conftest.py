"""What every part of the suite shares: fixtures, which cases are slow, and memory that is given
back."""

import contextlib
import ctypes
import gc
import os
import pathlib
import signal
import sys

import pytest

from tests.support.marks import QUICK_XLA

# Two processes with as many threads each wait for one another in every loop of faiss.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config):
    """Have XLA compile quickly for the slow tests. The quick ones compile as users do."""
    if config.option.markexpr == "slow":
        os.environ.setdefault("XLA_FLAGS", QUICK_XLA)


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """The folder with `data/` and `weights/`: TFDML_TEST_DATA, or `shared` next to the
    repository."""
    named = os.environ.get("TFDML_TEST_DATA")
    folder = (
        pathlib.Path(named) if named else pathlib.Path(__file__).resolve().parents[2] / "shared"
    )
    if not (folder / "data").is_dir():
        pytest.skip("no folder with data/ and weights/: set TFDML_TEST_DATA")
    return folder


@pytest.fixture(params=["float32", "mixed_bfloat16", "mixed_float16"])
def policy(request):
    """Each dtype policy in turn, which holds for the test."""
    from tests.support.mathematics import dtype_policy

    with dtype_policy(request.param):
        yield request.param


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Which cases are quick, and which read real images.

    Of the cases of a test that is marked `one_quick_case`, only the first is quick; of those of a
    file by XLA too.

    XLA (`mode` is `"xla"`) takes a second or two, and its program stays in memory until the process
    ends.
    """
    begun = set()
    for item in items:
        if "shared_data" in item.fixturenames:
            item.add_marker(pytest.mark.shared_data)
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        compiled = any(isinstance(value, str) and value == "xla" for value in parameters)
        if not compiled and item.get_closest_marker("one_quick_case") is None:
            continue
        one_of = item.nodeid.partition("::" if compiled else "[")[0]
        if (one_of, compiled) in begun:
            item.add_marker(pytest.mark.slow)
        begun.add((one_of, compiled))


def pytest_collection_finish():
    """What is imported by now stays: the collector need not go through it after every file. Graphs
    make many objects, few of which are garbage: it looks for them rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


@pytest.fixture(scope="session", autouse=True)
def _hear_signals():
    """Tests send signals to themselves and to children: `nohup` has them ignore SIGHUP, a `&` of a
    shell SIGINT."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)


@pytest.fixture(scope="module", autouse=True)
def _forget_models(request):
    """Give back what files' models and graphs took, once it is worth the second that a collection
    takes."""
    yield
    last = request.session.items[-1].path == request.path
    if not last and "keras" in sys.modules and _resident_mb() > _LEFT_MB[0] + 150:
        sys.modules["keras"].backend.clear_session()  # collects garbage too
        with contextlib.suppress(OSError, AttributeError):  # not glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        _LEFT_MB[0] = _resident_mb()


# What this process held after the last collection.
_LEFT_MB = [0.0]


def _resident_mb() -> float:
    status = pathlib.Path("/proc/self/statm")
    if not status.exists():  # not Linux: collect after each file
        return float("inf")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
