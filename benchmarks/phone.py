"""Count on the phone's own file what a threshold does: strangers let in, and known images found.

  python -m benchmarks.phone --model=models/shop/1/litert/int8.tflite \
      --gallery=photos --known=visits --strangers=others

Each folder has a folder of images for each class. What runs is what an application runs: Pillow
decodes and resizes as `view` in the model card says, the interpreter embeds, and NumPy searches all
images of the gallery. The threshold is that of the file in the model card, or of --threshold, the
JSON of tfdml evaluate. Take other strangers than those that it was measured on.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from PIL import Image, ImageOps

from tools.numbers import Results, command_line

BATCH = 32


def view_of(path: Path, resize: int, side: int) -> np.ndarray:
    """Return the central crop of an image, (side, side, 3) uint8."""
    image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    scale = resize / min(image.size)
    width, height = (max(side, round(length * scale)) for length in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - side) // 2, (height - side) // 2
    return np.asarray(image.crop((left, top, left + side, top + side)))


def embed_folder(run, folder: str, resize: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the vectors of the images of a folder of class folders, and their classes."""
    paths = sorted(path for path in Path(folder).glob("*/*") if path.is_file())
    vectors = []
    for start in range(0, len(paths), BATCH):
        views = [view_of(path, resize, side) for path in paths[start : start + BATCH]]
        vectors.append(run(images=np.stack(views))["embedding"])
    return np.concatenate(vectors), np.array([path.parent.name for path in paths])


def nearest(queries: np.ndarray, gallery: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the row of the nearest image of each query, and its Euclidean distance."""
    cosines = queries @ gallery.T
    rows = cosines.argmax(axis=1)
    squares = 2 - 2 * cosines[np.arange(len(rows)), rows]
    return rows, np.sqrt(np.maximum(squares, 0))


def main() -> None:
    """Print both counts, next to what the threshold promises."""
    parser = command_line(__doc__)
    for name in ("model", "gallery", "known", "strangers"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--threshold", default="")
    flags = parser.parse_args()
    card = json.loads((Path(flags.model).parents[1] / "model_card.json").read_text())
    sides = card["view"]["resize"], card["view"]["image_size"]
    run = Interpreter(flags.model).get_signature_runner()
    gallery, classes = embed_folder(run, flags.gallery, *sides)
    document = card["artifacts"][f"litert_{Path(flags.model).stem}"]
    if flags.threshold:
        document = json.loads(Path(flags.threshold).read_text())
    calibration = document["calibration"]
    add = Results(flags.json).table("table", "rate", "promised", "counted", "images")
    for rate, folder in (("fpir", flags.strangers), ("tpir", flags.known)):
        queries, names = embed_folder(run, folder, *sides)
        rows, distances = nearest(queries, gallery)
        accepted = distances <= calibration["threshold"]
        if rate == "tpir":
            accepted &= classes[rows] == names
        promised, low, high, _ = (100 * value for value in calibration["rates"][rate])
        share = f"{promised:.1f} % [{low:.1f}, {high:.1f}]"
        counted = f"{100 * accepted.mean():.1f} %"
        add(rate.upper(), share, counted, f"{accepted.sum():,} of {len(accepted):,}")


if __name__ == "__main__":
    main()
