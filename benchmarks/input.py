"""Images per second from JPEG files to augmented batches: ours, and bare TensorFlow.

    python -m benchmarks.input
    python -m benchmarks.input --images=200 --rounds=1                       a quick try

JPEGs of shapes and noise are made first, at quality 90. All contenders run in turns, for some
rounds; a row shows the median.

- decoding alone: read and decode in parallel, nothing else: the limit of any input from JPEGs;
- by hand: the same with the transform as one would write it, `tf.image.resize` with antialiasing;
- tfdml: `tfdml.data.training_batches`, sampling, augmentation and batching included;
- tfdml, cached: the same with `cache=True`, the images being decoded before the clock starts.

All decode with libjpeg's accurate integer transform. Views: crop of 224 at a random place of the
image resized to 256; every second image is mirrored.
"""

import os
import statistics
import tempfile
import time

from benchmarks.timing import in_turns
from tools.numbers import Results, command_line

RESIZE, CROP = 256, 224
SIZES = ((1024, 768), (500, 375), (341, 256))


def make_jpegs(folder, count, size):
    """Write JPEGs of shapes and noise; returns their paths."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    paths = []
    for number in range(count):
        shapes = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
        pixels = np.asarray(shapes.resize(size, Image.Resampling.BICUBIC)) + rng.normal(
            0, 7, (size[1], size[0], 1)
        )
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


def bare_batches(paths, batch_size, augment):
    """Batches of a tf.data pipeline written by hand; without `augment` it decodes only."""
    import tensorflow as tf

    def load(path):
        image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3, dct_method="INTEGER_ACCURATE")
        size = tf.shape(image)[:2]
        if not augment:
            # Images of several sizes make no batch: of what is only decoded, the size is enough.
            return size
        resized = tf.image.resize(image, size * RESIZE // tf.reduce_min(size), antialias=True)
        crop = tf.image.random_crop(tf.cast(resized + 0.5, tf.uint8), (CROP, CROP, 3))
        return tf.image.random_flip_left_right(crop)

    names = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths), seed=0).repeat()
    return (
        names.map(load, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(batch_size)
        .prefetch(tf.data.AUTOTUNE)
    )


def contenders(args, paths):
    """What is compared, by name: functions that return images per second."""
    import numpy as np

    from tfdml.data import (
        FileImages,
        ImageDataset,
        ShuffleSampler,
        TrainTransform,
        training_batches,
    )

    count, size = args.images, args.batch_size
    dataset = ImageDataset(
        "made", "train", FileImages(tuple(paths)), np.zeros(len(paths), int), {0: "made"}
    )
    sampler, view = ShuffleSampler(len(dataset), size), TrainTransform("random_crop", RESIZE, CROP)
    cached = training_batches(dataset, sampler, view, cache=True, cache_limit_mb=1 << 20)
    return {
        "decoding alone": lambda: drain(bare_batches(paths, size, augment=False), count, size),
        "by hand": lambda: drain(bare_batches(paths, size, augment=True), count, size),
        "tfdml": lambda: drain(training_batches(dataset, sampler, view, cache=False), count, size),
        "tfdml, cached": lambda: drain(cached, count, size),
    }


def main():
    """Parse the command line and run."""
    parser = command_line(__doc__)
    parser.add_argument("--images", type=int, default=3000, help="images per round")
    parser.add_argument("--files", type=int, default=1000, help="JPEGs to make")
    parser.add_argument("--batch_size", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    row = None
    for width, height in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            rates = in_turns(
                contenders(args, make_jpegs(folder, args.files, (width, height))), args.rounds
            )
        row = row or Results(args.json).table("table", "JPEGs", *rates)
        row(
            f"{width} x {height}",
            *(f"{statistics.median(values):,.0f}" for values in rates.values()),
        )


if __name__ == "__main__":
    main()
