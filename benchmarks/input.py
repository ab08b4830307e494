"""Images per second from JPEG files to augmented batches: ours, and bare TensorFlow.

    python -m benchmarks.input
    python -m benchmarks.input --sizes 341x256                               images that were shrunk beforehand
    python -m benchmarks.input --images=200 --rounds=1                       a quick try

JPEGs of --sizes are made first: shapes and noise at quality 90. All contenders run in turns, for some rounds; a row
shows the median.

- decoding alone: read and decode in parallel, nothing else: the limit of any input from JPEGs;
- by hand: the same with the transform as one would write it, `tf.image.resize` with antialiasing;
- tfdml: `tfdml.data.training_batches`, sampling, augmentation and batching included;
- tfdml, cached: the same with `cache=True`, the images being decoded before the clock starts.

All decode with libjpeg's accurate integer transform. Views: crop of 224 at a random place of the image resized to 256
(`random_crop`), or a random part resized to 224 (`random_resized_crop`); every second image is mirrored.
"""

import os
import statistics
import tempfile
import time

from tools.numbers import Results, command_line

RESIZE, CROP = 256, 224
KINDS = ("random_crop", "random_resized_crop")
NAMES = ("decoding alone", "by hand", "tfdml", "tfdml, cached")


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


def contenders(args, paths, kind):
    """What is compared, by name: functions that return images per second."""
    import numpy as np

    from tfdml.data import FileImages, ImageDataset, ShuffleSampler, TrainTransform, training_batches

    count, size = args.images, args.batch_size
    labels = np.arange(len(paths)) // 10
    names = {int(label): f"class {label}" for label in np.unique(labels)}
    dataset = ImageDataset("made", "train", FileImages(tuple(paths)), labels, names)
    sampler, view = ShuffleSampler(len(dataset), size), TrainTransform(kind, RESIZE, CROP)
    cached = training_batches(dataset, sampler, view, cache=True, cache_limit_mb=1 << 20)
    return {
        "decoding alone": lambda: drain(bare_batches(paths, size, None), count, size),
        "by hand": lambda: drain(bare_batches(paths, size, kind), count, size),
        "tfdml": lambda: drain(training_batches(dataset, sampler, view, cache=False), count, size),
        "tfdml, cached": lambda: drain(cached, count, size),
    }


def main():
    """Parse the command line and run."""
    parser = command_line(__doc__)
    parser.add_argument("--images", type=int, default=3000, help="images per round")
    parser.add_argument("--files", type=int, default=1000, help="JPEGs to make")
    parser.add_argument("--sizes", nargs="+", default=["1024x768", "500x375", "341x256"], help="WIDTHxHEIGHT of them")
    parser.add_argument("--batch_size", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    row = Results(args.json).table("table", "JPEGs", "view", *NAMES)
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            paths = make_jpegs(folder, args.files, tuple(int(side) for side in size.split("x")))
            for kind in KINDS:
                runners = contenders(args, paths, kind)
                rates: dict = {name: [] for name in runners}
                for number in range(args.rounds):
                    # Another order each round, so that none always follows the same one.
                    first = number % len(runners)
                    for name in [*list(runners)[first:], *list(runners)[:first]]:
                        rates[name].append(runners[name]())
                medians = (f"{statistics.median(rates[name]):,.0f}" for name in NAMES)
                row(size.replace("x", " x "), f"`{kind}`", *medians)


if __name__ == "__main__":
    main()
