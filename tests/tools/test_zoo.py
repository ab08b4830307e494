"""The zoo: what it packs, lists and refuses."""

import hashlib
import json
import shutil
import subprocess
import tarfile

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdml.errors import UserError
from tfdml.version import __version__
from tools import zoo


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "required: --out"),
        (["--out=zoo", "--models=lions"], "--models=lions: must be of glyphs, omniglot, cars_small"),
        (["--out=zoo", "--models=omniglot"], "name it by --data=omniglot:FOLDER"),
        (["--out=zoo", "--models=omniglot", "--data=omniglot:/no/such"], "--data=omniglot:/no/such: there is no such"),
        (["--out=zoo", "--data=birds:/data"], "--data=birds:/data: write NAME:FOLDER, with one of cars196, omniglot"),
        (["--out=zoo", "--models=cars_small", "--data=cars196:."], "--weights is missing"),
        (["--out=zoo", "--models=cars_small", "--data=cars196:.", "--weights=no.h5"], "--weights=no.h5: there is no"),
        (["--out=zoo", "--data=omniglot:."], "--data=omniglot:. has no effect"),
        (["--out=gs://bucket/zoo"], "`out=gs:/bucket/zoo`: only local"),
    ],
)
def test_what_cannot_be_built_is_one_line(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        zoo.main(flags)
    assert end.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_a_dry_run_names_the_flags_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = f"--data=omniglot:{tmp_path}"
    zoo.main(["--out=zoo", "--models=glyphs,omniglot", data, "--dry_run"])
    said = capsys.readouterr().out
    assert "would train glyphs in runs/zoo/glyphs by --flagfile=configs/quickstart.flags" in said
    assert f"--flagfile=configs/small/omniglot_recipe.flags --data_dir={tmp_path}" in said
    assert not list(tmp_path.iterdir())


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds precious\.txt, which is none of the zoo's"):
        zoo.read_listing(tmp_path)
    with pytest.raises(UserError, match="is no folder"):
        zoo.read_listing(tmp_path / "precious.txt")
    (tmp_path / "precious.txt").unlink()
    for text in ("[]", "{", '{"glyphs": {"archive": 3}}'):
        (tmp_path / "zoo.json").write_text(text)
        with pytest.raises(UserError, match=r"zoo\.json"):
            zoo.read_listing(tmp_path)


@pytest.mark.slow
def test_an_archive_holds_all_that_its_users_need(finished_run, tmp_path):
    entry = zoo.Entry("configs/quickstart.flags", "Tiny characters", "Free to use.", formats=("saved_model", "onnx"))
    runs, out = tmp_path / "runs", tmp_path / "zoo"
    shutil.copytree(finished_run, runs / "tiny")
    out.mkdir()
    known = zoo.build("tiny", entry, [], runs, out)
    zoo.write_listing(out, {"tiny": known})
    assert zoo.read_listing(out) == {"tiny": known}
    archive = out / f"tiny-{__version__}.tar.gz"
    assert known["bytes"] == archive.stat().st_size
    sums = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=out, capture_output=True, text=True, check=False)
    assert sums.stdout == f"{archive.name}: OK\n"
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    folder = tmp_path / "unpacked" / "tiny"
    card, result = (json.loads(path.read_text()) for path in (folder / "model_card.json", runs / "tiny/result.json"))
    assert card["license"] == "Free to use."
    assert known["recall@1"] == card["metrics"]["recall@1"] == result["metrics"]["recall@1"]
    for artifact in card["artifacts"].values():
        for name, file in artifact["files"].items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == file["sha256"]
    said = (folder / "README.md").read_text()
    _, low, high, _ = result["intervals"]["recall@1"]
    between = f"{100 * low:.1f} to {100 * high:.1f}"
    assert f"| recall@1 | {100 * known['recall@1']:.1f} | {between} |" in said
    assert "Free to use." in said
    assert "`onnx/model.onnx`" in said
    assert str(tmp_path) not in said + (folder / "flags.txt").read_text() + json.dumps(card)

    embedder = keras.saving.load_model(folder / "embedder.keras")
    images = np.random.default_rng(0).integers(0, 256, (1, 40, 40, 3), np.uint8)
    signature = tf.saved_model.load(str(folder)).signatures["serving_default"]
    served = signature(image_bytes=tf.constant([tf.io.encode_png(images[0]).numpy()]))["embedding"]
    assert served.shape == (1, embedder.embedding_dim)

    # Whenever it is packed.
    before = archive.read_bytes()
    zoo._write(archive, folder, "tiny")
    assert archive.read_bytes() == before
