"""A server under good and bad requests of several clients: its speed, and its answers compared with
the offline model.

    python -m benchmarks.serving --model=models/cars --images=photos
    python -m benchmarks.serving --model=models/cars --images=photos --url=grpc://host:8500/embedder

By default `tfdml serve` runs in processes of its own. Clients take their time from the same cores,
and each sends one request after another: good batches, batches with bad images in them, and whole
requests that are bad. An answer is wrong where a good image has an error or another vector than
offline (1e-5), a bad one has no error, or a search finds other items than a search by hand. The
exit status is 1 where one is.
"""

import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import io
import os
import pathlib
import random
import re
import struct
import subprocess
import sys
import zlib

import numpy as np

from benchmarks.timing import time_call
from tools.numbers import Results, command_line

TOLERANCE = 1e-5
ROOT = pathlib.Path(__file__).resolve().parents[1]


def client_module():
    """`export/client.py`, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("tfdml_client", ROOT / "export" / "client.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def bomb(side=30_000):
    """Return a PNG of a few hundred bytes whose header declares side x side pixels."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + chunk(b"IDAT", zlib.compress(bytes(100)))
        + chunk(b"IEND", b"")
    )


def bad_images(jpeg):
    """Images that cannot be embedded: no bytes, text, cut in the pixels and in the header, and too
    many pixels."""
    return [b"", b"hello, world", jpeg[: len(jpeg) // 2], jpeg[:30], bomb()]


def odd_images():
    """Images that are unusual but good: a single pixel, and WebP."""
    from PIL import Image

    made = []
    for form, image in (
        ("PNG", Image.new("RGB", (1, 1), "red")),
        ("WEBP", Image.radial_gradient("L").convert("RGB")),
    ):
        buffer = io.BytesIO()
        image.save(buffer, form)
        made.append(buffer.getvalue())
    return made


@dataclasses.dataclass
class Tally:
    """What all clients met; they append to the same lists.

    Attributes:
        items: "good" for each good image, "bad" for each bad image or request, "refused" for each
            that was.
        wrong: A line for each wrong answer.
        seconds: Of each request.
        elapsed: Seconds of all.
    """

    items: list = dataclasses.field(default_factory=list)
    wrong: list = dataclasses.field(default_factory=list)
    seconds: list = dataclasses.field(default_factory=list)
    elapsed: float = 0.0

    def cells(self):
        """Return those of the table, without the name."""
        counts = [
            len(self.seconds),
            *(self.items.count(kind) for kind in ("good", "bad", "refused")),
            len(self.wrong),
        ]
        speeds = [
            len(self.seconds) / self.elapsed,
            *np.percentile(1e3 * np.array(self.seconds), [50, 95]),
        ]
        return [f"{value:,}" for value in counts] + [f"{value:.0f}" for value in speeds]


COLUMNS = (
    "requests",
    "good images",
    "bad",
    "refused as a whole",
    "wrong",
    "requests/s",
    "p50, ms",
    "p95, ms",
)


class Load:
    """The requests and their expected answers.

    Args:
        client: The module of `client_module`.
        images: Good images.
        embeddings: (N, d), what the offline embedder makes of them.
        gallery: (M, d) embeddings of the retriever's gallery and their ids; None where none is
            served.
    """

    def __init__(self, client, images, embeddings, gallery=None):
        self.client = client
        self.images = images
        self.embeddings = embeddings
        self.gallery = gallery
        self.bad = bad_images(images[0])

    def run(self, urls, clients, requests):
        """Let clients send requests at once.

        Args:
            urls: The address of the embedder and, where there is a gallery, of the retriever.
            clients: How many threads.
            requests: How many requests each sends.
        """
        tally = Tally()

        def work(seed):
            rng = random.Random(seed)
            for _ in range(requests):
                tally.seconds.append(time_call(self._one, urls, rng, tally)[1])

        with concurrent.futures.ThreadPoolExecutor(clients) as threads:
            _, tally.elapsed, _ = time_call(lambda: list(threads.map(work, range(clients))))
        return tally

    def _one(self, urls, rng, tally):
        rows = [rng.randrange(len(self.images)) for _ in range(rng.randint(1, 6))]
        kind = rng.choice(["good", "good", "mixed", "mixed", "bad request", "search"])
        if kind == "bad request":
            self._bad_request(urls, rng, tally)
        elif kind == "search" and self.gallery is not None:
            self._search(urls[1], rows, rng, tally)
        else:
            batch = [(self.images[row], row) for row in rows]
            if kind == "mixed":
                for _ in range(rng.randint(1, 3)):
                    batch.insert(rng.randint(0, len(batch)), (rng.choice(self.bad), None))
            outputs = self.client.predict(
                urls[0], "embed_each", {"image_bytes": [image for image, _ in batch]}
            )
            for (_, row), vector, error in zip(
                batch, outputs["embedding"], outputs["error"], strict=True
            ):
                self._judge(None if row is None else self.embeddings[row], vector, error, tally)

    def _judge(self, expected, vector, error, tally):
        tally.items.append("bad" if expected is None else "good")
        right = (
            error
            if expected is None
            else not error and np.abs(np.array(vector) - expected).max() <= TOLERANCE
        )
        if not right:
            tally.wrong.append(
                f"wanted {'an error' if expected is None else 'a vector'}, got {error or vector}"
            )

    def _search(self, url, rows, rng, tally):
        vectors, ids = self.gallery
        k = rng.choice([1, 3, len(ids) + 5])
        inputs = {"image_bytes": [self.images[row] for row in rows], "k": [k] * len(rows)}
        outputs = self.client.predict(url, "search_each", inputs)
        for row, names, error in zip(rows, outputs["ids"], outputs["error"], strict=True):
            tally.items.append("good")
            distances = np.linalg.norm(vectors.astype(np.float64) - self.embeddings[row], axis=1)
            own = [] if error else np.array([distances[ids.index(name)] for name in names])
            # Items that are equally near but for rounding may change places.
            nearest = np.sort(distances)[:k]
            if len(own) != len(nearest) or np.abs(own - nearest).max() > 1e-4:
                tally.wrong.append(f"search for {row}: {error or names}")

    def _bad_request(self, urls, rng, tally):
        """Send a request that is refused as a whole."""
        dimensions = self.embeddings.shape[1]
        nan = [1.0] * (dimensions - 1) + [float("nan")]
        requests = [
            (0, "serving_default", {"image_bytes": [1, 2]}),
            (0, "serving_default", {"pictures": [self.images[0]]}),
            (0, "no_such_signature", {"image_bytes": [self.images[0]]}),
            (0, "serving_default", {"image_bytes": [self.images[0], b""]}),
        ]
        if self.gallery is not None:
            requests += [
                (1, "search_embedding", {"embedding": [[1.0] * dimensions, nan], "k": [2, 2]}),
                (1, "search_embedding", {"embedding": [[1.0] * (dimensions - 1)], "k": [2]}),
                (1, "search_embedding", {"embedding": [[1.0] * dimensions], "k": [0]}),
                (1, "search_bytes", {"image_bytes": [self.images[0], b"no"], "k": [2, 2]}),
            ]
        which, signature, inputs = rng.choice(requests)
        tally.items.append("bad")
        try:
            self.client.predict(urls[which], signature, inputs, 60.0)
        except self.client.ServerError as refused:
            if re.match("(400|INVALID_ARGUMENT|FAILED_PRECONDITION): .", str(refused)):
                tally.items.append("refused")
                return
        tally.wrong.append(f"{signature} of {list(inputs)} was not refused in words")


def offline_embeddings(path, images):
    """Return a model's embeddings in this process, through the pipeline of the evaluation."""
    from tfdml.data import EncodedImages, ImageDataset
    from tfdml.embeddings.backends import load_backend

    names = tuple(f"image {row}" for row in range(len(images)))
    dataset = ImageDataset(
        "load", "test", EncodedImages(tuple(images), names), np.zeros(len(images)), {0: "0"}
    )
    return load_backend(path).embed(dataset, 16)


@contextlib.contextmanager
def tfdml_serve(model):
    """Start `tfdml serve`; yield the address, then end it."""
    command = [sys.executable, "-m", "tfdml", "serve", f"--model={model}", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            if not line.startswith("serving at "):
                raise SystemExit("the server did not start")
            yield line.split()[-1]
        finally:
            process.terminate()


def main():
    """Parse the command line, serve, load, print."""
    parser = command_line(__doc__)
    parser.add_argument("--model", required=True, help="an exported version, or a folder of them")
    parser.add_argument("--images", required=True, help="a folder of images, at any depth")
    parser.add_argument("--retriever", default="", help="the retriever at the second --url")
    parser.add_argument(
        "--url", nargs="*", default=[], help="of the embedder, then of the retriever"
    )
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[1, 8, 64], help="clients at once, a row for each"
    )
    parser.add_argument("--requests", type=int, default=100, help="requests of each client")
    parser.add_argument(
        "--count", type=int, default=48, help="good images to send, spread over the folder"
    )
    args = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from tfdml.export.retriever import Retriever

    endings = (".jpg", ".jpeg", ".png")
    paths = sorted(
        path for path in pathlib.Path(args.images).rglob("*") if path.suffix.lower() in endings
    )
    chosen = [
        paths[row] for row in np.unique(np.linspace(0, len(paths) - 1, args.count).astype(int))
    ]
    images = [path.read_bytes() for path in chosen] + odd_images()
    gallery = None
    if args.retriever:
        stored = Retriever.load(args.retriever).gallery()
        gallery = (stored.embeddings, list(stored.ids))
    load = Load(client_module(), images, offline_embeddings(args.model, images), gallery)
    row, wrong = Results(args.json).table("load", "", "clients", *COLUMNS), 0
    with contextlib.ExitStack() as stack:
        urls = args.url or [stack.enter_context(tfdml_serve(args.model))]
        for clients in args.clients:
            tally = load.run(urls, clients, args.requests)
            wrong += len(tally.wrong)
            row(args.url[0] if args.url else "tfdml serve", clients, *tally.cells())
            for note in tally.wrong[:5]:
                print(f"  wrong: {note}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
