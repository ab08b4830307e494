"""What processes ask of one another, where there is one and where there are several."""

import json
from typing import ClassVar

import numpy as np
import pytest

from tfdml.errors import UserError
from tfdml.training.distributed.devices import join
from tfdml.training.distributed.processes import Processes


def test_one_process_is_its_own_chief(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    alone = join()
    assert (alone.is_chief, alone.alone, alone.part(7)) == (True, True, slice(0, 7))
    assert alone.gather(np.arange(3)).tolist() == [0, 1, 2]
    assert alone.bytes_of_chief(lambda: b"abc") == b"abc"
    with pytest.raises(UserError, match="mended"), alone.ending_together():
        alone.of_chief(lambda: (_ for _ in ()).throw(UserError("to be mended")))


@pytest.mark.parametrize(("total", "count"), [(7, 3), (3, 3), (60502, 4)])
def test_the_parts_of_the_processes_are_the_whole(total, count):
    rows = np.arange(total)
    parts = [rows[Processes(i, ("host",) * count).part(total)] for i in range(count)]
    assert np.concatenate(parts).tolist() == rows.tolist()
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_fewer_images_than_processes_are_everybodys():
    assert Processes(2, ("host",) * 3).part(2) == slice(0, 2)


class _Together(Processes):
    """One of several processes, which are asked one after another: each gives what the chief gave before."""

    sent: ClassVar[list] = []

    def gather(self, rows):
        if self.is_chief:
            self.sent.append(rows)
            return rows
        return self.sent.pop(0)


def test_all_have_what_the_chief_found_or_its_error():
    def refuse():
        raise UserError("to be mended")

    chief, other = (_Together(index, ("a", "b")) for index in range(2))
    assert chief.of_chief(lambda: {"found": [1, 2.5]}) == other.of_chief(refuse) == json.loads('{"found": [1, 2.5]}')
    for process in (chief, other):
        with pytest.raises(UserError, match="to be mended"):
            process.of_chief(refuse)
    data = bytes(range(250)) * 3
    assert chief.bytes_of_chief(lambda: data) == other.bytes_of_chief(lambda: b"") == data
    assert not _Together.sent
