"""Open a web page of this machine to try a model: what it finds for an image.

  tfdml demo --model=runs/cars_jrd --gallery=photos
  tfdml demo --model=runs/cars_jrd --gallery=embeddings/cars --data_dir=/data/cars196
  tfdml demo --gallery=models/cars_retriever --data_dir=photos
  tfdml demo --model=models/cars --gallery='lancedb:///data/galleries?table=cars' --data_dir=/data/cars196

--gallery is one of
  a folder of images, or of class folders, which are embedded at the start
  a folder that tfdml embed wrote, or a Parquet, .npz or .npy file
  a retriever that tfdml export --gallery wrote; it embeds images itself
  the address of a database that tfdml index wrote

--calibration=fpir=0.01 is measured on the classes of the gallery: so many queries of unknown classes are accepted. By
default it is that of the retriever, or one of searches in the model card.

The page is at http://127.0.0.1:PORT and for this machine alone. With another --host, the address that is printed has a
random token, without which nobody is answered. Ctrl-C ends the demo.
"""

import contextlib
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.cli import model_flags
from tfdml.cli.command_line import Command, Flags
from tfdml.effects import Effect
from tfdml.embeddings.model_card import CARD, card_of, served_version
from tfdml.errors import UserError
from tfdml.evaluation.classification import TARGETS, Calibration, calibrate, target_of
from tfdml.export.exporter import read_calibration
from tfdml.export.retriever import RETRIEVER_CARD, Retriever
from tfdml.io.files import read_json
from tfdml.retrieval import connect
from tfdml.training import RunFolder

FLAGS = Flags()
FLAGS.define("gallery", "", "What is searched, see above.")
FLAGS.define("data_dir", "", "The folder of the images of a gallery of embeddings. No file of outside is shown.")
model_flags.define_distance(FLAGS)
FLAGS.define("calibration", "", "What is near enough: a JSON file of tfdml evaluate --target=fpir=0.01, or fpir=0.01.")
FLAGS.define("host", "127.0.0.1", "Address to listen at; 0.0.0.0: at all of this machine.")
FLAGS.define("port", 8765, "Port to listen at; 0: any that is free.", lower_bound=0, upper_bound=65535)
model_flags.define_model_flags(FLAGS)

# Images that a threshold is measured on.
_CALIBRATED_ON = 5000


def demo(values: Flags) -> None:
    """Serve the page as the flags say."""
    values.require("gallery")
    try:
        from tfdml import demo as web
    except ModuleNotFoundError as error:
        raise UserError(f"the demo needs the package {error.name}: pip install 'tfdml[demo]'") from error
    kind, distance = _kind(values.gallery), values.distance
    address, folder, model = map(os.path.expanduser, (values.gallery, values.data_dir, values.model))
    gallery: Any
    with contextlib.ExitStack() as opened:
        if kind == "retriever":
            retriever = Retriever.load(address)
            model, items = str(retriever.path), retriever.gallery()
            embed = lambda data: retriever.embed(data)[0]  # noqa: E731
            gallery = web.Gallery(address, items.ids, items.embeddings, items.classes, folder)
        else:
            values.require("model")
            source = model_flags.chosen_source(values, model)
            embed = web.embedder_of(source)
            if kind == "database":
                gallery = web.database_gallery(opened.enter_context(connect(address)), folder, source.fingerprint())
            elif kind == "embeddings":
                gallery = web.stored_gallery(address, folder, distance, source.fingerprint())
            else:
                gallery = web.folder_gallery(address, source, values.batch_size, distance)
        _try_out(embed, gallery)
        about = _about(model)
        calibration = _calibration(values.calibration, about, gallery)
        shown = web.Demo(gallery, embed, model, calibration)
        token = "" if values.host in ("127.0.0.1", "localhost", "::1") else secrets.token_urlsafe(24)
        web.serve(shown, values.host, values.port, token)


def _kind(gallery: str) -> str:
    """Return what a gallery is: as `kind_of_gallery`, or a folder of `images`."""
    kind, version = model_flags.kind_of_gallery(gallery), served_version(Path(os.path.expanduser(gallery)))
    return "images" if kind == "retriever" and not (version and (version / RETRIEVER_CARD).is_file()) else kind


def _try_out(embed: Callable[[bytes], np.ndarray], gallery: Any) -> None:
    """Search by an image, so that the first one of the page does not wait; refuse a model of another dimension."""
    query = embed(tf.io.encode_jpeg(np.full((256, 256, 3), 127, np.uint8)).numpy())
    if len(query) != gallery.embeddings.shape[1]:
        dimensions = f"{len(query)} dimensions, the gallery has {gallery.embeddings.shape[1]}"
        raise UserError(f"the model gives {dimensions}: both must be of one model")
    gallery.search(query, 12)
    try:
        gallery.picture(0, 64)
    except UserError as error:
        print(f"demo: images are not shown ({error}): name their folder by --data_dir", file=sys.stderr)


def _about(model: str) -> dict[str, Any]:
    """Return what is known of a model: its card, or the result of its run; empty where there is neither."""
    path = Path(model)
    version = served_version(path) or path
    card = version / RETRIEVER_CARD if (version / RETRIEVER_CARD).is_file() else card_of(version)
    return read_json(card) if card else RunFolder(version if version.is_dir() else version.parent).read_result() or {}


def _calibration(asked: str, about: dict[str, Any], gallery: Any) -> Calibration | None:
    """Return what is near enough to be of the gallery; None where nobody knows, or only for another distance."""
    if asked.startswith(TARGETS):
        target = target_of(asked, "calibration", kinds=("fpir",))
        if gallery.classes is None:
            raise UserError(f"`calibration={asked}` needs a gallery with classes")
        rows = np.random.default_rng(0).permutation(len(gallery))[:_CALIBRATED_ON]
        labels = np.unique(gallery.classes, return_inverse=True)[1]
        sides: dict[str, Any] = {"gallery": gallery.embeddings, "gallery_labels": labels, "own_rows": rows}
        return calibrate(gallery.embeddings[rows], labels[rows], distance=gallery.distance, **sides, **target)
    if asked:
        stored = read_json(os.path.expanduser(asked))
        calibration = read_calibration(stored.get("calibration") or stored, f"`calibration={asked}`")
    else:
        card = about.get("calibration")
        if not card or gallery.distance != "euclidean" or card.get("kind") != "fpir":
            return None
        calibration = read_calibration(card, CARD)
    return calibration.for_searches(gallery.distance, len(gallery))


def _for(text: str, *kinds: str) -> Effect:
    return Effect(lambda given: _kind(given["gallery"]) in kinds, text)


_BY_MODEL = _for("a gallery that does not embed images itself", "images", "embeddings", "database")
FLAGS.effects.update(
    {
        **dict.fromkeys(("model", "truncate_dim"), _BY_MODEL),
        "batch_size": _for("a folder of images as --gallery", "images"),
        "data_dir": _for("a gallery that is no folder of images", "embeddings", "database", "retriever"),
        "distance": _for("images or embeddings as --gallery", "images", "embeddings"),
    }
)
COMMAND = Command(
    "demo",
    demo,
    FLAGS,
    __doc__,
    flag_of={"uri": "gallery"},
)
