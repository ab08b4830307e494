"""What other libraries are told, by stand-ins for them."""

import pathlib
import sys
import types

import keras
import pytest

from tests.training import runs
from tests.training.run.stopping import make_quick
from tfdml.errors import UserError
from tfdml.training.watching.loggers import Logger, flat


class Recorder(keras.callbacks.Callback):
    def __init__(self, told):
        super().__init__()
        self.told = told

    def on_train_begin(self, logs=None):
        self.told.append(("begin", type(self.model).__name__))

    def on_epoch_end(self, epoch, logs=None):
        self.told.append((epoch, logs))


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for wandb, and what it is told."""
    told = []
    library = types.ModuleType("wandb")
    library.init = lambda **settings: told.append(("init", settings))
    library.finish = lambda: told.append(("finish", None))
    callbacks = types.ModuleType("wandb.integration.keras")
    callbacks.WandbMetricsLogger = lambda: Recorder(told)
    for name, module in (("wandb", library), ("wandb.integration", library), ("wandb.integration.keras", callbacks)):
        monkeypatch.setitem(sys.modules, name, module)
    return told


def test_a_run_tells_of_every_epoch_and_closes(wandb, tmp_path, monkeypatch):
    make_quick(monkeypatch)
    result = runs.train(tmp_path / "run", log_to="wandb:glyphs")
    names = [what for what, _ in wandb]
    assert names == ["init", "begin", 0, 1, 2, "finish"]
    settings = wandb[0][1]
    assert (settings["project"], settings["name"], settings["dir"]) == ("glyphs", "run", str(tmp_path / "run"))
    assert settings["config"]["embedding_dim"] == 8
    assert wandb[-2][1]["test/recall@1"] == result["metrics"]["recall@1"]
    assert {"train/loss", "rates/backbone", "step"} <= set(wandb[-2][1])
    assert wandb[2][1]["test/recall@1"] == result["metrics_before"]["recall@1"]


def test_a_library_that_is_not_there_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(
        UserError, match=r"--log_to=mlflow:runs.db: mlflow is not installed: pip install 'tfdml\[mlflow\]'"
    ):
        Logger("mlflow:runs.db", tmp_path, {})


def test_what_a_library_refuses_is_one_line(wandb, tmp_path, monkeypatch):
    def refuse(**settings):
        raise RuntimeError("no such project")

    sys.modules["wandb"].init = refuse
    with pytest.raises(UserError, match="--log_to=wandb:x: wandb refuses: no such project"):
        Logger("wandb:x", tmp_path, {})


def test_only_finite_numbers_are_told():
    record = {"epoch": 1, "test": {"a": float("nan"), "b": 0.5, "c": "words", "d": True}, "orders": {"1": {"e": 2}}}
    assert flat(record) == {"epoch": 1.0, "test/b": 0.5, "orders/1/e": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize("service", ["wandb", "mlflow"])
def test_the_library_itself(service, tmp_path, tmp_path_factory, monkeypatch):
    pytest.importorskip(service)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    make_quick(monkeypatch)
    target = f"mlflow:sqlite:///{tmp_path}/runs.db" if service == "mlflow" else "wandb:tfdml"
    runs.train(tmp_path / "run", log_to=target)
    if service == "mlflow":
        import mlflow

        (run,) = mlflow.search_runs(experiment_names=["tfdml"], output_format="list")
        assert {"test/recall_at_1", "train/loss"} <= set(run.data.metrics)
    assert not list(pathlib.Path.cwd().iterdir())
