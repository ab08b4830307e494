"""bin/export --gallery: from a finished run to a retriever, in one command."""

import json

import numpy as np
import pytest
import tensorflow as tf

DATA = ["--gallery_dataset=glyphs", "--gallery_dataset_options=images_per_class=4, size=32"]


@pytest.mark.slow
def test_a_run_becomes_a_retriever_of_a_data_set(finished_run, command, tmp_path):
    out = tmp_path / "retriever"
    done = command("export", f"--run_dir={finished_run}", "--gallery=made", *DATA, f"--out={out}")
    assert done.returncode == 0, done.stderr[-3000:]
    # The run's embedder is compared with its SavedModel before a gallery is embedded with it.
    assert "cosine min 1.000000" in done.stdout
    assert f"version: {out / '1'}" in done.stdout
    card = json.loads((out / "1" / "retriever.json").read_text())
    served = tf.saved_model.load(str(out / "1"))
    pixels = np.random.default_rng(0).integers(0, 255, (40, 40, 3)).astype("uint8")
    image = tf.io.encode_png(pixels)[None]
    found = served.signatures["search_bytes"](image_bytes=image, k=tf.constant(3))
    assert f"{card['items']:,} items of {card['classes']:,} classes, exact" in done.stdout
    assert found["ids"].shape == (1, 3)
    assert np.all(np.diff(found["distances"].numpy()) >= 0)
    assert not list(tmp_path.glob("retriever/.partial*"))
