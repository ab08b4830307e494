"""What a source needs from the card that an export carries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tfdml.data.evaluation_view import EvaluationTransform
from tfdml.errors import UserError

CARD = "model_card.json"


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
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    view = card.get("view") if isinstance(card, dict) else None
    if not isinstance(view, dict) or set(view) != {"resize", "crop", "mode"}:
        raise UserError(f"{path} does not tell the view of the model: its key view must hold resize, crop and mode")
    try:
        return EvaluationTransform.from_config(view).get_config()
    except (TypeError, UserError) as error:
        raise UserError(f"{path} tells of a view that cannot be: {error}") from error
