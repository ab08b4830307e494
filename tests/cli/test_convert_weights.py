"""bin/convert_weights: a file that bin/train takes, or none and one clear line."""

import numpy as np
import pytest

from tests.backbones.test_conversion import assert_converted, random_model, torch_state
from tfdml import backbones


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints") / "googlenet.npz"
    np.savez(path, **torch_state(random_model("googlenet"), "googlenet"))
    return path


@pytest.mark.slow
def test_the_file_fits_the_backbone(checkpoint, command, tmp_path):
    out = tmp_path / "googlenet.weights.h5"
    flags = [f"--from={checkpoint}", "--architecture=googlenet", f"--out={out}"]
    tried = command("convert_weights", *flags, "--dry_run")
    assert tried.returncode == 0, tried.stderr[-3000:]
    assert not list(tmp_path.iterdir())
    done = command("convert_weights", *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    for expected in ("114 arrays, 5,973,552 numbers", "left out, 2: fc.bias, fc.weight", "--backbone=googlenet"):
        assert expected in done.stdout
    assert list(tmp_path.iterdir()) == [out]
    assert_converted(backbones.resolve("googlenet", 64, weights=str(out)).model, random_model("googlenet"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--architecture=googlenet", "--out=x.weights.h5"], "--from is missing"),
        (["--from=x.pth", "--architecture=vgg16", "--out=x.weights.h5"], "bn_inception"),
        (["--from=x.pth", "--architecture=googlenet", "--out=x.h5"], "must end in .weights.h5"),
        (["--from=x.pth", "--architecture=googlenet", "--out=no/x.weights.h5"], "folder does not exist"),
        (["--from=x.pth", "--architecture=googlenet", "--out=x.weights.h5"], "--from=x.pth cannot be read"),
        (["--from=text", "--architecture=googlenet", "--out=there.weights.h5"], "exists already"),
        (["--from={checkpoint}", "--architecture=bn_inception", "--out=x.weights.h5"], "does not fit bn_inception"),
    ],
)
def test_wrong_input_is_one_clear_line_and_writes_nothing(flags, says, checkpoint, command, tmp_path):
    (tmp_path / "text").write_text("not a checkpoint at all")
    (tmp_path / "there.weights.h5").write_text("precious")
    done = command("convert_weights", *[flag.format(checkpoint=checkpoint) for flag in flags], cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert says in next(line for line in done.stderr.splitlines() if "error:" in line)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text", "there.weights.h5"]
    assert (tmp_path / "there.weights.h5").read_text() == "precious"
