"""Flag files, messages that name flags, and flags that have no effect next to the others."""

import dataclasses
import logging
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from tests.cli.commands import NAMES, load
from tests.docs.files import write_photos
from tests.experiments import ROOT, experiment_of
from tfdml.cli import command_line
from tfdml.cli.command_line import Command, Flags, Formatter
from tfdml.cluster.replica import ServeSettings
from tfdml.effects import in_vain
from tfdml.export.retriever import RETRIEVER_CARD
from tfdml.flag_files import read_flag_files
from tfdml.io import files
from tfdml.io.files import parse_flags
from tfdml.training import Experiment
from tfdml.training.settings import ALWAYS as SETTINGS_ALWAYS
from tfdml.training.settings import EFFECTS as SETTINGS


@pytest.fixture
def known():
    """The flags of a command."""
    values = Flags()
    for name in ("batch_size", "bad_images", "out", "dataset_options", "data_dir"):
        values.define(name, "", "")
    values.define("allow_extra", False, "")
    return values


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("raise `batch_size`, or lower it", "raise --batch_size, or lower it"),
        ("`batch_size=0` must be at least 1", "--batch_size=0 must be at least 1"),
        ("`data_dir=/a b/it's=1`: no such folder", "--data_dir=/a b/it's=1: no such folder"),
        ("`folder=x` is a file, `out=` is not", "--out=x is a file, --out= is not"),
        ("size must be positive (one of its `options`)", "size must be positive (one of its --dataset_options)"),
        # No flags of this command.
        ("`margin` must be positive, and `log_dir=1`", "`margin` must be positive, and `log_dir=1`"),
        ("run `tfds build cars196`", "run `tfds build cars196`"),
    ],
)
def test_arguments_are_shown_as_flags(message, expected, known):
    command = Command("try", print, known, "", {"folder": "out"})
    assert command.as_flags(message) == expected
    record = logging.LogRecord("absl", logging.WARNING, "", 0, "%s", (message,), None)
    assert Formatter(command).format(record) == expected


HORDE = {"objectives": "contrastive + 0.5 * horde(loss=contrastive)"}
RATES = {"backbone_rate": 1e-5, "projection_rate": 1e-3, "objective_rate": 1e-2}
BALANCED, SHUFFLE = {"sampling": "class_balanced"}, {"sampling": "shuffle"}
HIERARCHICAL, NEIGHBORS = {"sampling": "hierarchical"}, {"sampling": "neighbors"}
VECTORS = {"model": "vectors.npz"}
VECTORS_GALLERY = {"gallery": "vectors.npz"}
# What is taken for a retriever: a folder with a version that has its card.
RETRIEVER = tempfile.mkdtemp()
pathlib.Path(RETRIEVER, "1").mkdir()
for name in (RETRIEVER_CARD, "saved_model.pb"):
    pathlib.Path(RETRIEVER, "1", name).touch()
