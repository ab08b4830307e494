"""Resumable folders: killed at any moment, damaged at any place, begun as something else."""

import os
import signal

import pytest

from tfdml.errors import UserError
from tfdml.io import files
from tfdml.io.folders import ResumableFolder

PARTS = ("a", "b", "c")


def folder_at(path, **identity):
    return ResumableFolder(path, "out", "letters", 1, {"parts": list(PARTS), **identity})


def content(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def write(path, stop_after=None):
    """Write three parts; the parts that had to be written."""
    folder, written = folder_at(path), []
    with folder.opened():
        if folder.manifest:
            return written
        if folder.plan is None:
            folder.begin({"parts": len(PARTS)})
        for name in PARTS:
            known = folder.part(name)
            if known is None or not folder.has_files(known):
                if len(written) == stop_after:
                    return written
                files.write_whole(folder.path(f"{name}.txt"), name.encode())
                folder.finish_part(name, {"letter": name}, [f"{name}.txt"])
                written.append(name)
        done = [folder.part(name, checked=True) for name in folder.parts()]
        folder.finish({"files": {name: file for known in done for name, file in known["files"].items()}})
    return written


def killed(function, moment):
    """Runs a function in a process that is killed before its call number `moment` that changes the disk."""
    pid = os.fork()
    if pid == 0:
        calls = [0]

        def killing(before):
            def called(*arguments, **options):
                calls[0] += 1
                if calls[0] == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                return before(*arguments, **options)

            return called

        for name in ("fsync", "replace", "unlink", "remove", "rmdir", "mkdir"):
            setattr(os, name, killing(getattr(os, name)))
        try:
            function()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.slow
def test_killed_at_any_moment_it_resumes_to_the_same_folder(tmp_path):
    write(tmp_path / "whole")
    moment = 1
    while killed(lambda moment=moment: write(tmp_path / str(moment)), moment):
        path = tmp_path / str(moment)
        present = content(path) if path.exists() else {}
        recorded = {name for name in PARTS if f"progress/{name}.json" in present}
        assert all(present[f"{name}.txt"] == name.encode() for name in recorded)
        assert not recorded & set(write(path))
        assert content(path) == content(tmp_path / "whole")
        assert write(path) == []
        moment += 1
    assert moment > 20


@pytest.mark.parametrize("data", [None, b"", b"cut"])
def test_a_part_whose_file_is_gone_or_cut_is_written_again(data, tmp_path):
    write(tmp_path / "x", stop_after=2)
    (tmp_path / "x" / "a.txt").unlink()
    if data is not None:
        (tmp_path / "x" / "a.txt").write_bytes(data)
    assert write(tmp_path / "x") == ["a", "c"]


def test_damage_that_keeps_the_size_is_found(tmp_path):
    write(tmp_path / "x", stop_after=2)
    (tmp_path / "x" / "a.txt").write_bytes(b"z")
    with pytest.raises(UserError, match=r"a\.txt is damaged: its SHA-256 is not that in .*; delete .*x to start again"):
        write(tmp_path / "x")


@pytest.mark.parametrize("stop_after", [1, None])
def test_another_identity_is_refused_and_nothing_changes(stop_after, tmp_path):
    write(tmp_path / "x", stop_after)
    before = content(tmp_path / "x")
    folder = folder_at(tmp_path / "x", size=3)
    with (
        pytest.raises(UserError, match=r"^`out=.*x` was begun with something else: size was null and is now 3; name"),
        folder.opened(),
    ):
        pass
    assert content(tmp_path / "x") == before


@pytest.mark.parametrize("name", ["manifest.json", "progress.json"])
@pytest.mark.parametrize("data", ['{"format": "words"}', '{"format": "letters", "version": 2}', "[]", '{"format"', ""])
def test_what_is_of_something_else_or_cut_is_refused(name, data, tmp_path):
    write(tmp_path / "x", stop_after=1)
    (tmp_path / "x" / name).write_text(data)
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        write(tmp_path / "x")


def test_what_is_known_of_a_part_is_checked(tmp_path):
    write(tmp_path / "x", stop_after=1)
    for data, says in (
        ("{", "is damaged"),
        ("{}", "key files must be"),
        ('{"files": {"../b": {}}}', "outside its folder"),
    ):
        (tmp_path / "x" / "progress" / "a.json").write_text(data)
        with pytest.raises(UserError, match=says):
            write(tmp_path / "x")


def test_other_files_and_a_file_in_its_place_are_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"holds other files \(thesis\.tex \.\.\.\)"):
        write(tmp_path)
    with pytest.raises(UserError, match="is a file; name a folder"):
        write(tmp_path / "thesis.tex")


def test_two_at_once(tmp_path):
    with folder_at(tmp_path / "x").opened(), pytest.raises(UserError, match="another process is writing into it"):
        write(tmp_path / "x")
    assert write(tmp_path / "x") == list(PARTS)


def test_in_an_object_store():
    path = "memory://folders/x"
    assert write(path, stop_after=1) == ["a"]
    assert write(path) == ["b", "c"]
    assert files.listing(path) == ["a.txt", "b.txt", "c.txt", "manifest.json"]
