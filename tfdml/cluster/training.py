"""Training over Ray: a run by the workers of Ray Train, which starts them again where one is
lost."""

import logging as python_logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from absl import flags, logging

from tfdml.cluster.ray_session import LOCAL, ray_session
from tfdml.cluster.settings import ClusterSettings
from tfdml.errors import ERROR_TEXT, UserError, short_message, user_errors
from tfdml.io.files import (
    PARTIAL_PREFIX,
    is_file,
    is_folder,
    read_bytes,
    remove,
    require_local,
    write_whole,
)
from tfdml.report import write_run_report
from tfdml.training import Experiment, RunFolder, TrainingRun, trainer
from tfdml.training.workers import WorkerLost, rank_and_count

# In the storage of a run: what is wrong with it.
_ERROR = "error.txt"
# How often lost workers are started again.
_MOST_FAILURES = 3


def train_on_cluster(
    experiment: Experiment, settings: ClusterSettings, resume: bool = False
) -> TrainingRun:
    """Run an experiment on a Ray cluster, and bring its folder here; returns the run.

    Args:
        experiment: The settings; `run_dir` is where the run's folder lies in the end.
        settings: Where it is trained.
        resume: Resume a run that was stopped, from the last checkpoint in the storage.

    Raises:
        UserError: Something that the user can mend; or workers were lost more often than they may
            be.

    Example:
        >>> train_on_cluster(experiment,
        ...     ClusterSettings(workers=2)).result["protocol"]  # doctest: +SKIP
        'zero-shot: trained on 213 classes, evaluated all-to-all on 107 classes never seen in '
        'training'
    """
    require_local(experiment.run_dir, "run_dir")
    folder = RunFolder(experiment.run_dir)
    result = folder.read_result() if resume else None
    if result is not None:
        logging.info("%s is finished already: there is nothing left to do", folder.path)
        return TrainingRun(experiment, result)
    folder.check_new()
    beside = folder.path.absolute().with_name(folder.path.name + ".ray")
    storage, name = settings.storage or str(beside), folder.path.name
    run = f"{storage}/{name}"
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    cpus = max(settings.workers, os.cpu_count() or 1)
    with ray_session(settings.cluster or LOCAL, cpus=cpus, show_workers=True):
        begun = is_folder(run)
        if resume and not begun:
            raise UserError(f"there is no run in {run}", resume=True)
        if begun and not resume:
            raise UserError(
                f"{run} holds a run already: continue with resume, or name another run_dir"
            )
        remove(f"{run}/{_ERROR}")
        _bring(_fit(experiment, settings, storage, name), folder.path)
    if not settings.storage:
        shutil.rmtree(beside, ignore_errors=True)
    return TrainingRun(experiment, folder.read_result() or {})


def _fit(experiment: Experiment, settings: ClusterSettings, storage: str, name: str) -> Any:
    with user_errors(
        ImportError, f"needs Ray Train ({ERROR_TEXT}): pip install 'tfdml[ray]'", cluster=...
    ):
        import ray
        from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
        from ray.train.tensorflow import TensorflowTrainer

    python_logging.getLogger("ray.train").setLevel(python_logging.ERROR)
    run = f"{storage}/{name}"
    on_gpus = ray.cluster_resources().get("GPU", 0) >= settings.workers
    scaling = ScalingConfig(
        num_workers=settings.workers,
        use_gpu=on_gpus,
        resources_per_worker={"CPU": 1, "GPU": 1} if on_gpus else {"CPU": 1},
    )
    ray_trainer = TensorflowTrainer(
        _work,
        train_loop_config={"flags": experiment.as_flags(), "run": run},
        scaling_config=scaling,
        run_config=RunConfig(
            name=name,
            storage_path=storage,
            # The second: how often it is waited a minute for hosts with room for all workers.
            failure_config=FailureConfig(_MOST_FAILURES, controller_failure_limit=_MOST_FAILURES),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    try:
        return ray_trainer.fit().checkpoint
    except Exception as error:
        if is_file(f"{run}/{_ERROR}"):
            raise UserError(read_bytes(f"{run}/{_ERROR}").decode()) from error
        saved = f"what it has saved is in {run}: continue it with --resume"
        why = short_message(error, "last", longest=150)
        raise UserError(
            f"the run failed more than {_MOST_FAILURES} times; {saved} ({why})"
        ) from error


def _work(config: dict[str, Any]) -> None:
    """Do what every worker does."""
    from ray import train as ray_train

    os.environ.pop("TF_USE_LEGACY_KERAS", None)  # set by Ray, of no use to Keras 3
    run, before = config["run"], ray_train.get_checkpoint()
    if is_file(f"{run}/{_ERROR}"):  # which another start would meet again
        raise UserError(read_bytes(f"{run}/{_ERROR}").decode())
    is_chief = rank_and_count()[0] == 0  # by the TF_CONFIG that Ray has set
    flags.FLAGS.mark_as_parsed()
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO if is_chief else logging.ERROR)
    logging.get_absl_handler().setFormatter(python_logging.Formatter())
    with tempfile.TemporaryDirectory(prefix="tfdml-run-") as scratch:
        path = Path(scratch) / Path(run).name
        if is_chief and before is not None:
            before.to_directory(path)
            logging.info("resuming from the last checkpoint in the storage")

        def saved() -> None:
            ray_train.report(
                {}, checkpoint=ray_train.Checkpoint.from_directory(path) if is_chief else None
            )

        experiment = Experiment.from_flags(config["flags"], run_dir=str(path))
        try:
            training_run = trainer.train(experiment, before is not None, saved)
            if training_run is not None:
                write_run_report(training_run)
        except WorkerLost as lost:
            raise RuntimeError(str(lost)) from lost
        except UserError as refused:
            write_whole(f"{run}/{_ERROR}", str(refused).encode())
            raise
        saved()


def _bring(checkpoint: Any, path: Path) -> None:
    """Put a run's folder, as a checkpoint holds it, to where it belongs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=PARTIAL_PREFIX, dir=path.parent) as scratch:
        checkpoint.to_directory(f"{scratch}/run")
        if path.is_dir():
            path.rmdir()  # empty, as was checked
        os.replace(f"{scratch}/run", path)
