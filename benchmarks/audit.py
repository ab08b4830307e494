"""What `tfdml audit` finds of planted near-duplicates and labels, and what it costs.

    python -m benchmarks.audit --features=cars.npz --data_dir=CARS196 --weights=MNV2.weights.h5 --json=audit.json
    python -m benchmarks.audit --features=cars.npz omniglot.npz --parts labels
    python -m benchmarks.audit --parts cost

Duplicates: of --sources images of Cars-196, copies of four kinds are searched among --gallery images of it. A pair is
right if both images come from one source. Labels: a tenth of the labels of each --features is exchanged for that of
another class, drawn evenly; as many labels are taken from the top of the list as were exchanged. Identical: the images
of Cars-196 whose bytes are the same and whose labels differ, and where their groups are in the list. Cost: --count
embeddings without images. --features are made by `python -m benchmarks.heads --table`, or by tfdml embed.
"""

import argparse
import hashlib
import io
import json
import os
import resource
import time

import numpy as np
from PIL import Image

from tfdml.audit import audit, label_confidences, near_duplicates
from tfdml.embeddings.reader import ImageTable, read_embeddings
from tfdml.retrieval import nearest_neighbours

KINDS = {
    "jpeg": "JPEG, quality 50",
    "crop": "crop of 90 % of width and height",
    "flip": "mirrored",
    "light": "30 % darker or brighter",
}


def planted(image, kind, generator):
    """The bytes of a copy of an image."""
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


def duplicates(arguments):
    """A row for each kind of copy."""
    import tfdml

    stored = read_embeddings(arguments.features[0])
    paths = [os.path.join(arguments.data_dir, name) for name in stored.names]
    generator = np.random.default_rng(0)
    sources = generator.choice(len(paths), arguments.sources, replace=False)
    copies, kinds, origins = [], [], []
    for kind in KINDS:
        for row in sources:
            copies.append(planted(Image.open(paths[row]).convert("RGB"), kind, generator))
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

    started = time.perf_counter()
    neighbors, distances = nearest_neighbours(x, k=10, distance="cosine")
    searched = time.perf_counter()
    pairs, _ = near_duplicates(neighbors, distances, picture)
    seconds = {"search": searched - started, "pixels": time.perf_counter() - searched}
    # By distance alone, as many pairs as there are true ones.
    alone, near = near_duplicates(neighbors, distances, max_distance=np.inf)
    rows = []
    for kind, name in KINDS.items():
        of_kind = np.flatnonzero(kind_of == kind)
        found = pairs[np.isin(pairs, of_kind).any(axis=1)]
        right = origin[found[:, 0]] == origin[found[:, 1]]
        to_source = {
            row for pair in found[right] for row in pair if kind_of[row] == kind and (pair < len(gallery)).any()
        }
        cut = alone[np.isin(alone, of_kind).any(axis=1)], near[np.isin(alone, of_kind).any(axis=1)]
        nearest = cut[0][np.argsort(-cut[1])[: right.sum()]]
        rows.append([
            name,
            f"{100 * right.mean():.1f}",
            f"{100 * len(to_source) / len(of_kind):.1f}",
            f"{100 * (origin[nearest[:, 0]] == origin[nearest[:, 1]]).mean():.1f}",
        ])  # fmt: skip
    wrong = [pair for pair in pairs.tolist() if origin[pair[0]] != origin[pair[1]] and max(pair) >= len(gallery)]
    names = [[paths[origin[row]] + (f" ({kind_of[row]})" if kind_of[row] else "") for row in pair] for pair in wrong]
    return {
        "images": f"{len(x):,}",
        "seconds": {name: f"{value:.0f}" for name, value in seconds.items()},
        "pairs": f"{int(np.isin(pairs, np.flatnonzero(kind_of != '')).any(axis=1).sum()):,}",
        "wrong": f"{len(wrong)}",
        "wrong_names": names,
        "table": {"columns": ["copy", "precision, %", "recall, %", "precision by distance alone, %"], "rows": rows},
    }


