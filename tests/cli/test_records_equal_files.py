"""A whole data set, prepared and trained from records, gives bit by bit what its files give."""

import json

import numpy as np
import pytest

from tfdml.training.checkpoints import list_checkpoints


def _trained(command, flags, folder, *data):
    done = command("train", *flags, *data, f"--run_dir={folder}", "--noreport", timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(list_checkpoints(folder / "checkpoints")[-1]) as file:
        arrays = {name: file[name] for name in file.files if name != "state"}
    return arrays, json.loads((folder / "result.json").read_text())["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cars196", "omniglot"])
def test_training_from_records_equals_training_from_files(name, shared_data, command, tiny_flags, tmp_path):
    source = [f"--dataset={name}", f"--data_dir={shared_data / 'data' / name}"]
    prepared = command("prepare", *source, f"--out={tmp_path / 'records'}", "--shard_mb=32", timeout=600)
    assert prepared.returncode == 0, prepared.stderr[-3000:]
    flags = [flag for flag in tiny_flags if "dataset" not in flag]
    flags += ["--augmentation=random_resized_crop", "--cache=false", "--flip=true", "--evaluate_every=0"]
    from_files, expected = _trained(command, flags, tmp_path / "files", *source)
    records = ["--dataset=records", f"--data_dir={tmp_path / 'records'}"]
    from_records, measured = _trained(command, flags, tmp_path / "from_records", *records)
    assert measured == expected
    assert set(from_records) == set(from_files)
    for key, values in from_files.items():
        np.testing.assert_array_equal(from_records[key], values)
