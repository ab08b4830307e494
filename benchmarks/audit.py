"""The recall of `tfdml audit` on planted near-duplicates and wrong labels, and its time and memory.

    python -m benchmarks.audit --features cars.npz omniglot.npz --data_dir=CARS196 --weights=MNV2.weights.h5
    python -m benchmarks.audit --features cars.npz --data_dir=CARS196 --parts identical
    python -m benchmarks.audit --parts cost

Duplicates: of --sources images of Cars-196, copies of four kinds are searched among --gallery images of it. A pair is
right if both images come from one source. Labels: a tenth of the labels of each --features is exchanged for that of
another class, drawn evenly; as many labels are taken from the top of the list as were exchanged. Identical: the images
of Cars-196 whose bytes are the same and whose labels differ, and where their groups are in the list. Cost: --count
embeddings without images. --features are made by `python -m benchmarks.heads --table`, or by tfdml embed.
"""

import hashlib
import io
import os
import resource
import time

import numpy as np
from PIL import Image

from tfdml.audit import audit, label_confidences, near_duplicates
from tfdml.embeddings.reader import ImageTable, read_embeddings
from tfdml.retrieval import nearest_neighbors
from tools.numbers import Results, command_line

KINDS = {
    "jpeg": "JPEG, quality 50",
    "crop": "crop of 90 % of width and height",
    "flip": "mirrored",
    "light": "30 % darker or brighter",
}


def near_duplicate(image, kind, generator):
    """Return the bytes of a near-duplicate of an image."""
    quality = 50 if kind == "jpeg" else 90
    if kind == "crop":
        width, height = (round(0.9 * side) for side in image.size)
        left, top = generator.integers(image.width - width + 1), generator.integers(image.height - height + 1)
        image = image.crop((left, top, left + width, top + height))
    elif kind == "flip":
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    elif kind == "light":
        factor = generator.choice([0.7, 1.3])
        image = image.point(lambda value: min(255, int(value * factor + 0.5)))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def duplicates(arguments, results):
    """A row for each kind of copy."""
    import tfdml

    stored = read_embeddings(arguments.features[0])
    paths = [os.path.join(arguments.data_dir, name) for name in stored.names]
    generator = np.random.default_rng(0)
    sources = generator.choice(len(paths), arguments.sources, replace=False)
    copies, kinds, origins = [], [], []
    for kind in KINDS:
        for row in sources:
            copies.append(near_duplicate(Image.open(paths[row]).convert("RGB"), kind, generator))
            kinds.append(kind)
            origins.append(row)
    cache = arguments.features[0] + f".{arguments.sources}.planted.npy"
    if not os.path.exists(cache):
        network = tfdml.backbones.resolve("mobilenetv2", 224, arguments.weights)
        embedder = tfdml.models.Embedder(network, embedding_dim=0, image_size=224)
        images = tfdml.data.EncodedImages(tuple(copies), tuple(map(str, range(len(copies)))))
        view = tfdml.data.EvaluationTransform.of(embedder)
        batches = tfdml.data.evaluation_batches(tfdml.data.ImageDataset(images=images, labels=origins), view, 100)
        np.save(cache, tfdml.embeddings.embed(embedder, batches))
    others = np.setdiff1d(np.arange(len(paths)), sources)
    gallery = np.concatenate([sources, generator.permutation(others)[: arguments.gallery - len(sources)]])
    x = np.concatenate([stored.embeddings[gallery], np.load(cache)])
    origin = np.concatenate([gallery, origins])
    kind_of = np.array([""] * len(gallery) + kinds)

    def picture(row):
        encoded = paths[gallery[row]] if row < len(gallery) else io.BytesIO(copies[row - len(gallery)])
        return np.asarray(Image.open(encoded).convert("RGB"))

    neighbors, distances = nearest_neighbors(x, k=10, distance="cosine")
    pairs, _ = near_duplicates(neighbors, distances, picture)
    # By distance alone, as many pairs as there are true ones.
    alone, near = near_duplicates(neighbors, distances, max_distance=np.inf)
    copied = np.isin(pairs, np.flatnonzero(kind_of != "")).any(axis=1)
    wrong = pairs[copied & (origin[pairs[:, 0]] != origin[pairs[:, 1]])]
    results.value("sources", f"{arguments.sources:,}")
    results.value("gallery", f"{arguments.gallery:,}")
    results.value("pairs", f"{copied.sum():,}")
    results.value("wrong", f"{len(wrong):,}")
    for pair in wrong:
        print("  " + " and ".join(f"{paths[origin[row]]} ({kind_of[row] or 'itself'})" for row in pair))
    row_of = results.table("duplicates", "copy", "precision, %", "recall, %", "precision by distance alone, %")
    for kind, name in KINDS.items():
        of_kind = np.flatnonzero(kind_of == kind)
        found = pairs[np.isin(pairs, of_kind).any(axis=1)]
        right = origin[found[:, 0]] == origin[found[:, 1]]
        to_source = {
            row for pair in found[right] for row in pair if kind_of[row] == kind and (pair < len(gallery)).any()
        }
        cut = alone[np.isin(alone, of_kind).any(axis=1)], near[np.isin(alone, of_kind).any(axis=1)]
        nearest = cut[0][np.argsort(-cut[1])[: right.sum()]]
        row_of(
            name,
            f"{100 * right.mean():.1f}",
            f"{100 * len(to_source) / len(of_kind):.1f}",
            f"{100 * (origin[nearest[:, 0]] == origin[nearest[:, 1]]).mean():.1f}",
        )