COMPARE, RUN = {"compare": ["a", "b"]}, {"model": "runs/cars"}
# By command and flag: the value; others next to which it has no effect, and some next to which it has one.
OF_IMAGES = {
    "dataset": "folder",
    "bad_images": "skip",
    "check_images": "decode",
    "cache": "true",
    "image_size": 64,
    "resize": 300,
    "resize_mode": "squash",
    "augmentation": "random_resized_crop",
    "flip": False,
    "policy": "grayscale",
    "backbone": "conv4",
    "weights": "imagenet",
    "pooling": "max",
    "batch_norm": "train",
    "ensemble_heads": 8,
    "lora_rank": 4,
    "backbone_rate": 0.1,
}
CASES = {
    "train": {
        **{name: (value, {"features": "x.npz"}, {}) for name, value in OF_IMAGES.items()},
        "data_dir": ("/data", {"dataset": "glyphs"}, {"dataset": "folder"}),
        "holdout_sampling": ("stratified", {}, {"holdout_classes": 0.1}),
        "cache_limit_mb": (10, {"cache": "true"}, {"cache": "auto"}),
        "pad_color": ("white", {}, {"resize_mode": "pad"}),
        "min_scale": (0.1, {"augmentation": "random_crop"}, {"augmentation": "random_resized_crop"}),
        "min_resolution": (0.9, {}, {"augmentation": "multi_resolution"}),
        "max_resolution": (1.2, {}, {"augmentation": "multi_resolution"}),
        "classes_per_batch": (98, SHUFFLE, HIERARCHICAL),
        "holdout_part": (2, {}, {"holdout_classes": 0.25}),
        "min_steps": (100, {"steps_per_epoch": 5}, {"epochs": 2}),
        "images_per_class": (40, {"sampling": "whole_classes"}, BALANCED),
        "short_classes": ("drop", SHUFFLE, BALANCED),
        "batch_size": (64, BALANCED, SHUFFLE),
        "super_classes_per_batch": (2, BALANCED, HIERARCHICAL),
        "super_class_weights": ("uniform", BALANCED, HIERARCHICAL),
        "neighbors_every": (2, BALANCED, NEIGHBORS),
        "anchor_classes": (1, SHUFFLE, NEIGHBORS),
        "skip_top": (1, BALANCED, NEIGHBORS),
        "relative_margin": (0.05, BALANCED, NEIGHBORS),
        "ensemble_cut": ("a,b", {}, {"ensemble_heads": 8}),
        "learning_rate": (1e-3, RATES, {**RATES, "objective_rate": -1.0}),
        "final_rate": (0.1, {"schedule": "step"}, {"schedule": "cosine"}),
        "drop_epochs": ("8,16", {"epochs": 8}, {"epochs": 9}),
        "drop_factor": (0.5, {}, {"drop_epochs": "8"}),
        "layer_decay": (0.9, {"backbone_rate": 0.0}, {}),
        "epsilon": (1e-8, {"optimizer": "sgd"}, {"optimizer": "rmsprop"}),
        "momentum": (0.8, {"optimizer": "adam"}, {"optimizer": "sgd"}),
        "gradient_cache": (100, {**BALANCED, "classes_per_batch": 20, "images_per_class": 5}, {"images_per_class": 6}),
        "generalization_every": (1, {}, {"evaluate_train": 1.0}),
        "selection_metric": ("map@r", {"selection": "last"}, {"selection": "test"}),
        "moment_embedder": (True, {}, HORDE),
        "evaluate_orders": ("epochs", {}, HORDE),
        "heat_maps": (True, {"report": False}, {}),
        "seed": (3, {"seeds": "0,1"}, {"seeds": "2"}),
        "stop_on": ("collapse", {"watch_every": 0}, {}),
        "finish": (True, {}, {"resume": True}),
        "probe": (True, {}, {"dry_run": True}),
        "workers": (2, {}, {"cluster": "local"}),
        "gpus_per_worker": (1, {}, {"cluster": "local"}),
        "max_failures": (1, {}, {"cluster": "local"}),
        "storage": ("/shared", {}, {"cluster": "local"}),
    },
    "embed": {
        "dataset": ("sop", {"cluster": "local"}, {}),
        "features": ("x.npz", {"cluster": "local"}, {}),
        "data_dir": ("/data", {"cluster": "local"}, {}),
        "dataset_options": ("size=32", {"cluster": "local"}, {}),
        "split": ("train", {"cluster": "local"}, {}),
        "bad_images": ("skip", {"cluster": "local"}, {}),
        "actors": (2, {}, {"cluster": "local"}),
    },
    "evaluate": {
        "features": ("x.npz", VECTORS, {"model": "runs/head"}),
        "data_dir": ("/data", VECTORS, {**VECTORS, "dataset": "sop"}),
        "dataset_options": ("size=32", COMPARE, RUN),
        "bad_images": ("skip", VECTORS, RUN),
        "batch_size": (10, VECTORS, {**COMPARE, "dataset": "sop"}),
        "truncate_dim": (8, VECTORS, {**COMPARE, "dataset": "sop"}),
        "report": ("page.html", {**VECTORS, "task": "classification"}, COMPARE),
        "heat_maps": (True, {**VECTORS, "report": "page.html"}, {**RUN, "report": "page.html"}),
        "split": ("train", COMPARE, VECTORS),
        "distance": ("cosine", COMPARE, VECTORS),
        "metrics": (["recall"], COMPARE, VECTORS),
        "task": ("verification", COMPARE, VECTORS),
        "target": ("far=0.1", VECTORS, {**VECTORS, "task": "verification"}),
        "neighbors": (3, VECTORS, {**VECTORS, "task": "classification"}),
        "ks": (["1"], COMPARE, VECTORS),
        "intervals": ("classes", COMPARE, VECTORS),
        "generalization": (True, COMPARE, RUN),
    },
    "export": {
        "moment_embedder": (True, {"gallery": "photos", "embedder": "models/cars"}, {"run_dir": "runs/cars"}),
        "whitening": ("dim=4", {"gallery": "photos", "embedder": "models/cars"}, {}),
        "truncate_dim": (8, {"gallery": "photos", "embedder": "models/cars"}, {}),
        "stack_on": ("runs/cars", {"gallery": "photos", "embedder": "models/cars"}, {}),
        "data_dir": ("/data", {"gallery": "photos", "embedder": "models/cars"}, {}),
        "unfinished": (True, {"gallery": "photos", "embedder": "models/cars"}, {}),
        "images": (100, {"gallery": "photos", "embedder": "models/cars"}, {}),
        "max_pixels": (100, {"gallery": "photos", "embedder": "models/cars"}, {}),
        "min_cosine": (0.9, {"gallery": "photos", "embedder": "models/cars"}, {}),
        "max_recall_drop": (0.1, {"gallery": "photos", "embedder": "models/cars"}, {}),
        "representative_images": (10, {"formats": ["litert_float16"]}, {"formats": ["litert"]}),
        "embedder": ("models/cars", {}, {"gallery": "photos"}),
        "gallery_dataset": ("sop", {}, {"gallery": "photos"}),
        "gallery_bad_images": ("skip", {}, {"gallery": "photos"}),
        "gallery_dataset_options": ("size=32", {"gallery": "photos"}, {"gallery": "x", "gallery_dataset": "sop"}),
        "gallery_split": ("all", {"gallery": "photos"}, {"gallery": "x", "gallery_dataset": "sop"}),
    },
    "audit": {
        "dataset_options": ("size=32", {"embeddings": "x.npz"}, {"dataset": "glyphs"}),
        "bad_images": ("skip", {"embeddings": "x.npz"}, {"model": "runs/cars"}),
        "batch_size": (9, {"embeddings": "x.npz"}, {"model": "runs/cars"}),
        "truncate_dim": (9, {"dataset": "glyphs"}, {"model": "runs/cars"}),
        "features": ("x.npz", {"dataset": "glyphs"}, {"model": "runs/head"}),
        **dict.fromkeys(("backbone", "weights"), ("other", {"model": "runs/cars"}, {"dataset": "glyphs"})),
        "image_size": (64, {"embeddings": "x.npz"}, {"dataset": "glyphs"}),
        "resize": (64, {"embeddings": "x.npz"}, {"dataset": "glyphs"}),
        "resize_mode": ("pad", {"model": "runs/cars"}, {"dataset": "glyphs"}),
        "pad_color": ("white", {"dataset": "glyphs"}, {"dataset": "glyphs", "resize_mode": "pad"}),
        "max_distance": (
            0.1,
            {"embeddings": "x.npz", "data_dir": "photos"},
            {"model": "runs/head", "features": "x.npz"},
        ),
        "min_correlation": (0.9, {"embeddings": "x.npz"}, {"embeddings": "x.npz", "data_dir": "photos"}),
    },
    "demo": {
        "model": ("runs/cars", {"gallery": RETRIEVER}, {"gallery": "."}),
        "truncate_dim": (8, {"gallery": RETRIEVER}, {"gallery": "."}),
        "batch_size": (9, VECTORS_GALLERY, {"gallery": "."}),
        "data_dir": ("photos", {"gallery": "."}, VECTORS_GALLERY),
        "distance": ("cosine", {"gallery": "lancedb:///data"}, VECTORS_GALLERY),
    },
    "index": {},
    "serve": {},
    "search": {
        "model": (
            "runs/cars",
            {"gallery": ".", "queries": ["a.jpg"]},
            {"gallery": ".", "queries": ["b.npz"]},
        ),
        "batch_size": (9, {**VECTORS_GALLERY, "queries": ["b.npz"]}, {**VECTORS_GALLERY, "queries": ["a.jpg"]}),
        "truncate_dim": (
            9,
            {**VECTORS_GALLERY, "queries": ["b.npz"]},
            {**VECTORS_GALLERY, "queries": ["b.npz"], "model": "runs/head"},
        ),
        "distance": ("cosine", {"gallery": "lancedb:///data"}, VECTORS_GALLERY),
    },
    "prepare": {
        "dataset_options": ("size=32", {"download": True}, {"check_only": True}),
        "bad_images": ("skip", {"download": True}, {"out": "copy"}),
        "max_pixels": (100, {"download": True}, {"check_only": True}),
        "out": ("copy", {"check_only": True}, {}),
        "shrink": (64, {"check_only": True}, {"out": "copy"}),
    },
}
# The flags that have an effect whatever the others are.
ALWAYS = {
    "train": SETTINGS_ALWAYS | {"dim", "recipe", "resume", "dry_run", "preview", "cluster"},
    "embed": {
        "model",
        "unfinished",
        "out",
        "dtype",
        "batch_size",
        "truncate_dim",
        "rows_per_file",
        "cluster",
        "input",
        "dry_run",
    },
    "evaluate": {"model", "unfinished", "compare", "dataset", "json"},
    "export": {"run_dir", "out", "formats", "gallery", "calibrate", "dry_run"},
    "audit": {"model", "unfinished", "dataset", "data_dir", "embeddings", "pick", "out"},
    "demo": {"unfinished", "gallery", "calibration", "host", "port"},
    "serve": {"model", "name", "host", "port"} | {field.name for field in dataclasses.fields(ServeSettings)},
    "index": {"embeddings", "to", "prefix", "truncate_dim", "replace", "dry_run"},
    "search": {"unfinished", "gallery", "queries", "k", "max_distance", "out"},
    "prepare": {"dataset", "data_dir", "download", "check_only", "dry_run"},
}
BY_FLAG = [(command, flag) for command, cases in CASES.items() for flag in cases]


