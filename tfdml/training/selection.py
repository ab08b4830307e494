"""Which epoch's embedder counts, and where it is kept until the run ends."""

from __future__ import annotations

import shutil
from typing import Any

from tfdml.models import Embedder
from tfdml.saving import saved_size
from tfdml.storage import atomic_write
from tfdml.training import checkpoints
from tfdml.training.run_folder import RunFolder
from tfdml.training.settings import EvaluationSettings


def selected_epoch(records: list[dict[str, Any]], selection: str, metric: str = "recall@1") -> int:
    """The epoch whose embedder counts: the last, or the first of those that are the best on the selection's split.

    Args:
        records: One mapping per epoch, the first that before training, which is chosen only if there is no other.
        selection: `"last"`, `"validation"` or `"test"`.
        metric: What they are the best by.

    Example:
        >>> selected_epoch([{"epoch": i, "test": {"recall@1": r}} for i, r in enumerate([0.1, 0.4, 0.4])], "test")
        1
    """
    best, chosen = -1.0, records[-1]["epoch"]
    if selection == "last":
        return chosen
    for record in records[1:]:
        value = record.get(selection, {}).get(metric, -1.0)
        if value > best:
            best, chosen = value, record["epoch"]
    return chosen


def caution(settings: EvaluationSettings, epochs: int) -> str:
    """What to bear in mind of a run whose epoch nobody has chosen, though the test classes were measured along it.

    Args:
        settings: What was measured, and when.
        epochs: How many epochs were trained.

    Returns:
        A line; empty where there is nothing to choose from, or the epoch was chosen.

    Example:
        >>> caution(EvaluationSettings(evaluate_every=0), epochs=12)
        ''
    """
    if settings.selection != "last" or not 0 < settings.evaluate_every < epochs:
        return ""
    return (
        "The last epoch was kept, chosen by nobody. The test classes were measured along the training: do not choose "
        "an epoch by eye on them; --holdout_classes=0.1 --selection=validation chooses one on held-out classes."
    )


def keep_if_selected(
    folder: RunFolder, records: list[dict[str, Any]], selection: str, embedder: Embedder, metric: str = "recall@1"
) -> None:
    """Keep the embedder of the newest epoch if it is the best; to be called before that epoch's checkpoint."""
    epoch = records[-1]["epoch"]
    if selection != "last" and selected_epoch(records, selection, metric) == epoch:
        folder.checkpoints.mkdir(exist_ok=True)
        with atomic_write(folder.selected(epoch), saved_size(embedder)) as temporary:
            embedder.save(temporary)


def publish_selected(
    folder: RunFolder, records: list[dict[str, Any]], selection: str, steps_per_epoch: int, metric: str = "recall@1"
) -> None:
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
