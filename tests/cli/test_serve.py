"""`tfdml serve`: one clear line for what is wrong; tests/web/test_rest.py has what it
answers."""

import socket

import pytest

from tfdml.cli import command_line


@pytest.fixture
def model(tmp_path):
    (tmp_path / "cars" / "1").mkdir(parents=True)
    (tmp_path / "cars" / "1" / "saved_model.pb").touch()
    return tmp_path / "cars"


def test_without_the_extra_the_command_names_it(commands, model, monkeypatch):
    monkeypatch.setattr(command_line.importlib.util, "find_spec", lambda name: None)
    status, _, errors = commands.run("serve", f"--model={model}")
    assert (status, "tfdml[web]" in errors) == (2, True), errors


def test_a_port_that_is_taken_is_named_before_the_model_is_loaded(commands, model):
    pytest.importorskip("starlette")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, _, errors = commands.run("serve", f"--model={model}", f"--port={port}")
    assert status == 2
    assert f"--port={port}: 127.0.0.1 has no such free port" in errors
