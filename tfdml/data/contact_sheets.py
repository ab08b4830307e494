"""A contact sheet of a batch: what the network sees, rows by class."""

from __future__ import annotations

import pathlib
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tfdml.data.dataset import ImageDataset

_SMALLEST, _LARGEST = 72, 160  # pixels of a cell
_GAP, _MARGIN = 4, 10
_LABEL_WIDTH, _FONT_SIZE, _LINE = 190, 14, 18
_LETTERS_PER_LINE, _LINES = 22, 4
_PAPER, _INK, _FAINT = (255, 255, 255), (20, 20, 20), (120, 120, 120)
_MAX_ROWS, _MAX_COLUMNS = 40, 10


def contact_sheet(
    images: np.ndarray,
    labels: np.ndarray,
    class_names: Mapping[int, str],
    originals: Sequence[np.ndarray] | None = None,
) -> Image.Image:
    """Draws the images of a batch, a row per class in the order in which the classes occur, its name at the left.

    At most 40 classes and 10 images of each are shown; how many more there are is written beside them.

    Args:
        images: (B, H, W, 3) uint8, the views.
        labels: (B,) class ids.
        class_names: The name of each class id.
        originals: For comparison, the whole images that the views were cut from, B arrays (h, w, 3) uint8; each is
            shown, smaller, above its view.

    Returns:
        A Pillow image.

    Raises:
        ValueError: Images, labels and originals differ in number, or there is none.

    Example:
        >>> images, labels = next(iter(batches.as_numpy_iterator()))
        >>> contact_sheet(images, labels, dataset.class_names).save("batch.png")
    """
    images, labels = np.asarray(images), np.asarray(labels)
    if not len(labels) or len(images) != len(labels) or (originals is not None and len(originals) != len(labels)):
        counts = f"{len(images)} images, {len(labels)} labels"
        raise ValueError(f"a contact sheet needs as many images as labels, and some: {counts}")
    classes = list(dict.fromkeys(labels.tolist()))
    rows = {label: np.flatnonzero(labels == label) for label in classes[:_MAX_ROWS]}
    columns = min(max(map(len, rows.values())), _MAX_COLUMNS)
    cell = min(max(*images.shape[1:3], _SMALLEST), _LARGEST)
    above = 0 if originals is None else cell * 2 // 3 + _GAP
    pitch = above + cell + 2 * _GAP
    width = 2 * _MARGIN + _LABEL_WIDTH + columns * (cell + _GAP)
    height = 2 * _MARGIN + len(rows) * pitch + (_LINE if len(classes) > len(rows) else 0)
    sheet = Image.new("RGB", (width, height), _PAPER)
    draw, font = ImageDraw.Draw(sheet), _font()
    for row, (label, members) in enumerate(rows.items()):
        top = _MARGIN + row * pitch
        note = f"{len(members)} images" + (f", {columns} shown" if len(members) > columns else "")
        _write(draw, font, (_MARGIN, top), class_names.get(label, f"class {label}"), note)
        for column, member in enumerate(members[:columns].tolist()):
            left = _MARGIN + _LABEL_WIDTH + column * (cell + _GAP)
            if originals is not None:
                _paste(sheet, originals[member], (left, top), (cell, above - _GAP))
            _paste(sheet, images[member], (left, top + above), (cell, cell))
    if len(classes) > len(rows):
        _text(draw, font, (_MARGIN, height - _MARGIN - _LINE), f"and {len(classes) - len(rows)} more classes", _FAINT)
    return sheet


def whole_images(dataset: ImageDataset, indices: np.ndarray) -> list[np.ndarray]:
    """Images of a data set as they are before any view is taken of them.

    Args:
        dataset: The data set.
        indices: (n,) which images.

    Returns:
        n arrays (h, w, 3) uint8.

    Raises:
        tf.errors.OpError: An image cannot be read.
    """
    source = dataset.images.lookup()
    columns = source.columns(np.asarray(indices, np.int64))
    return [source.read(*row).numpy() for row in zip(*columns, strict=True)]


def _paste(sheet: Image.Image, pixels: np.ndarray, corner: tuple[int, int], room: tuple[int, int]) -> None:
    """An image as large as the room allows, proportions kept, centred; small ones are enlarged without smoothing."""
    image = Image.fromarray(pixels)
    factor = min(room[0] / image.width, room[1] / image.height)
    size = max(1, round(image.width * factor)), max(1, round(image.height * factor))
    image = image.resize(size, Image.Resampling.LANCZOS if factor < 1 else Image.Resampling.NEAREST)
    offset = [(there - taken) // 2 for there, taken in zip(room, size, strict=True)]
    sheet.paste(image, (corner[0] + offset[0], corner[1] + offset[1]))


def _write(
    draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont, corner: tuple[int, int], name: str, note: str
) -> None:
    lines = textwrap.wrap(name, _LETTERS_PER_LINE) or [""]
    if len(lines) > _LINES:
        lines = [*lines[: _LINES - 1], lines[_LINES - 1][: _LETTERS_PER_LINE - 1] + "…"]
    for number, line in enumerate([*lines, note]):
        _text(draw, font, (corner[0], corner[1] + number * _LINE), line, _INK if number < len(lines) else _FAINT)


def _text(draw, font, corner, text, colour) -> None:
    draw.text(corner, text.encode("utf-8", "replace").decode("utf-8"), fill=colour, font=font)


def _font() -> ImageFont.FreeTypeFont:
    import matplotlib  # slow to import, so only where something is drawn

    # Pillow's own has Latin letters alone.
    path = pathlib.Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return ImageFont.truetype(str(path), _FONT_SIZE)
