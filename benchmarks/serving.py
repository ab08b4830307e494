"""`tfdml serve` under load: requests a second and latencies.

    python -m benchmarks.serving --images=photos --json=docs/numbers/serving.json

The model is a MobileNetV2 0.35 of 96 px with a random projection to 128 dimensions. `tfdml serve` runs in processes of
its own on the same machine as the clients. A request has one image, one in ten a bad one. Every answer is compared with
the SavedModel that is called directly: a good image must have its vector (1e-5), and a bad image an error.
"""

import contextlib
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

from benchmarks.serving_load import TOLERANCE, bad_images, client_module
from tools.numbers import Results, command_line

COLUMNS = ("clients", "requests/s", "median, ms", "99th percentile, ms", "requests", "wrong")


def write_model(folder, weights):
    """Write the model with its warm-up requests, and return a function from image bytes to its vector."""
    import keras
    import tensorflow as tf

    import tfdml
    from tfdml.export.saved_model import write_saved_model, write_warm_up

    keras.utils.set_random_seed(0)
    backbone = tfdml.backbones.resolve("mobilenetv2", image_size=96, alpha=0.35, weights=weights or None)
    embedder = tfdml.models.Embedder(backbone, embedding_dim=128, image_size=96, resize=112)
    embedder.build((None, 96, 96, 3))
    write_saved_model(embedder, folder)
    signatures = tf.saved_model.load(str(folder)).signatures
    write_warm_up(folder, signatures)
    return lambda image: signatures["serving_default"](image_bytes=tf.constant([image]))["embedding"].numpy()[0]


@contextlib.contextmanager
def start_server(model):
    """Start a server; yield the address, then end it."""
    command = [sys.executable, "-m", "tfdml", "serve", f"--model={model}", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            if not line.startswith("serving at "):
                raise SystemExit("the server did not start")
            yield line.split()[-1]
        finally:
            process.terminate()


def ask(url, images, vectors, end, seed, seconds, notes):
    """Ask one request after another until `end`; add the seconds of each, and a note on each wrong answer."""
    module, rng, bad = client_module(), random.Random(seed), list(bad_images(images[0]).values())
    while time.monotonic() < end:
        row = None if rng.random() < 0.1 else rng.randrange(len(images))
        started = time.perf_counter()
        try:
            image = rng.choice(bad) if row is None else images[row]
            outputs = module.predict(url, "embed_each", {"image_bytes": [image]})
        except Exception as error:
            notes.append(repr(error))
            continue
        seconds.append(time.perf_counter() - started)
        error = outputs["error"][0]
        if bool(error) != (row is None):
            notes.append(f"error {error!r} of {'a bad' if row is None else 'a good'} image")
        elif row is not None and np.abs(vectors[row] - outputs["embedding"][0]).max() > TOLERANCE:
            notes.append("another vector")


def main():
    """Parse the command line, serve, ask, print."""
    parser = command_line(__doc__)
    parser.add_argument("--images", required=True, help="a folder of JPEGs, at any depth")
    parser.add_argument("--weights", default="", help="of the backbone; empty: random")
    parser.add_argument("--count", type=int, default=48, help="images to send, spread over the folder")
    parser.add_argument("--seconds", type=int, default=20, help="of each row of the table")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64], help="clients at once, a row for each")
    args = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    paths = sorted(pathlib.Path(args.images).rglob("*.jpg"))
    images = [paths[row].read_bytes() for row in np.unique(np.linspace(0, len(paths) - 1, args.count).astype(int))]
    add, failed = Results(args.json).table("load", *COLUMNS), False
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(folder, "cars")
        embed = write_model(model / "1", args.weights)
        vectors = [embed(image) for image in images]
        with start_server(model) as url:
            for count in args.clients:
                seconds, notes, started = [], [], time.monotonic()
                arguments = (url, images, vectors, started + args.seconds)
                threads = [threading.Thread(target=ask, args=(*arguments, n, seconds, notes)) for n in range(count)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                median, high = 1e3 * np.percentile(seconds, [50, 99])
                rate = len(seconds) / (time.monotonic() - started)
                add(count, f"{rate:.0f}", f"{median:.0f}", f"{high:.0f}", f"{len(seconds):,}", len(notes))
                print("\n".join(notes[:5]))
                failed |= bool(notes)
    sys.exit(failed)


if __name__ == "__main__":
    main()
