"""Which epoch's embedder is selected, what is wrong with that choice, and where the embedder is kept until the end."""

import shutil
from typing import Any

import keras
from absl import logging

from tfdml.data.dataset import ImageDataset
from tfdml.io.files import atomic_write
from tfdml.models import Embedder
from tfdml.training import checkpoints
from tfdml.training.run_folder import RunFolder

#: One mapping per epoch, as in `metrics.jsonl`.
Records = list[dict[str, Any]]

# Below this many held-out classes, a choice between epochs is mostly chance.
FEW_CLASSES = 10
# From here on, the few queries that are left decide between epochs.
SATURATED = 0.98


def selected_epoch(records: Records, selection: str, metric: str = "map@r") -> int:
    """Return the epoch whose embedder is kept: the last, or the one with the highest metric on the selection's split.

    Of several epochs with the same value, the first is selected. Once the learning rate is below its highest value, the
    last of them is: it has trained longer at a low rate.

    Args:
        records: One mapping per epoch, as in `metrics.jsonl`. The first, before training, is selected only if it is
            the only one.
        selection: `"last"`, `"validation"` or `"test"`.
        metric: `"map@r"` or `"recall@1"`.

    Example:
        >>> selected_epoch([{"epoch": i, "test": {"map@r": r}} for i, r in enumerate([0.1, 0.4, 0.4])], "test")
        1
    """
    best, highest_rate, chosen = -1.0, 0.0, records[-1]["epoch"]
    if selection == "last":
        return chosen
    for record in records[1:]:
        value, rate = _value(record.get(selection, {}), metric, -1.0), record.get("learning_rate", 0.0)
        highest_rate = max(highest_rate, rate)
        if value > best or (value == best >= 0 and rate < highest_rate):
            best, chosen = value, record["epoch"]
    return chosen


def _value(measured: dict[str, Any], metric: str, default: float) -> float:
    """Return a metric, or its mean over levels, whose names end by `/0`, `/1` and so on."""
    levels = [value for name, value in measured.items() if name.startswith(f"{metric}/")]
    return measured.get(metric, sum(levels) / len(levels) if levels else default)


def selection_warnings(selection: str, held_out: ImageDataset | None) -> list[str]:
    """Return a warning, as a list of at most one line, where an epoch is selected on few held-out classes.

    Args:
        selection: As in `selected_epoch`.
        held_out: The images of the held-out classes.

    Example:
        >>> selection_warnings("last", None)
        []
    """
    if selection != "validation" or held_out is None or held_out.num_classes >= FEW_CLASSES:
        return []
    return [
        f"WARNING: --selection=validation selects the epoch on {held_out.num_classes} held-out classes, which is "
        f"mostly chance below {FEW_CLASSES}. Raise --holdout_classes, or use --selection=last"
    ]


def saturation_warnings(records: Records, selection: str, metric: str = "map@r") -> list[str]:
    """Return a warning, as a list of at most one line, where the metric can hardly distinguish the best epochs.

    Args:
        records: As in `selected_epoch`.
        selection: As in `selected_epoch`.
        metric: As in `selected_epoch`.

    Example:
        >>> saturation_warnings([{"epoch": i, "test": {"map@r": r}} for i, r in enumerate([0.1, 0.4, 0.4])], "test")
        []
    """
    epoch = selected_epoch(records, selection, metric)
    chosen = next(record for record in records if record["epoch"] == epoch)
    value = _value(chosen.get(selection, {}), metric, 0.0)
    if value < SATURATED:
        return []
    other = "--selection_metric=map@r or " if metric == "recall@1" else ""
    other += "more --holdout_classes or " if selection == "validation" else ""
    return [
        f"WARNING: {metric} on the {selection} classes is saturated: {100 * value:.1f} % in the selected epoch "
        f"{epoch}, so that a few images decide between epochs. Use {other}--selection=last"
    ]


def keep_if_selected(folder: RunFolder, records: Records, selection: str, metric: str, embedder: Embedder) -> None:
    """Keep the embedder of the newest epoch if it is the best; to be called before that epoch's checkpoint."""
    epoch = records[-1]["epoch"]
    if selection != "last" and selected_epoch(records, selection, metric) == epoch:
        folder.checkpoints.mkdir(exist_ok=True)
        checkpoints.save_model(folder.selected(epoch), embedder)


def publish_selected(folder: RunFolder, records: Records, selection: str, metric: str, steps_per_epoch: int) -> None:
    """Make the best embedder the run's, and drop those that no checkpoint needs; to be called after the checkpoint."""
    if selection == "last":
        return
    selected = folder.selected(selected_epoch(records, selection, metric))
    with atomic_write(folder.embedder, selected.stat().st_size) as temporary:
        shutil.copyfile(selected, temporary)
    # Whichever checkpoint the run is resumed from, the embedder that was selected by then has to be there.
    steps = map(checkpoints.step_of, checkpoints.list_checkpoints(folder.checkpoints))
    closed = {step // steps_per_epoch for step in steps} - {0}
    needed = {folder.selected(selected_epoch(records[: epoch + 1], selection, metric)) for epoch in closed}
    for path in folder.checkpoints.glob("selected-epoch-*.keras"):
        if path not in needed:
            path.unlink()


def write_embedder(folder: RunFolder, records: Records, selection: str, metric: str, embedder: Embedder) -> Embedder:
    """Write the embedder of the run, that of the selected epoch, and return it.

    Args:
        folder: The run folder.
        records: As in `selected_epoch`.
        selection: As in `selected_epoch`.
        metric: As in `selected_epoch`.
        embedder: As it is after the last step.

    Raises:
        UserError: The file cannot be written.
    """
    epoch = selected_epoch(records, selection, metric)
    if epoch == records[-1]["epoch"]:
        checkpoints.save_model(folder.embedder, embedder)
        return embedder
    logging.info("the embedder is that of epoch %d", epoch)
    with atomic_write(folder.embedder, folder.selected(epoch).stat().st_size) as temporary:
        shutil.copyfile(folder.selected(epoch), temporary)
    return keras.saving.load_model(folder.embedder)
