"""Pictures of a run under way: the hardest triplets of an epoch, and TensorBoard's projector with thumbnails."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tfdml.data.dataset import ImageDataset
from tfdml.data.pipeline import evaluation_batches
from tfdml.data.transforms import EvaluationTransform
from tfdml.evaluation import embed
from tfdml.io.files import atomic_write, write_whole
from tfdml.models import Embedder

_CELL, _GAP, _LINE, _FONT = 112, 6, 16, 12
_PAPER, _INK = (255, 255, 255), (20, 20, 20)
_WIDTH = 2 * _CELL  # of a column: names are longer than images are wide
# TensorBoard takes one picture of at most 8192 pixels a side.
_SHEET, _THUMBNAIL = 8192, 48
PROJECTOR_MOST = (_SHEET // _THUMBNAIL) ** 2


@dataclasses.dataclass(frozen=True)
class PicturedTriplet:
    """A triplet of a batch, as it is shown.

    Args:
        step: When it was sampled.
        images: Anchor, farthest positive and nearest negative, (H, W, 3) uint8 each.
        names: Of the three.
        classes: The names of the class of anchor and positive, and of that of the negative.
        d_pos: The distance of the anchor and the positive.
        d_neg: That of the anchor and the negative.
    """

    step: int
    images: Sequence[np.ndarray]
    names: Sequence[str]
    classes: Sequence[str]
    d_pos: float
    d_neg: float

    @property
    def violation(self) -> float:
        """d_pos - d_neg."""
        return self.d_pos - self.d_neg


def triplet_sheet(triplets: Sequence[PicturedTriplet]) -> Image.Image:
    """Draw triplets below one another: anchor, farthest positive, nearest negative, what they are under each.

    Args:
        triplets: At least one.

    Example:
        >>> grey = np.full((28, 28, 3), 128, np.uint8)
        >>> triplet_sheet([PicturedTriplet(7, [grey] * 3, ["a", "b", "c"], ["owl", "crow"], 1.2, 0.3)]).size
        (696, 178)
    """
    pitch = _CELL + 3 * _LINE + _GAP
    sheet = Image.new("RGB", (3 * (_WIDTH + _GAP) + _GAP, len(triplets) * pitch + 2 * _GAP), _PAPER)
    draw, font = ImageDraw.Draw(sheet), _font()
    for row, triplet in enumerate(triplets):
        top = _GAP + row * pitch
        own, other = triplet.classes
        said = (
            (f"anchor, step {triplet.step}", own),
            (f"farthest positive, d {triplet.d_pos:.3f}", own),
            (f"nearest negative, d {triplet.d_neg:.3f}", other),
        )
        for column, (image, name, (place, of)) in enumerate(zip(triplet.images, triplet.names, said, strict=True)):
            left = _GAP + column * (_WIDTH + _GAP)
            picture = Image.fromarray(np.ascontiguousarray(image, np.uint8))
            scale = _CELL / max(picture.size)
            picture = picture.resize([max(1, round(scale * side)) for side in picture.size])
            sheet.paste(picture, (left, top))
            for line, text in enumerate((place, of, name)):
                draw.text((left, top + _CELL + line * _LINE), _shortened(text), fill=_INK, font=font)
    return sheet


def _font() -> ImageFont.FreeTypeFont:
    import matplotlib  # slow to import, so only where something is drawn

    # Pillow's own has Latin letters alone.
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), _FONT)


def _shortened(text: str, longest: int = 34) -> str:
    return text if len(text) <= longest else "..." + text[3 - longest :]


def write_projector(
    folder: Path,
    embeddings: np.ndarray,
    labels: np.ndarray,
    class_names: Mapping[int, str],
    read_image: Callable[[int], np.ndarray],
) -> None:
    """Write what TensorBoard's projector shows: `projector_config.pbtxt`, vectors, names of classes, and thumbnails.

    Args:
        folder: TensorBoard's folder of the run.
        embeddings: (n, d), n at most `PROJECTOR_MOST`.
        labels: (n,) class ids.
        class_names: The name of each class id.
        read_image: Reads image i of the n.
    """
    vectors = "".join("\t".join(f"{value:.6g}" for value in row) + "\n" for row in embeddings.tolist())
    # A tab or a line's end within a name would be another column or row.
    names = "".join(" ".join(str(class_names.get(label, label)).split()) + "\n" for label in labels.tolist())
    columns = math.ceil(math.sqrt(len(embeddings)))
    rows = math.ceil(len(embeddings) / columns)
    sheet = Image.new("RGB", (columns * _THUMBNAIL, rows * _THUMBNAIL), _PAPER)
    for place in range(len(embeddings)):
        picture = Image.fromarray(read_image(place))
        picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
        row, column = divmod(place, columns)
        sheet.paste(picture, (column * _THUMBNAIL, row * _THUMBNAIL))
    write_whole(folder / "vectors.tsv", vectors.encode())
    write_whole(folder / "classes.tsv", names.encode())
    save_png(sheet, folder / "thumbnails.png")
    config = (
        'embeddings {\n  tensor_name: "embedding"\n  tensor_path: "vectors.tsv"\n  metadata_path: "classes.tsv"\n'
        f'  sprite {{\n    image_path: "thumbnails.png"\n    single_image_dim: {_THUMBNAIL}\n'
        f"    single_image_dim: {_THUMBNAIL}\n  }}\n}}\n"
    )
    write_whole(folder / "projector_config.pbtxt", config.encode())


def save_png(image: Image.Image, path: Path) -> None:
    """Write a picture atomically."""
    with atomic_write(path) as temporary:
        image.save(temporary, "PNG")


class Projector:
    """Writes the embeddings of the same images whenever it is asked to, over those before.

    Args:
        images: What is drawn from: equally many of every class as far as there are.
        count: How many; at most 28,900, whose thumbnails fill the largest picture that TensorBoard takes.
        transform: The evaluation view.
        batch_size: Of embedding.
        folder: TensorBoard's folder of the run.
    """

    def __init__(self, images: ImageDataset, count: int, transform: EvaluationTransform, batch_size: int, folder: Path):
        self._images = images.take(images.balanced_rows(min(count, PROJECTOR_MOST)))
        self._batches = evaluation_batches(self._images, transform, batch_size)
        self._folder = folder

    def write(self, embedder: Embedder) -> None:
        """Embed the images and write what the projector shows."""
        embeddings, images = embed(embedder, self._batches), self._images
        write_projector(self._folder, embeddings, images.labels, images.class_names, images.images.picture)
