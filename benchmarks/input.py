"""Images per second from JPEG files to augmented batches: ours, bare TensorFlow, and a PyTorch DataLoader with Pillow.

    python -m benchmarks.input --torch_python=/path/to/python/with/torch
    python -m benchmarks.input --dataset=cars196 --data_dir=/data/cars196 --images=4000
    python -m benchmarks.input --sizes 341x256                               images that were shrunk beforehand
    python -m benchmarks.input --images=200 --rounds=1                       a quick try

Without --dataset, JPEGs of --sizes are made first: shapes and noise at quality 90. All contenders run side by side, in
turns, for some rounds; a row shows the median.

- decoding alone: read and decode in parallel, nothing else: the limit of any input from JPEGs;
- by hand: the same with the transform as one would write it, `tf.image.resize` with antialiasing;
- at least: the same with the part of the image that is needed decoded alone and resized without antialiasing, the
  cheapest that TensorFlow offers; its pixels are not those of the others, and no other format or EXIF is looked for;
- tfdml: `tfdml.data.training_batches`, sampling, augmentation and batching included;
- tfdml, cached: the same with `cache=True`, the images being decoded before the clock starts;
- DataLoader: PyTorch's, with Pillow doing the same transform in as many worker processes as there are cores. It runs
  in the environment of --torch_python, or in this one where torch can be imported.

All decode with libjpeg's accurate integer transform. Views: crop of 224 at a random place of the image resized to 256
(`random_crop`), or a random part resized to 224 (`random_resized_crop`); every second image is mirrored.
"""

import importlib.util
import json
import math
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

RESIZE, CROP = 256, 224
KINDS = ("random_crop", "random_resized_crop")
NAMES = ("decoding alone", "by hand", "at least", "tfdml", "tfdml, cached", "DataLoader")


def make_jpegs(folder, count, size):
    """Write JPEGs of shapes and noise; returns their paths."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    paths = []
    for number in range(count):
        shapes = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
        pixels = np.asarray(shapes.resize(size, Image.Resampling.BICUBIC)) + rng.normal(0, 7, (size[1], size[0], 1))
        path = os.path.join(folder, f"{number:05d}.jpg")
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path, quality=90)
        paths.append(path)
    return paths


def drain(batches, count, batch_size):
    """Images per second of an iterator of batches, after four to warm up."""
    iterator = iter(batches)
    for _ in range(4):
        next(iterator)
    started = time.perf_counter()
    for _ in range(count // batch_size):
        next(iterator)
    return count // batch_size * batch_size / (time.perf_counter() - started)


def bare_batches(paths, batch_size, kind):
    """Batches of a tf.data pipeline written by hand; kind None decodes only."""
    import tensorflow as tf

    def resized(image, size):
        return tf.cast(tf.image.resize(image, size, antialias=True) + 0.5, tf.uint8)

    def crop(image):
        size = tf.shape(image)[:2]
        if kind == "random_crop":
            image = resized(image, size * RESIZE // tf.reduce_min(size))
            image = tf.image.random_crop(image, (CROP, CROP, 3))
        else:
            begin, part, _ = tf.image.sample_distorted_bounding_box(
                tf.shape(image), tf.zeros((1, 0, 4)), 0, 0.0, (3 / 4, 4 / 3), (0.08, 1.0), 10, True
            )
            image = resized(tf.ensure_shape(tf.slice(image, begin, part), (None, None, 3)), (CROP, CROP))
        return tf.image.random_flip_left_right(image)

    def load(path):
        image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3, dct_method="INTEGER_ACCURATE")
        # Images of several sizes make no batch: of what is only decoded, the size is enough.
        return tf.shape(image) if kind is None else crop(image)

    names = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths), seed=0).repeat()
    return names.map(load, num_parallel_calls=tf.data.AUTOTUNE).batch(batch_size).prefetch(tf.data.AUTOTUNE)


def least_batches(paths, batch_size, kind):
    """Batches of the cheapest pipeline that TensorFlow's operations allow for the view."""
    import tensorflow as tf

    def load(path):
        encoded = tf.io.read_file(path)
        size = tf.io.extract_jpeg_shape(encoded)
        if kind == "random_crop":
            side = tf.reduce_min(size[:2]) * CROP // RESIZE
            top_left = tf.cast(tf.random.uniform((2,)) * tf.cast(size[:2] - side + 1, tf.float32), tf.int32)
            window = tf.concat([top_left, [side, side]], 0)
        else:
            begin, part, _ = tf.image.sample_distorted_bounding_box(
                size, tf.zeros((1, 0, 4)), 0, 0.0, (3 / 4, 4 / 3), (0.08, 1.0), 10, True
            )
            window = tf.concat([begin[:2], part[:2]], 0)
        part = tf.io.decode_and_crop_jpeg(encoded, window, channels=3, dct_method="INTEGER_ACCURATE")
        view = tf.raw_ops.ResizeBilinear(images=part[None], size=(CROP, CROP), half_pixel_centers=True)[0]
        return tf.cast(tf.image.random_flip_left_right(view) + 0.5, tf.uint8)

    names = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths), seed=0).repeat()
    return names.map(load, num_parallel_calls=tf.data.AUTOTUNE).batch(batch_size).prefetch(tf.data.AUTOTUNE)


def tfdml_batches(dataset, batch_size, kind, cache):
    """Batches of tfdml."""
    from tfdml.data import ShuffleSampler, TrainTransform, training_batches

    sampler, view = ShuffleSampler(len(dataset), batch_size), TrainTransform(kind, RESIZE, CROP)
    return training_batches(dataset, sampler, view, cache=cache, cache_limit_mb=1 << 20)


