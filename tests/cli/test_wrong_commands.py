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
from tfdml.training.build import components

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
    (files / "utf16.flags").write_text("--epochs=1\n", encoding="utf-16")
    (files / "circle.flags").write_text(f"--epochs=1\n--flagfile={files}/circle.flags\n")
    (files / "unknown.flags").write_text("--epoch=1\n")
    return {"photos": photos, "files": files}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    """Commands run in an empty folder, and on a machine that has 2 GB of memory free."""
    monkeypatch.chdir(tmp_path)
    for module in (memory, components, pipeline):
        monkeypatch.setattr(module, "free_memory", lambda: 2.0 * 2**30)


def _written(arguments, places):
    return [argument.replace("{photos}", str(places["photos"])).replace("{files}", str(places["files"]))
            for argument in arguments]  # fmt: skip


def _check_one_line(command, status, errors):
    """The status of a mistake, and one line that tells it, the last of what was written to the error stream."""
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
    ("--seed=1099511627776", "--seed must be at most 2,147,483,647"),
    ("--seed=1180591620717411303424", "--seed must be at most 2,147,483,647"),
    ("--seed=-1", "--seed=-1: out of range"),
    ("--seed=1.5", "--seed=1.5"),
    ("--epochs=99999999999999999999", "--epochs must be at most"),
    ("--epochs=-1", "--epochs=-1: out of range"),
    ("--flip=maybe", "--flip"),
    ("--cache=maybe", "--cache=maybe: must be one of auto, true, false"),
    ("--learning_rate=nan", "--learning_rate must be a finite number, not nan"),
    ("--learning_rate=0", "--learning_rate=0.0: out of range"),
    ("--learning_rate=1e39", "--learning_rate must be a finite number"),
    ("--weight_decay=inf", "--weight_decay must be a finite number, not inf"),
    ("--weight_decay=-1", "--weight_decay=-1.0: out of range"),
    ("--backbone_rate=-0.5", "--backbone_rate=-0.5: out of range"),
    ("--projection_rate=nan", "--projection_rate must be a finite number"),
    ("--objective_rate=-0.5", "--objective_rate=-0.5: out of range"),
    ("--clip_norm=nan", "--clip_norm must be a finite number"),
    ("--epsilon=nan", "--epsilon must be a finite number"),
    ("--holdout_classes=nan", "--holdout_classes must be a finite number"),
    ("--holdout_classes=0.999999", "leaves no class to train on"),
    ("--evaluate_every=-1", "--evaluate_every=-1: out of range"),
    ("--image_size=0", "--image_size=0: out of range"),
    ("--image_size=100", "--resize=16 is smaller than --image_size=100"),
    ("--ks=", "--ks=: write integers"),
    ("--ks=0", "--ks=0: write integers"),
    ("--ks=1,x", "--ks=1,x: write integers"),
    ("--ks=99999999999", "write integers of 1 to 2,147,483,647"),
    ("--ensemble_heads=3", "no multiple of --ensemble_heads=3"),
    ("--selection=validation", "needs held-out classes"),
    ("--optimizer=foo", "must be one of adam, adamw, sgd, rmsprop"),
    ("--nosuch=1", "nosuch"),
    ("stray", "unexpected argument 'stray'"),
    # Data sets and their options
    ("--dataset=", "unknown data set ''"),
    ("--dataset=nope", "unknown data set 'nope'"),
    ("--dataset=tfds", "needs its option name"),
    ("--data_dir=/no/folder", "there is no folder /no/folder"),
    ("--dataset_options=test_fraction=nan", "test_fraction must be a number, not 'nan'"),
    ("--dataset_options=test_fraction=1e400", "test_fraction must be a finite number"),
    ("--dataset_options=test_fraction=true", "test_fraction must be a number, not True"),
    ("--dataset_options=test_fraction=0", "must lie between 0 and 1"),
    ("--dataset_options=test_fraction=abc", "test_fraction must be a number, not 'abc'"),
    ("--dataset_options=foo=1", "has no option 'foo'"),
    ("--dataset_options=test_fraction", "must be written name=value"),
    ("--dataset_options=(", "it cannot be read"),
    ("--dataset_options=test_fraction=0.5, test_fraction=0.6", "is given twice"),
    # Batches
    ("--classes_per_batch=1000", "the data has 4 classes"),
    ("--sampling=hierarchical", "needs super-classes"),
    # Networks
    ("--backbone=", "--backbone='': it cannot be read"),
    ("--backbone=nope", "unknown backbone 'nope'"),
    ("--backbone=conv4(width=true)", "width must be a positive integer, not True"),
    ("--backbone=conv4(width=2.5)", "width must be a positive integer, not 2.5"),
    ("--backbone=conv4(height=2)", "no option 'height'"),
    ("--backbone=conv4(width=100000)", "and 2.0 GB are free"),
    ("--embedding_dim=200000000", "and 2.0 GB are free"),
    ("--weights=/no/file", "there is no file /no/file"),
    ("--weights={files}/flipped.weights.h5", "--weights: "),
    ("--policy=foo", "there is no policy 'foo'"),
    ("--policy=2*grayscale", "its share of the images"),
    # Objectives
    ("--objectives=", "--objectives='': it cannot be read"),
    ("--objectives=" + "+".join(["am_softmax"] * 100), "100 terms; 20 is the most"),
    ("--objectives=" + "+".join(["am_softmax"] * 5000), "too long or too deeply nested"),
    ("--objectives=" + "-" * 5000 + "am_softmax", "--objectives="),
    ("--objectives=-1*am_softmax", "weight must not be negative, not -1"),
    ("--objectives=0*am_softmax", "every term has the factor 0"),
    ("--objectives=1e400*am_softmax", "weight must be a finite number"),
    ("--objectives=nan*am_softmax", "the factor 'nan' is not a number"),
    ("--objectives=jrs", "needs the representation 'class'"),
    ("--objectives=am_softmax(margin=1e30)", "margin must be at least 0 and at most 2"),
    ("--objectives=am_softmax(margin=0.1, margin=0.2)", "margin of am_softmax is given twice"),
    ("--objectives=am_softmax(scale='20')", "scale must be a number, not '20'"),
    ("--objectives=am_softmax(num_classes=3)", "leave num_classes out"),
    ("--objectives=am_softmax(proxies_per_class=100000000)", "and 2.0 GB are free"),
    ("--objectives=am_softmax(proxies_per_class=1.5)", "proxies_per_class must be a positive integer"),
    ("--objectives=contrastive(margin=nan)", "margin must be a number, not 'nan'"),
    ("--objectives=contrastive(margin=1e400)", "margin must be a finite number, not inf"),
    ("--objectives=contrastive(margin=-1)", "margin must not be negative, not -1"),
    ("--objectives=contrastive(margin=true)", "margin must be a number, not True"),
    ("--objectives=am_softmax + jrs(kernels=[laplace(), laplace(), 3])", "kernels must be of tfdml.kernels"),
    ("--objectives=am_softmax + jrs(kernels=laplace(bandwidth=0))", "bandwidth must be positive"),
    ("--objectives=horde(loss=contrastive, orders=1000000000)", "orders must be at most 100"),
    ("--objectives=horde(loss=contrastive, dim=1000000000)", "GB"),
    ("--objectives=horde(loss=contrastive, scaled=maybe)", "scaled must be true or false"),
    # Paths
    ("--run_dir=", "--run_dir is missing"),
    (f"--run_dir={LONG}", "File name too long"),
    ("--run_dir=a\udcffb", "is not UTF-8 text"),
    ("--run_dir={photos}", "exists already"),
    ("--run_dir=gs://bucket/run", "only local folders can be used here"),
    ("--run_dir={files}/zeros.pth", "exists already"),
    ("--preview=nofile", "name a PNG file"),
    ("--flagfile={files}/none.flags", "cannot be read: No such file"),
    ("--flagfile={files}", "cannot be read: Is a directory"),
    ("--flagfile={files}/binary.flags", "is no UTF-8 text"),
    ("--flagfile={files}/utf16.flags", "is no UTF-8 text"),
    ("--flagfile={files}/circle.flags", "the file includes itself"),
    ("--flagfile={files}/unknown.flags", "epoch"),
]
WRONG = [("train", [*TRAIN, "--dry_run", flag], says) for flag, says in TRAIN_VALUES]
WRONG += [
    ("train", [*TRAIN, "--dry_run", *flags], says)
    for flags, says in [
        (["--objectives=contrastive", "--images_per_class=1"], "learns from pairs of images of one class"),
        (["--objectives=contrastive", "--classes_per_batch=1"], "learns from pairs of images of different classes"),
        (["--objectives=rank_mi", "--classes_per_batch=1", "--images_per_class=1"], "learns from pairs of images"),
        (["--classes_per_batch=1"], "jrs learns from pairs of images of different classes"),
        (["--epochs=9", "--drop_epochs=5,3"], "the epochs must ascend"),
        (["--epochs=2", "--drop_epochs=1", "--drop_factor=inf"], "--drop_factor must be a finite number"),
        (["--optimizer=sgd", "--momentum=1"], "--momentum=1.0: out of range"),
        (["--augmentation=multi_resolution", "--min_resolution=inf"], "--min_resolution must be a finite number, not"),
        (["--augmentation=multi_resolution", "--min_resolution=2"], "--min_resolution=2 is above --max_resolution=1.8"),
        (["--augmentation=random_resized_crop", "--min_scale=nan"], "--min_scale must be a finite number"),
        (["--objectives=horde(loss=triplet) + horde(loss=triplet, name=b)", "--moment_embedder"], "needs one horde"),
        (["--selection=test", "--selection_metric=recall@1", "--ks=2"], "add 1 to --ks=2"),
        (
            ["--dataset=glyphs", "--data_dir=", "--dataset_options=images_per_class=abc"],
            "must be an integer, not 'abc'",
        ),
    ]
]
WRONG += [
    ("train", [*TRAIN, *flags], says)
    for flags, says in [
        (["--resume"], "holds no run to resume"),
        (["--image_size=100000", "--resize=100000"], "a step on 4 images of --image_size=100000 would take"),
        (["--resize=10000000"], "and 2.0 GB are free"),
        (["--augmentation=multi_resolution", "--max_resolution=1e6"], "and 2.0 GB are free"),
        (["--images_per_class=1000000000"], "and 2.0 GB are free"),
        (["--embedding_dim=200000000"], "and 2.0 GB are free"),
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
        (["--model=rest://localhost:1/x", "--timeout=1"], "localhost:1"),
        (["--dataset="], "--dataset is missing"),
        (["--dataset=nope"], "unknown data set 'nope'"),
        (["--dataset_options=test_fraction=nan"], "test_fraction must be a number"),
        (["--model=rest://localhost:1/x", "--timeout=nan"], "--timeout=nan must be"),
        (["--model=rest://localhost:1/x", "--timeout=-1"], "--timeout=-1.0 must be"),
        (["--batch_size=0"], "--batch_size=0"),
        (["--split=foo"], "--split=foo"),
        (["--flagfile={files}/binary.flags"], "is no UTF-8 text"),
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
        (["--out=gs://bucket/embeddings"], "only local folders can be used here"),
    ]
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
        (["--ks=0", "--metrics=recall"], "ks must be"),
        (["--ks=a"], "--ks=a: write integers"),
        (["--ks=1,8"], "there are 7 images to search in; choose smaller ones, e.g. --ks=1"),
        (["--json={photos}"], "is a folder: name a file"),
        (["--json=no/folder/x.json"], "its folder does not exist"),
        (["--report={photos}"], "is a folder: name a file"),
        (["--report=x.html"], "--report shows images"),
        (["--compare="], "--compare= names nothing"),
        (["--compare=a,b"], "takes the place of --model"),
        (["--compare=a,b", "--model="], "a is no folder"),
        (["--compare=a", "--model="], "a comparison needs 2 to 8 runs; got 1"),
        (["--compare=a,b", "--model=", "--report=x.html"], "a is no folder"),
        (["--distance=foo"], "--distance=foo"),
        (["--intervals=classes", "--metrics=nmi"], "no value per query to resample"),
    ]
]
WRONG += [
    ("evaluate", [*MODEL, "--ks=1,20"], "there are 15 images to search in"),
]
WRONG += [
    ("prepare", [*PREPARE, *flags], says)
    for flags, says in [
        (["--splits="], "--splits= names no split"),
        (["--splits=foo"], "there is only train and test"),
        (["--nocheck_only", "--out=out", "--shrink=-1"], "--shrink=-1"),
        (["--nocheck_only", "--out=out", "--shard_mb=nan"], "--shard_mb"),
        (["--nocheck_only", "--out=out", "--shard_mb=inf"], "--shard_mb"),
        (["--nocheck_only", "--out=out", "--shard_mb=0"], "--shard_mb=0.0"),
        (["--workers=0"], "--workers=0"),
        (["--max_pixels=-1"], "--max_pixels=-1"),
        (["--dataset="], "--dataset is missing"),
        (["--dataset=nope"], "unknown data set 'nope'"),
        (["--data_dir=/no/folder"], "there is no folder"),
        (["--dataset_options=test_fraction=nan"], "test_fraction must be a number"),
        (["--nocheck_only"], "--out is missing"),
        (["--nocheck_only", f"--out={LONG}"], "File name too long"),
        (["--nocheck_only", "--out={files}/zeros.pth"], "zeros.pth"),
        (["--download", "--data_dir="], "--data_dir is missing"),
        (["--drop_copies=maybe"], "--drop_copies=maybe"),
    ]
]
WRONG += [
    ("prepare", ["--verify"], "--out is missing"),
    ("prepare", ["--verify", "--out=/no/folder"], "/no/folder"),
]
WRONG += [
    ("export", [*EXPORT, *flags], says)
    for flags, says in [
        ([], "no_run"),
        (["--run_dir="], "--run_dir is missing"),
        (["--out="], "--out is missing"),
        (["--out=gs://bucket/models"], "only local folders can be used here"),
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
        ([], "files"),
        (["--dry_run"], "files"),
        (["--embedder="], "--gallery needs the embedder"),
        (["--gallery=/no/folder"], "/no/folder"),
        ([f"--gallery={LONG}"], LONG),
        (["--gallery_dataset=nope"], "unknown data set 'nope'"),
        (["--gallery_dataset=folder", "--gallery_dataset_options=test_fraction=nan"], "test_fraction must be a number"),
        (["--formats=litert"], "--gallery makes a SavedModel"),
    ]
]
WRONG += [
    ("export", ["--run_dir=x", "--out=y", "--min_cosine=2"], "--min_cosine"),
    ("export", ["--run_dir=x", "--out=y", "--max_recall_drop=-1"], "--max_recall_drop"),
    ("export", ["--run_dir=x", "--out=y", "--dry_run"], "no embedder"),
    ("train", ["--dataset=glyphs", "--run_dir=gs://bucket/y", "--dry_run"], "--run_dir=gs://bucket/y: only local"),
    ("evaluate", ["--model=nowhere", "--dataset=glyphs"], "nowhere"),
    ("evaluate", ["--model=."], "--dataset is missing"),
]


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
    "a pipe": (lambda image: (image.unlink(), os.mkfifo(image)), "unreadable (a FIFO, not a regular file)"),
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
# What a command is given beside; with them it writes nothing, or nothing but what is asked for here.
BASE = {
    "train": [*TRAIN, "--dry_run"],
    "embed": [*MODEL, "--out=out", "--dry_run"],
    "evaluate": VECTORS,
    "index": ["--embeddings={files}/vectors.npz", "--to=lancedb://{files}/gallery", "--dry_run"],
    "prepare": [*PREPARE, "--dry_run"],
    "search": ["--gallery={files}/vectors.npz", "--queries={files}/vectors.npz"],
    "export": [*EXPORT, "--dry_run"],
}


@given(st.sampled_from(sorted(NAMES)), st.data())
@settings(
    max_examples=300, deadline=None, derandomize=True, database=None,
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
