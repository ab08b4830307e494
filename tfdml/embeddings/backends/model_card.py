"""What a source needs from the card that an export carries."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tfdml.data.augmentation.evaluation import EvaluationTransform
from tfdml.errors import UserError
from tfdml.manifests import Kinds, compare_files, fields, objects, read_json

CARD = "model_card.json"
_VIEW: Kinds = {"resize": int, "crop": int, "mode": str, "pad_color": (list, str)}
# One float32 view of this side takes 3 GB.
_LARGEST_SIDE = 16_384


def view_of_card(path: Path) -> dict[str, Any] | None:
    """The view in which an exported model sees images: the card's `view`; None where there is no card.

    Args:
        path: The card's.

    Returns:
        The configuration of an `EvaluationTransform`.

    Raises:
        UserError: There is a card, but its view cannot be understood.

    Example:
        >>> view_of_card(Path("models/cars/1/model_card.json"))  # doctest: +SKIP
        {'resize': 112, 'crop': 96, 'mode': 'shorter'}
    """
    if not path.exists():
        return None
    view = read_json(path).get("view")
    # Black padding is not named.
    if not isinstance(view, dict) or set(view) - {"pad_color"} != {"resize", "crop", "mode"}:
        raise UserError(f"{path} does not state the view of the model: its key view must hold resize, crop and mode")
    fields({"pad_color": "black", **view}, _VIEW, f"{path}: view")
    if view["resize"] > _LARGEST_SIDE:
        raise UserError(f"{path} states a view of {view['resize']:,} px, more than {_LARGEST_SIDE:,}")
    try:
        return EvaluationTransform.from_config(view).get_config()
    except UserError as error:
        raise UserError(f"{path} states an impossible view: {error}") from error


def compare_with_card(model: Path) -> None:
    """Compare the files of a model with the checksums in the card beside it, or in the folder above.

    What the card does not list is not compared, and nothing is where there is no card.

    Args:
        model: A file, or the folder of a SavedModel.

    Raises:
        UserError: A file that the card lists is missing or damaged, or the card cannot be understood.

    Example:
        >>> compare_with_card(Path("models/cars/1/litert/int8.tflite"))  # doctest: +SKIP
    """
    model = Path(os.path.abspath(model))
    folder = model if model.is_dir() else model.parent
    card = next((above / CARD for above in (folder, folder.parent) if (above / CARD).exists()), None)
    if card is None:
        return
    where = f"{card}: artefacts"
    for name, artefact in objects(read_json(card).get("artefacts", {}), where).items():
        files = fields(artefact, {"files": dict}, f"{where}.{name}")["files"]
        if model == card.parent and name != "saved_model":
            continue
        if model != card.parent:
            files = {file: entry for file, entry in files.items() if card.parent / file == model}
        compare_files(card.parent, files, str(card), "copy the version again from its source, or export it again")