def labels(arguments):
    """A row for each file of embeddings."""
    rows = []
    for path in arguments.features:
        stored = read_embeddings(path)
        classes, own = np.unique(stored.labels, return_inverse=True)
        generator = np.random.default_rng(0)
        wrong = np.zeros(len(own), bool)
        wrong[generator.choice(len(own), len(own) // 10, replace=False)] = True
        given = np.where(wrong, (own + generator.integers(1, len(classes), len(own))) % len(classes), own)
        started = time.perf_counter()
        confidences, suggested = label_confidences(stored.embeddings, given)
        seconds = time.perf_counter() - started
        top = np.argsort(confidences)[: wrong.sum()]
        listed = (confidences < 0.2) & (suggested != given)
        rows.append([
            os.path.basename(path).partition(".")[0],
            f"{len(own):,}",
            f"{len(classes):,}",
            f"{wrong.sum():,}",
            f"{100 * wrong[top].mean():.1f}",
            f"{listed.sum():,}",
            f"{100 * wrong[listed].mean():.1f}",
            f"{100 * listed[wrong].mean():.1f}",
            f"{100 * (suggested == own)[wrong].mean():.1f}",
            f"{seconds:.0f}",
        ])  # fmt: skip
    columns = [
        "images", "of", "classes", "planted", "at that number, %",
        "reported", "precision, %", "recall, %", "right suggestions, %", "seconds",
    ]  # fmt: skip
    return {"table": {"columns": columns, "rows": rows}}


def identical(arguments):
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
    # Their neighbors are enough.
    table = ImageTable(stored.names, stored.labels, stored.roles)
    found = audit(stored.embeddings, table, lambda row: np.asarray(Image.open(paths[row]).convert("RGB")))
    groups = {finding.row: finding.group for finding in found.of("duplicate")}
    places = sorted({groups.get(row, 0) for rows in conflicting for row in rows})
    return {
        "identical": len(same),
        "conflicting": len(conflicting),
        "conflicting_test": len(of_test),
        "groups": f"{min(places)} to {max(places)}",
        "all_groups": len(set(groups.values())),
    }


def cost(arguments):
    """Seconds and memory of an audit of embeddings alone."""
    generator = np.random.default_rng(0)
    own = np.arange(arguments.count) // 20
    centers = generator.standard_normal((own[-1] + 1, 512), "float32")
    x = centers[own] + generator.standard_normal((arguments.count, 512), "float32")
    table = ImageTable(tuple(map(str, range(len(x)))), own, ["train"] * len(x))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    audit(x, table, pick=100)
    return {
        "count": f"{arguments.count:,}",
        "seconds": f"{time.perf_counter() - started:.0f}",
        "cpu_seconds": f"{time.process_time():.0f}",
        "mb": f"{(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024:,.0f}",
    }


def main():
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["duplicates", "labels", "identical", "cost"])
    parser.add_argument("--features", nargs="+", default=["cars.npz"], help="embeddings; the first those of Cars-196")
    parser.add_argument("--data_dir", default="", help="Cars-196")
    parser.add_argument("--weights", default="imagenet", help="of MobileNetV2, which made --features")
    parser.add_argument("--sources", type=int, default=500, help="images that are copied")
    parser.add_argument("--gallery", type=int, default=4000, help="images of Cars-196 besides the copies")
    parser.add_argument("--count", type=int, default=60_000)
    parser.add_argument("--json", default="", help="a file to write or to add to")
    arguments = parser.parse_args()
    result = {}
    if arguments.json and os.path.exists(arguments.json):
        with open(arguments.json, encoding="utf-8") as file:
            result = json.load(file)
    for part in arguments.parts:
        result[part] = {"duplicates": duplicates, "labels": labels, "identical": identical, "cost": cost}[part](
            arguments
        )
        print(json.dumps(result[part], indent=1), flush=True)
        if arguments.json:
            with open(arguments.json, "w", encoding="utf-8") as file:
                json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