def as_arguments(values):
    """The values of flags as a command line has them."""
    written = {name: ",".join(value) if isinstance(value, list) else value for name, value in values.items()}
    return [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in written.items()]


@pytest.mark.parametrize("command", NAMES)
def test_of_every_flag_it_is_known_when_it_has_an_effect(command):
    table = set(load(command).flags.effects)
    assert not table & ALWAYS[command]
    assert set(load(command).flags) == table | ALWAYS[command]
    assert set(CASES[command]) == table


@pytest.mark.parametrize(("command", "flag"), BY_FLAG)
def test_a_flag_in_vain_on_the_command_line_is_an_error(commands, command, flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value, beside, _ = CASES[command][flag]
    status, _, errors = commands.run(command, *as_arguments({**beside, flag: value}))
    condition = load(command).flags.effects[flag].condition
    said = f"{as_arguments({flag: value})[0]} has no effect: it needs {condition}; add that, or leave --{flag} out"
    assert (status, said in errors) == (2, True), errors
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("command", "flag"), BY_FLAG)
def test_a_flag_has_its_effect_beside_the_others_that_it_needs(command, flag):
    value, _, beside = CASES[command][flag]
    values = {one: load(command).flags[one].default for one in load(command).flags}
    assert load(command).flags.effects[flag].holds({**values, flag: value, **beside})


