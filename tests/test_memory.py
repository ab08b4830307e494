"""How much memory is free, what is refused, and what is returned."""

import multiprocessing
import platform

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


def _returned():
    """How many bytes are returned when every other of many blocks is freed; each is larger than a memory page."""
    bytes(2**21)  # freed at once: glibc then keeps blocks of up to this size
    memory.return_freed_blocks()
    blocks = [b"1" * 300_000 for _ in range(400)]
    before = psutil.Process().memory_info().rss
    for block in range(0, len(blocks), 2):
        blocks[block] = b""
    return before - psutil.Process().memory_info().rss


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator keeps freed blocks in its own way")
def test_freed_blocks_between_used_ones_are_returned(monkeypatch):
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        assert pool.apply(_returned) > 50_000_000