class PillowImages:
    """A PyTorch data set whose images are cut by Pillow; needs nothing of TensorFlow or tfdml."""

    def __init__(self, paths, kind):
        self.paths, self.kind = paths, kind

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        import numpy as np
        import torch
        from PIL import Image

        with Image.open(self.paths[index]) as image:
            image = image.convert("RGB")
        width, height = image.size
        if self.kind == "random_crop":
            factor = RESIZE / min(width, height)
            width, height = max(RESIZE, int(width * factor)), max(RESIZE, int(height * factor))
            left, top = random.randint(0, width - CROP), random.randint(0, height - CROP)
            image = image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + CROP, top + CROP))
        else:
            image = image.resize((CROP, CROP), Image.Resampling.BILINEAR, box=self._part(width, height))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)), 0

    @staticmethod
    def _part(width, height):
        for _ in range(10):
            area = width * height * random.uniform(0.08, 1.0)
            ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            part_width, part_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < part_width <= width and 0 < part_height <= height:
                left, top = random.randint(0, width - part_width), random.randint(0, height - part_height)
                return left, top, left + part_width, top + part_height
        side = min(width, height)
        return (width - side) // 2, (height - side) // 2, (width + side) // 2, (height + side) // 2


def torch_rate(list_file, batch_size, kind, count, workers):
    """Images per second of the DataLoader, in this process's environment."""
    from torch.utils.data import DataLoader

    paths = pathlib.Path(list_file).read_text(encoding="utf-8").splitlines()
    paths = paths * (1 + (count + 8 * batch_size * workers) // len(paths))
    loader = DataLoader(PillowImages(paths, kind), batch_size, shuffle=True, num_workers=workers, drop_last=True)
    return drain(loader, count, batch_size)


def torch_rate_elsewhere(python, list_file, args, kind):
    """The same in a process of another environment."""
    settings = {"list_file": list_file, "batch_size": args.batch_size, "kind": kind, "count": args.images}
    command = [python, os.path.abspath(__file__), "--torch_role", json.dumps({**settings, "workers": args.workers})]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the DataLoader failed in {python}:\n{done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def contenders(args, dataset, paths, list_file, kind):
    """What is compared, by name: functions that return images per second."""
    count, size = args.images, args.batch_size
    found = {
        "decoding alone": lambda: drain(bare_batches(paths, size, None), count, size),
        "by hand": lambda: drain(bare_batches(paths, size, kind), count, size),
        "at least": lambda: drain(least_batches(paths, size, kind), count, size),
        "tfdml": lambda: drain(tfdml_batches(dataset, size, kind, cache=False), count, size),
    }
    if not args.no_cache:
        cached = tfdml_batches(dataset, size, kind, cache=True)
        found["tfdml, cached"] = lambda: drain(cached, count, size)
    python = args.torch_python or (sys.executable if importlib.util.find_spec("torch") else None)
    if python:
        found["DataLoader"] = lambda: torch_rate_elsewhere(python, list_file, args, kind)
    return found


def compare(args, size, dataset, paths, list_file, row):
    """Run all contenders of every view in turns and add their rows."""
    for kind in args.kinds:
        runners = contenders(args, dataset, paths, list_file, kind)
        rates = {name: [] for name in runners}
        for number in range(args.rounds):
            # Another order each round, so that none always follows the same one.
            first = number % len(runners)
            for name in [*list(runners)[first:], *list(runners)[:first]]:
                rates[name].append(runners[name]())
        row(size, f"`{kind}`", *(f"{statistics.median(rates[name]):,.0f}" if name in rates else "" for name in NAMES))


def main():
    """Parse the command line and run."""
    if "--torch_role" in sys.argv:
        print(torch_rate(**json.loads(sys.argv[-1])))
        return
    from tools.numbers import Results, command_line

    parser = command_line(__doc__)
    parser.add_argument("--dataset", help="a name of the catalog, whose images are files; else JPEGs are made")
    parser.add_argument("--data_dir", help="where it lies")
    parser.add_argument("--images", type=int, default=3000, help="images per round")
    parser.add_argument("--files", type=int, default=1000, help="JPEGs to make, without --dataset")
    parser.add_argument("--sizes", nargs="+", default=["1024x768", "500x375", "341x256"], help="WIDTHxHEIGHT of them")
    parser.add_argument("--batch_size", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes of the DataLoader")
    parser.add_argument("--torch_python", help="a Python that has torch, numpy and pillow")
    parser.add_argument("--no_cache", action="store_true", help="leave out the cached contender")
    args = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import numpy as np

    from tfdml.data import FileImages, ImageDataset, load

    print(f"{args.images} images a round, {args.rounds} rounds, {os.cpu_count()} cores: images a second")
    row = Results(args.json).table("table", "JPEGs", "view", *NAMES)
    for size in [args.dataset] if args.dataset else args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            if args.dataset:
                dataset = load(args.dataset, args.data_dir, "train")
                if not isinstance(dataset.images, FileImages):
                    raise SystemExit(f"--dataset={size}: the other contenders read files; choose a set of files")
                paths = list(dataset.images.paths)
            else:
                paths = make_jpegs(folder, args.files, tuple(int(side) for side in size.split("x")))
                labels = np.arange(len(paths)) // 10
                names = {int(label): f"class {label}" for label in np.unique(labels)}
                dataset = ImageDataset("made", "train", FileImages(tuple(paths)), labels, names)
            if not all(path.lower().endswith((".jpg", ".jpeg")) for path in paths):
                raise SystemExit(f"--dataset={size}: the bare loops decode JPEGs only")
            list_file = os.path.join(folder, "paths.txt")
            pathlib.Path(list_file).write_text("\n".join(paths), encoding="utf-8")
            compare(args, size.replace("x", " x "), dataset, paths, list_file, row)


if __name__ == "__main__":
    main()
