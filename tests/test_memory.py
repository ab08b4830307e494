"""How much memory is free, what is refused, what is returned, and how threads share it."""

import platform
import subprocess
import sys
import types

import psutil
import pytest

from tfdml import memory
from tfdml.errors import UserError


def test_the_machine_and_the_container_both_count(monkeypatch):
    files = {}
    monkeypatch.setattr(memory, "_text", lambda path: files.get(path, ""))
    assert memory.free_memory() == float("inf")
    files["/proc/meminfo"] = "MemTotal: 9000 kB\nMemAvailable: 4096 kB\n"
    assert memory.free_memory() == 4 * 2**20
    files["/sys/fs/cgroup/memory.max"] = "3000000\n"
    files["/sys/fs/cgroup/memory.current"] = "2000000\n"
    assert memory.free_memory() == 1_000_000
    # What is cached of files is free for the asking.
    files["/sys/fs/cgroup/memory.stat"] = "anon 1\nactive_file 300000\ninactive_file 200000\nfile_mapped 7\n"
    assert memory.free_memory() == 1_500_000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert memory.free_memory() == 4 * 2**20


def test_what_does_not_fit_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 2.0 * 2**30)
    memory.require_memory(2 * 2**30, "this", "do less")
    with pytest.raises(UserError) as caught:
        memory.require_memory(5000 * 2**30, "this", "do less")
    assert str(caught.value) == "this would take 5,000.0 GB of memory, and 2.0 GB are free: do less"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator keeps freed blocks in its own way")
def test_freed_blocks_between_used_ones_are_returned():
    # Small ones, which malloc takes from its heap; every other stays in use, and a gap is larger than a memory page.
    blocks = [bytes(60_000) for _ in range(4_000)]
    for block in range(0, len(blocks), 2):
        blocks[block] = b""
    before = psutil.Process().memory_info().rss
    memory.return_freed_memory()
    assert before - psutil.Process().memory_info().rss > 60_000_000


# Prints how many arenas six threads at once have allocated from.
_ARENAS = """
import ctypes, tempfile, threading
libc = ctypes.CDLL(None)
libc.mallopt(*{arguments})
everyone = threading.Barrier(6)
def work():
    kept = [bytearray(3_000) for _ in range(50)]
    everyone.wait()
threads = [threading.Thread(target=work) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fopen.restype = ctypes.c_void_p
with tempfile.NamedTemporaryFile("r") as file:
    stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(file.read().count("<heap nr="))
"""


def _given_to_malloc(monkeypatch):
    given = []
    with monkeypatch.context() as patch:
        library = types.SimpleNamespace(mallopt=lambda *arguments: given.append(arguments))
        patch.setattr(memory.ctypes, "CDLL", lambda name: library)
        memory.share_arenas()
    return given


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator has no arenas")
def test_threads_share_few_arenas_unless_the_environment_says_how_many(monkeypatch):
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    (arguments,) = _given_to_malloc(monkeypatch)
    script = _ARENAS.format(arguments=arguments)
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "2\n"
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    assert not _given_to_malloc(monkeypatch)
