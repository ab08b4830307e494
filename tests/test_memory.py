"""How much memory is free, and what is refused."""

import types

import pytest

from tfdml import memory
from tfdml.errors import UserError


def test_the_machine_and_the_container_both_count(monkeypatch):
    files = {}
    monkeypatch.setattr(memory, "_text", lambda path: files.get(path, ""))
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=4 * 2**20))
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