def in_a_file(commands, tmp_path, lines, *arguments):
    """What a preview, which writes and trains nothing, says of a flag file; the flags after it are the command's."""
    photos, file = tmp_path / "photos", tmp_path / "x.flags"
    write_photos(photos)
    file.write_text("\n".join([*lines, "--dataset=folder", "--image_size=28"]))
    flags = ["--resize=32", f"--data_dir={photos}", f"--preview={tmp_path / 'batch.png'}", *arguments]
    status, _, errors = commands.run("train", f"--flagfile={file}", *flags)
    assert status == 0, errors
    return errors


def test_a_run_says_which_recipe_it_takes(commands, tmp_path, caplog):
    caplog.set_level("INFO", logger="absl")
    given = ["--dataset=none", f"--run_dir={tmp_path}/x"]
    commands.run("train", *given, "--recipe=none")
    assert "recipe" not in caplog.text
    commands.run("train", *given, "--weights=imagenet", "--learning_rate=0.5")
    assert "recipe finetune: '--head=whitened(power=0.5, shrinkage=0.1)' --objectives=am_softmax" in caplog.text


def test_a_flag_in_vain_in_a_flag_file_is_a_warning(commands, tmp_path):
    said = in_a_file(commands, tmp_path, ["--batch_size=64", "--schedule=cosine"], "--sampling=class_balanced")
    assert (
        "train: warning: in a flag file, and ignored: --batch_size=64 has no effect: it needs --sampling=shuffle"
        in said
    )


def test_a_flag_in_vain_in_a_flag_file_is_reset(commands, tmp_path):
    """So that a schedule on the command line takes the place of the file's, and an error that is meant for Python
    does not come."""
    said = in_a_file(commands, tmp_path, ["--drop_epochs=6"], "--schedule=cosine")
    assert "--drop_epochs=6 has no effect: it needs --schedule=step" in said


def test_a_flag_file_may_carry_defaults_as_flags_txt_has_them(commands, tmp_path):
    assert "no effect" not in in_a_file(commands, tmp_path, ["--batch_size=100", "--drop_factor=0.1"])


def test_a_flag_after_its_file_is_the_command_lines(commands, tmp_path):
    file = tmp_path / "x.flags"
    file.write_text("--batch_size=64\n")
    status, _, errors = commands.run("train", f"--flagfile={file}", "--batch_size=32", "--run_dir=x")
    assert (status, "--batch_size=32 has no effect" in errors) == (2, True)