def labels(arguments, results):
    """A row for each file of embeddings."""
    columns = ["images", "of", "classes", "planted", "at that number, %"]
    columns += ["reported", "precision, %", "recall, %", "right suggestions, %"]
    row_of = results.table("labels", *columns)
    for path in arguments.features:
        stored = read_embeddings(path)
        classes, own = np.unique(stored.labels, return_inverse=True)
        generator = np.random.default_rng(0)
        wrong = np.zeros(len(own), bool)
        wrong[generator.choice(len(own), len(own) // 10, replace=False)] = True
        noisy = np.where(wrong, (own + generator.integers(1, len(classes), len(own))) % len(classes), own)
        confidences, suggested = label_confidences(stored.embeddings, noisy)
        top = np.argsort(confidences)[: wrong.sum()]
        suspects = (confidences < 0.2) & (suggested != noisy)
        row_of(
            os.path.basename(path).partition(".")[0],
            f"{len(own):,}",
            f"{len(classes):,}",
            f"{wrong.sum():,}",
            f"{100 * wrong[top].mean():.1f}",
            f"{suspects.sum():,}",
            f"{100 * wrong[suspects].mean():.1f}",
            f"{100 * suspects[wrong].mean():.1f}",
            f"{100 * (suggested == own)[wrong].mean():.1f}",
        )


def identical(arguments, results):
    """Where the images with the same bytes and two labels are in the list of duplicates."""
    stored = read_embeddings(arguments.features[0])
    paths = [os.path.join(arguments.data_dir, name) for name in stored.names]
    by_bytes = {}
    for row, path in enumerate(paths):
        with open(path, "rb") as file:
            by_bytes.setdefault(hashlib.sha256(file.read()).hexdigest(), []).append(row)
    same = [rows for rows in by_bytes.values() if len(rows) > 1]
    conflicting = [rows for rows in same if len(set(stored.labels[rows])) > 1]
    of_test = [rows for rows in conflicting if all(stored.roles[row] == "test" for row in rows)]
    table = ImageTable(stored.names, stored.labels, stored.roles)
    found = audit(stored.embeddings, table, lambda row: np.asarray(Image.open(paths[row]).convert("RGB")))
    groups = {finding.row: finding.group for finding in found.of("duplicate")}
    places = {groups.get(row, 0) for rows in conflicting for row in rows}
    results.value("identical", len(same))
    results.value("conflicting", len(conflicting))
    results.value("conflicting_test", len(of_test))
    results.value("first_group", min(places))
    results.value("last_group", max(places))
    results.value("groups", len(set(groups.values())))


def cost(arguments, results):
    """Seconds and memory of an audit of embeddings alone."""
    generator = np.random.default_rng(0)
    own = np.arange(arguments.count) // 20
    centers = generator.standard_normal((own[-1] + 1, 512), "float32")
    x = centers[own] + generator.standard_normal((arguments.count, 512), "float32")
    table = ImageTable(tuple(map(str, range(len(x)))), own, ["train"] * len(x))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, used = time.perf_counter(), time.process_time()
    audit(x, table, pick=100)
    results.value("count", f"{arguments.count:,}")
    results.value("minutes", f"{(time.perf_counter() - started) / 60:.0f}")
    results.value("cpu_seconds", f"{time.process_time() - used:.0f}")
    results.value("mb", f"{(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024:,.0f}")


PARTS = {part.__name__: part for part in (duplicates, labels, identical, cost)}


def main():
    """Measure, print, and write."""
    parser = command_line(__doc__)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--features", nargs="+", default=["cars.npz"], help="embeddings; the first those of Cars-196")
    parser.add_argument("--data_dir", default="", help="Cars-196")
    parser.add_argument("--weights", default="imagenet", help="of MobileNetV2, which made --features")
    parser.add_argument("--sources", type=int, default=500, help="images that are copied")
    parser.add_argument("--gallery", type=int, default=4000, help="images of Cars-196 besides the copies")
    parser.add_argument("--count", type=int, default=60_000)
    arguments = parser.parse_args()
    results = Results(arguments.json)
    for part in arguments.parts:
        PARTS[part](arguments, results)


if __name__ == "__main__":
    main()
