"""No password is in what is printed, logged or stored."""

import json
import logging

import pytest

from tests.cli import commands
from tfdml.cli.command_line import RedactingFormatter
from tfdml.errors import UserError, redact, redact_text, user_errors
from tfdml.io.files import printable, write_json
from tfdml.training import Experiment

SECRETS = ("hunter", "s3cr")
ADDRESSES = (
    "pgvector://hunter:s3cr@h/db",
    "pgvector:/hunter:s3cr@h/db",
    "pgvector:hunter:s3cr@h/db",
    "pgvector://hunter:s3cr/et@h/db",
    "postgresql://hunter:s3cr/et@h/db",
    "postgres://h/db?user=hunter&password=s3cr",
    "http:/hunter:s3cr@h:8501/v1/models/cars",
    "https://hunter@h/list.csv",
    "https://h/list.csv?password=s3cr",
    "https://h/list.csv?size=8&PassWd=s3cr#part",
    "https://h/list.csv?access_token=s3cr&size=8",
    "https://h/list.csv?api-key=s3cr",
    "https://h/list.csv?apikey=s3cr;key=hunter",
    "https://h/b?AWSAccessKeyId=hunter&Signature=s3cr&Expires=1",
    "https://h/b?X-Amz-Credential=hunter%2F2026&X-Amz-Signature=s3cr&X-Amz-Security-Token=s3cr",
    "https://h/b?X-Goog-Signature=s3cr",
    "https://h/b?sv=2026&sig=s3cr%3D",
    "abfs://h/b?client_secret=s3cr",
)
PLAIN = (
    "s3://photos/a@b.jpg",
    "lancedb:///data/cars?table=vans&distance=cosine",
    "recall@1: 0.5, map@r: 0.4",
    "mail me@home.org at 12:30",
    "photos/a:1@2.jpg",
    "porch_12:30:45@home.jpg",
    "--dataset_options=monkey=1,keys=2",
    "a list: https://h/a?size=8&table=b and c@d",
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_no_password_of_an_address_is_shown(address, tmp_path):
    text = f"--to={address}: refused, and '{address}'"
    write_json(tmp_path / "card.json", {"model": address, "note": text})
    record = logging.LogRecord("a", logging.INFO, "", 0, "%s", (text,), None)
    with pytest.raises(UserError) as caught, user_errors(OSError, "cannot read: \0", path=address):
        raise OSError(text)
    texts = [
        redact(address),
        redact_text(text),
        printable(address),
        str(UserError(text, uri=address)),
        str(caught.value),
        (tmp_path / "card.json").read_text(),
        RedactingFormatter().format(record),
    ]
    for made in texts:
        assert not [secret for secret in SECRETS if secret in made], made
        assert "h" in made
    assert set(json.loads(texts[-2])) == {"model", "note"}
    with pytest.raises(UserError, match="user or password"):
        Experiment(run_dir="run", data_dir=address)


@pytest.mark.parametrize("text", PLAIN)
def test_other_text_stays_as_it_is(text):
    assert redact_text(text) == redact_text(redact_text(text)) == text


@pytest.mark.parametrize(
    "words",
    [
        ["search", "--queries=a.jpg", "--model=b"],
        ["demo", "--model=b"],
        ["index", "--embeddings=a.npz"],
        ["evaluate"],
    ],
)
def test_nor_where_a_command_takes_it_for_a_path(words):
    flag = {"index": "to", "evaluate": "model"}.get(words[0], "gallery")
    for address in ADDRESSES[1:3]:
        status, out, errors = commands.run(*words, f"--{flag}={address}")
        assert status == 2
        assert not [secret for secret in SECRETS if secret in out + errors], errors
