"""Wrong command lines: each ends in one clear line and status 2, and leaves nothing on disk."""

import os
import pathlib
import shutil

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.cli.commands import NAMES, load
from tfdml import memory
from tfdml.data import pipeline
from tfdml.embeddings import read_embeddings
from tfdml.models import Embedder

pytestmark = pytest.mark.slow

LONG = "x" * 300
# A run of 8 classes x 4 images of 20 px, of which half are trained on.
TRAIN = [
    "--dataset=folder",
    "--data_dir={photos}",
    "--image_size=16",
    "--resize=16",
    "--backbone=conv4(width=4)",
    "--batch_norm=train",
    "--embedding_dim=4",
    "--objectives=am_softmax + jrs",
    "--classes_per_batch=2",
    "--images_per_class=2",
    "--epochs=1",
    "--steps_per_epoch=1",
    "--run_dir=run",
]
MODEL = ["--model={files}/embedder.keras", "--dataset=folder", "--data_dir={photos}"]
VECTORS = ["--model={files}/vectors.npz"]
PREPARE = ["--dataset=folder", "--data_dir={photos}", "--check_only"]
EXPORT = ["--run_dir={files}/no_run", "--out=models"]
GALLERY = ["--gallery={photos}", "--embedder={files}", "--out=models"]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Photos, and files that commands read."""
    photos, files = tmp_path_factory.mktemp("photos"), tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    for name in "abcdefgh":
        (photos / name).mkdir()
        for i in range(4):
            Image.fromarray(rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(photos / name / f"{i}.png")
    embedder = Embedder("conv4", embedding_dim=4, image_size=16)
    embedder.build((None, 16, 16, 3))
    embedder.save(files / "embedder.keras")
    np.savez(files / "vectors.npz", embeddings=rng.normal(size=(8, 3)).astype("float32"), labels=np.arange(8) // 2)
    conv4 = files / "flipped.weights.h5"
    keras.Sequential([keras.Input((16, 16, 3)), keras.layers.Conv2D(4, 3)]).save_weights(conv4)
    damaged = bytearray(conv4.read_bytes())
    for place in range(0, len(damaged), 97):
        damaged[place] ^= 0x10
    conv4.write_bytes(damaged)
    (files / "zeros.pth").write_bytes(b"\0" * 100)
    (files / "binary.flags").write_bytes(bytes(range(256)))
    (files / "unknown.flags").write_text("--epoch=1\n")
    return {"photos": photos, "files": files}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    """Commands run in an empty folder, and on a machine that has 2 GB of memory free."""
    monkeypatch.chdir(tmp_path)
    for module in (memory, pipeline):
        monkeypatch.setattr(module, "free_memory", lambda: 2.0 * 2**30)


def _written(arguments, places):
    return [argument.replace("{photos}", str(places["photos"])).replace("{files}", str(places["files"]))
            for argument in arguments]  # fmt: skip


def _check_one_line(command, status, errors):
    """The status of a mistake, and one line that names it, the last of what was written to the error stream."""
    lines = errors.strip().splitlines()
    assert status == 2, errors
    assert lines[-1].startswith(f"{command}: error: "), errors
    assert len(lines[-1]) > len(f"{command}: error: ")
    assert sum("error: " in line for line in lines) == 1, errors
    assert "Traceback" not in errors


# Batches by --batch_size, in place of TRAIN's classes.
SHUFFLED = [word for word in TRAIN if not word.endswith("_class=2") and not word.startswith("--classes_per_batch")]
SHUFFLED += ["--sampling=shuffle"]
TRAIN_VALUES = [
    # Values that are no values
    ("--seed=1180591620717411303424", "--seed must be at most 2,147,483,647"),
    ("--seed=1.5", "--seed=1.5"),
    ("--flip=maybe", "--flip"),
    ("--cache=maybe", "--cache=maybe: must be one of auto, true, false"),
    ("--learning_rate=nan", "--learning_rate must be a finite number, not nan"),
    ("--learning_rate=1e39", "--learning_rate must be a finite number"),
    ("--holdout_classes=0.999999", "leaves no class to train on"),
    ("--image_size=100", "--resize=16 is smaller than --image_size=100"),
    ("--ks=99999999999", "write integers of 1 to 2,147,483,647"),
    ("--nosuch=1", "nosuch"),
    ("stray", "unexpected argument 'stray'"),
    # Data sets and their options
    ("--dataset=nope", "unknown data set 'nope'"),
    ("--data_dir=/no/folder", "there is no folder /no/folder"),
    ("--dataset_options=test_fraction=nan", "test_fraction must be a number, not 'nan'"),
    ("--dataset_options=foo=1", "has no option 'foo'"),
    ("--dataset_options=test_fraction=0.5, test_fraction=0.6", "is given twice"),
    # Batches
    ("--classes_per_batch=1000", "the data has 4 classes"),
    # Networks
    ("--backbone=conv4(width=true)", "width must be a positive integer, not True"),
    ("--backbone=conv4(width=1000000)", "cannot build backbone 'conv4'"),
    ("--embedding_dim=2000000000", "does not fit the device's memory"),
    ("--weights={files}/flipped.weights.h5", "--weights: "),
    ("--policy=2*grayscale", "its share of the images"),
    # Objectives
    ("--objectives=0*am_softmax", "every term has the factor 0"),
    ("--objectives=1e400*am_softmax", "weight must be a finite number"),
    ("--objectives=jrs", "needs the representation 'class'"),
    ("--objectives=am_softmax(margin=0.1, margin=0.2)", "margin of am_softmax is given twice"),
    ("--objectives=am_softmax(num_classes=3)", "leave num_classes out"),
    ("--objectives=am_softmax(proxies_per_class=100000000000)", "does not fit the device's memory"),
    ("--objectives=contrastive(margin=1e400)", "margin must be a finite number, not inf"),
    ("--objectives=am_softmax + jrs(kernels=[laplace(), laplace(), 3])", "kernels must be of tfdml.kernels"),
    ("--objectives=horde(loss=contrastive, orders=1000000000)", "orders must be at most 100"),
    ("--objectives=horde(loss=contrastive, dim=1000000000000)", "does not fit the device's memory"),
    # Paths
    ("--run_dir=", "--run_dir is missing"),
    (f"--run_dir={LONG}", "File name too long"),
    ("--run_dir=a\udcffb", "is not UTF-8 text"),
    ("--run_dir={photos}", "exists already"),
    ("--run_dir=nothing://bucket/run", "only local folders can be used here"),
    ("--preview=nofile", "name a PNG file"),
    ("--flagfile={files}/binary.flags", "is no UTF-8 text"),
    ("--flagfile={files}/unknown.flags", "epoch"),
]
WRONG = [("train", [*TRAIN, "--dry_run", flag], says) for flag, says in TRAIN_VALUES]
WRONG += [
    ("train", [*TRAIN, "--dry_run", *flags], says)
    for flags, says in [
        (["--objectives=contrastive", "--images_per_class=1"], "learns from pairs of images of one class"),
        (["--classes_per_batch=1"], "jrs learns from pairs of images of different classes"),
        (["--augmentation=multi_resolution", "--min_resolution=inf"], "--min_resolution must be a finite number, not"),
        (["--augmentation=multi_resolution", "--min_resolution=2"], "--min_resolution=2 is above --max_resolution"),
        (["--objectives=horde(loss=triplet) + horde(loss=triplet, name=b)", "--moment_embedder"], "needs one horde"),
    ]
]
WRONG += [
    ("train", [*TRAIN, *flags], says)
    for flags, says in [
        (["--resume"], "holds no run to resume"),
        (["--image_size=100000", "--resize=100000"], "a step on 4 images of --image_size=100000 would take"),
        (["--augmentation=multi_resolution", "--max_resolution=1e6"], "and 2.0 GB are free"),
        (["--images_per_class=1000000000"], "and 2.0 GB are free"),
    ]
]
WRONG += [
    ("train", [*SHUFFLED, "--dry_run", *flags], says)
    for flags, says in [
        (["--objectives=triplet", "--batch_size=1"], "--batch_size=1: triplet learns from pairs"),
        (["--batch_size=1000"], "the data has 16 images"),
    ]
]
WRONG += [
    (command, [*MODEL, *(["--out=out"] if command == "embed" else []), *flags], says)
    for command in ("embed", "evaluate")
    for flags, says in [
        (["--model="], "--model is missing"),
        (["--model=no/such"], "--model=no/such: there is no such file or folder"),
        (["--model={photos}"], "there is no embedder at"),
        ([f"--model={LONG}"], LONG),
        (["--model=x\udcff"], "is not UTF-8 text"),
        (["--model=ftp://host/name"], "ftp"),
        (["--model=http://localhost:1/v1/models/x"], "localhost:1"),
        (["--dataset="], "--dataset or --features is missing"),
        (["--dataset=nope"], "unknown data set 'nope'"),
        (["--batch_size=0"], "--batch_size=0"),
        (["--split=foo"], "--split=foo"),
    ]
]
WRONG += [
    ("embed", [*MODEL, *flags], says)
    for flags, says in [
        ([], "--out is missing"),
        ([f"--out={LONG}"], "File name too long"),
        (["--out={files}/zeros.pth"], "is a file"),
        (["--out={photos}"], "holds other files"),
        (["--out=out", "--dtype=foo"], "--dtype=foo"),
        (["--out=nothing://bucket/embeddings"], "nothing://bucket/embeddings cannot be reached: Protocol not known"),
    ]
]
WRONG += [
    ("embed", ["--model=x", "--out=x", "--cluster=local"], "--input is missing"),
    ("embed", ["--model=x", "--out=x", "--actors=2"], "--actors=2 has no effect: it needs --cluster"),
]
# Before it is asked where the images are.
WRONG += [
    (command, ["--model=no/such", *out], "--model=no/such: there is no such file or folder")
    for command, out in (("embed", ["--out=out"]), ("evaluate", []))
]
WRONG += [
    ("evaluate", [*VECTORS, *flags], says)
    for flags, says in [
        (["--metrics="], "--metrics= names nothing"),
        (["--metrics=foo"], "unknown metric 'foo'"),
        (["--metrics=recall@0"], "unknown metric 'recall@0'"),
        (["--metrics=precision@99"], "precision@99 needs 99"),
        (["--ks="], "--ks= names nothing"),
        (["--ks=1,8"], "there are 7 images to search in; choose e.g. --ks=1"),
        (["--json={photos}"], "cannot be written"),
        (["--json=no/folder/x.json"], "cannot be written"),
        (["--report={photos}"], "cannot be written"),
        (["--report=x.html"], "--report shows images"),
        (["--compare="], "--compare= names nothing"),
        (["--compare=a,b"], "takes the place of --model"),
        (["--compare=a,b", "--model="], "a is no folder"),
        (["--compare=a", "--model="], "a comparison needs 2 to 8 runs; got 1"),
        (["--distance=foo"], "--distance=foo"),
        (["--intervals=classes", "--metrics=nmi"], "no value per query to resample"),
    ]
]
WRONG += [
    ("prepare", [*PREPARE, *flags], says)
    for flags, says in [
        (["--nocheck_only", "--out=out", "--shrink=-1"], "--shrink must not be negative"),
        (["--max_pixels=-1"], "--max_pixels must be at least 1"),
        (["--dataset="], "--dataset is missing"),
        (["--data_dir=/no/folder"], "there is no folder"),
        (["--nocheck_only", f"--out={LONG}"], "File name too long"),
        (["--nocheck_only", "--out={files}/zeros.pth"], "zeros.pth"),
        (["--download", "--data_dir="], "--data_dir is missing"),
    ]
]
WRONG += [
    ("export", [*EXPORT, *flags], says)
    for flags, says in [
        ([], "no_run"),
        (["--run_dir="], "--run_dir is missing"),
        (["--out="], "--out is missing"),
        (["--data_dir=/no/folder"], "--data_dir=/no/folder: there is no such folder"),
        (["--formats="], "format"),
        (["--formats=foo"], "foo"),
        (["--images=-1"], "--images=-1"),
        (["--min_cosine=nan"], "--min_cosine=nan"),
        (["--max_recall_drop=inf"], "--max_recall_drop=inf"),
        (["--max_pixels=0"], "--max_pixels=0"),
        ([f"--run_dir={LONG}"], LONG),
    ]
]
WRONG += [
    ("export", [*GALLERY, *flags], says)
    for flags, says in [
        (["--dry_run"], "files"),
        (["--embedder="], "--gallery needs the embedder"),
        (["--gallery=/no/folder"], "/no/folder"),
        (["--gallery_dataset=nope"], "unknown data set 'nope'"),
        (["--formats=litert"], "--gallery makes a SavedModel"),
    ]
]
WRONG += [("export", ["--run_dir=x", "--out=y", "--dry_run"], "no embedder")]


def _named(case):
    command, arguments, _ = case
    return f"{command} {ascii(arguments[-1])[:60]}"


@pytest.mark.parametrize(("command", "arguments", "says"), WRONG, ids=[_named(case) for case in WRONG])
def test_a_wrong_command_line_is_told_in_one_line(commands, places, command, arguments, says):
    status, _, errors = commands.run(command, *_written(arguments, places))
    _check_one_line(command, status, errors)
    assert says in errors.strip().splitlines()[-1]
    assert os.listdir() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_image_that_may_not_be_read_is_named(commands, places, tmp_path):
    image = places["photos"] / "a" / "0.png"
    image.chmod(0)
    try:
        for command, arguments in (("train", [*TRAIN, "--dry_run"]), ("embed", [*MODEL, "--out=out", "--split=all"])):
            status, _, errors = commands.run(command, *_written(arguments, places))
            _check_one_line(command, status, errors)
            assert "unreadable (no permission)" in errors
    finally:
        image.chmod(0o644)
    assert os.listdir(tmp_path) == []


def _flip_a_byte(image):
    content = bytearray(image.read_bytes())
    content[45] ^= 0xFF  # within the pixels: the checksum of their chunk is wrong
    image.write_bytes(content)


BAD_IMAGES = {
    "a wrong checksum": (_flip_a_byte, "cannot be decoded"),
    "a dangling link": (lambda image: (image.unlink(), image.symlink_to("/no/such.png")), "missing"),
}


@pytest.mark.parametrize("fault", BAD_IMAGES)
def test_a_bad_image_is_named_and_can_be_left_out(fault, commands, places, tmp_path):
    spoil, says = BAD_IMAGES[fault]
    photos = tmp_path / "photos"
    shutil.copytree(places["photos"], photos)
    spoil(photos / "h" / "3.png")
    places = {**places, "photos": photos}
    wrong = [("embed", [*MODEL, "--out=out", "--split=all"]), ("evaluate", [*MODEL, "--ks=1"])]
    if fault != "a wrong checksum":  # what decodes it finds that out, and training reads it when it comes to it
        wrong.append(("train", [*TRAIN, "--dry_run"]))
    for command, arguments in wrong:
        status, _, errors = commands.run(command, *_written(arguments, places))
        _check_one_line(command, status, errors)
        assert "h/3.png" in errors
        assert says in errors
    for command, arguments in wrong[:2]:
        out = ["--out=left_out"] if command == "embed" else []
        status, _, errors = commands.run(command, *_written([*arguments, *out, "--bad_images=skip"], places))
        assert status == 0, errors
    assert len(read_embeddings("left_out")) == 31


def test_the_right_command_lines_beside_them_are_accepted(commands, places):
    for command, arguments in (
        ("train", [*TRAIN, "--dry_run"]),
        ("train", [*TRAIN, "--dry_run", "--seed=2147483647", "--objectives=am_softmax + 0 * jrs"]),
        ("train", [*TRAIN, "--dry_run", "--images_per_class=1", "--objectives=am_softmax"]),
        ("evaluate", VECTORS),
        ("embed", [*MODEL, "--out=out", "--dry_run"]),
        ("prepare", [*PREPARE, "--dry_run"]),
    ):
        status, said, errors = commands.run(command, *_written(arguments, places))
        assert status == 0, errors
        assert said
    assert os.listdir() == []


def test_ks_of_the_default_that_do_not_fit_are_left_out(commands, places):
    status, said, errors = commands.run("evaluate", *_written(VECTORS, places))
    assert status == 0, errors
    assert "recall@4" in said
    assert "recall@8" not in said


# Values that have been the end of many a program. None names what a command could write to.
NASTY = [
    "", "nan", "inf", "-inf", "-1", "0", "1", "1e400", "-0.5", "99999999999999999999", "true", "maybe", "none", "é",
    "a\udcff", LONG, "a,b", ",", "(", "[1]", "x(y=z)", "%s", "{}", "'", "\n", "rest://localhost:1/x", "/no/folder/x",
]  # fmt: skip
# What else a command is given; with them it writes nothing, or nothing but what is asked for here.
BASE = {
    "train": [*TRAIN, "--dry_run"],
    "embed": [*MODEL, "--out=out", "--dry_run"],
    "evaluate": VECTORS,
    "index": ["--embeddings={files}/vectors.npz", "--to=lancedb://{files}/gallery", "--dry_run"],
    "prepare": [*PREPARE, "--dry_run"],
    "search": ["--gallery={files}/vectors.npz", "--queries={files}/vectors.npz"],
    "export": [*EXPORT, "--dry_run"],
    # What these read is not there, as they would write a folder, or serve.
    "audit": ["--embeddings={files}/none.npz", "--out=audit"],
    "demo": ["--model={files}/embedder.keras", "--gallery={files}/none.npz", "--cache=cache"],
    "serve": ["--model={files}/none"],
}


@given(st.sampled_from(sorted(NAMES)), st.data())
@settings(
    max_examples=150, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
def test_any_flag_with_any_value_ends_in_one_line_or_is_accepted(commands, places, command, data):
    names = sorted(set(load(command).flags) - {"dry_run"})
    chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    arguments = [f"--{name}={data.draw(st.sampled_from(NASTY))}" for name in chosen]
    before = set(os.listdir())
    status, _, errors = commands.run(command, *_written(BASE[command], places), *arguments)
    if status:
        _check_one_line(command, status, errors)
    made = {pathlib.Path(name) for name in set(os.listdir()) - before}
    asked = {argument.split("=", 1)[1] for argument in arguments if argument.startswith(("--json=", "--report="))}
    assert {str(path) for path in made} <= asked