def test_a_resumed_run_is_judged_by_its_own_settings(commands, tmp_path):
    (tmp_path / "flags.txt").write_text("--sampling=shuffle\n")
    given = [f"--run_dir={tmp_path}", "--resume"]
    status, _, errors = commands.run("train", *given, "--classes_per_batch=8")
    assert (status, "--classes_per_batch=8 has no effect: it needs --sampling=class_bal" in errors) == (2, True), errors
    status, _, errors = commands.run("train", *given, "--batch_size=8", "--dry_run", "--dataset=none")
    assert "no effect" not in errors


def set_in_files(path):
    """The values of all settings of a flag file, and the settings that it, or a file that it names, sets."""
    written = parse_flags("\n".join(read_flag_files([f"--flagfile={path}"])))
    values = dataclasses.asdict(experiment_of(f"--flagfile={path.relative_to(ROOT)}", run_dir="unused"))
    written.pop("recipe", None)
    return values, [name for name in written if values[name] != getattr(Experiment, name)]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.flags")), ids=lambda path: path.stem)
def test_no_flag_of_a_shipped_file_is_in_vain(path):
    assert not in_vain(SETTINGS, *set_in_files(path))


def ended(command, tmp_path, begun=None, output=os.devnull, ignored=()):
    """(status, error output) of a command run as a process forked from this one.

    `begun` is called with the number of the process once the command has made `begun` in the folder.
    """
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            os.chdir(tmp_path)
            for number, target in ((1, output), (2, "errors.txt")):
                os.dup2(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644), number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
            command_line.run(Command("try", lambda _: command(), Flags(), ""), [])
        except SystemExit as end:
            status = end.code
        finally:
            sys.stderr.flush()
            os._exit(status)
    if begun:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        begun(pid)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, (tmp_path / "errors.txt").read_text()


def writing():
    """A command in the midst of writing a file."""
    with files.atomic_write("result.json") as temporary:
        open(temporary, "w").close()
        open("begun", "w").close()
        time.sleep(60)


@pytest.mark.parametrize(
    ("number", "status", "says"),
    [
        (signal.SIGTERM, 143, "try: ended by SIGTERM\n"),
        (signal.SIGHUP, 129, "try: ended by SIGHUP\n"),
        (signal.SIGINT, 130, "try: interrupted\n"),
    ],
)
def test_a_signal_ends_a_command_in_one_line_and_leaves_no_half_file(number, status, says, tmp_path):
    assert ended(writing, tmp_path, lambda pid: os.kill(pid, number)) == (status, says)
    assert sorted(os.listdir(tmp_path)) == ["begun", "errors.txt"]


def cleaning_up():
    """A command that takes its time to end."""
    try:
        writing()
    finally:
        open("ending", "w").close()
        time.sleep(60)


def test_a_second_signal_ends_it_at_once(tmp_path):
    def twice(pid):
        os.kill(pid, signal.SIGTERM)
        while not (tmp_path / "ending").exists():
            time.sleep(0.01)
        os.kill(pid, signal.SIGTERM)

    assert ended(cleaning_up, tmp_path, twice) == (-signal.SIGTERM, "")


def test_a_signal_that_is_ignored_stays_ignored(tmp_path):
    def both(pid):
        os.kill(pid, signal.SIGHUP)
        time.sleep(0.2)
        os.kill(pid, signal.SIGTERM)

    assert ended(writing, tmp_path, both, ignored=[signal.SIGHUP]) == (143, "try: ended by SIGTERM\n")


def test_the_handlers_are_gone_after_the_command():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(command_line.Stopped), command_line.signals_as_exceptions():
        signal.raise_signal(signal.SIGTERM)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_a_command_whose_launch_is_interrupted_leaves_no_traceback(tmp_path):
    program = """
import builtins, os, signal
from tfdml.cli import main
def interrupted(name, *rest):
    if name == "tensorflow":
        os.kill(os.getpid(), signal.SIGINT)
    return before(name, *rest)
before, builtins.__import__ = builtins.__import__, interrupted
main(["export"])
"""
    # Python's own handler is only there where SIGINT is not ignored.
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


def test_paths_are_repeated_or_have_commas(tmp_path, monkeypatch):
    """An existing file may have commas in its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b.jpg").write_text("")
    values = Flags()
    values.define("queries", [], "Images.", kind="paths")
    values.parse([])
    assert values.queries == []
    values.parse(["--queries=a,b.jpg", "--queries=*.png,c.jpg"])
    assert values.queries == ["a,b.jpg", "*.png", "c.jpg"]
