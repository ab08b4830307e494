"""`tfdml demo`: a local web page to try a model."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tfdml.cli import model_flags
from tfdml.cli.command_line import Command, Flags
from tfdml.cli.main import Progress
from tfdml.effects import Effect, both
from tfdml.embeddings.model_card import CARD, served_version
from tfdml.errors import UserError
from tfdml.evaluation import Calibration, calibrate
from tfdml.evaluation.verification import target_of
from tfdml.export.retriever import RETRIEVER_CARD, Retriever
from tfdml.export.saved_model import read_calibration
from tfdml.io.manifests import read_json
from tfdml.report.metric_text import numbers
from tfdml.retrieval import connect
from tfdml.training import RunFolder

USAGE = f"""
Open a web page of this machine to try a model: what it finds for an image, and the map of its embeddings.

  tfdml demo --model=runs/cars_jrd --gallery=photos
  tfdml demo --model=runs/cars_jrd --gallery=embeddings/cars --data_dir=/data/cars196
  tfdml demo --gallery=models/cars_retriever --data_dir=photos
  tfdml demo --model=models/cars --gallery='lancedb:///data/galleries?table=cars' --data_dir=/data/cars196

--gallery is one of
  a folder of images, or of class folders; it is embedded at the first time
  a folder that tfdml embed wrote, or a Parquet, .npz or .npy file
  a retriever that tfdml export --gallery wrote; it embeds images itself
  the address of a database that tfdml index wrote

{model_flags.SOURCES}

The page is at http://127.0.0.1:PORT and for this machine alone. With another --host, the address that is printed has a
random token, without which nobody is answered. Ctrl-C ends the demo.
"""

FLAGS = Flags()
FLAGS.define("gallery", "", "What is searched, see above.")
FLAGS.define("data_dir", "", "Where the images of a gallery of embeddings are: the folder that their names are below.")
FLAGS.define("distance", "euclidean", "What near means.", ["euclidean", "sqeuclidean", "cosine", "dot"])
FLAGS.define(
    "calibration",
    "",
    "When two images are the same: a JSON file of tfdml evaluate --target; or far=0.01, measured on the classes of the "
    "gallery. By default that of the model card or retriever.",
)
FLAGS.define("cache", "~/.cache/tfdml/demo", "Folder where the embeddings of a folder of images and maps are kept.")
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
        if (error.name or "").startswith("tfdml"):
            raise
        raise UserError(f"the demo needs the package {error.name}: pip install 'tfdml[demo]'") from error
    kind, address, folder = _kind(values.gallery), os.path.expanduser(values.gallery), values.data_dir
    folder, cache = os.path.expanduser(folder), os.path.expanduser(values.cache)
    distance, model = values.distance, os.path.expanduser(values.model)
    gallery: Any
    with contextlib.ExitStack() as opened:
        if kind == "retriever":
            retriever = Retriever.load(address)
            gallery, embed = _of_retriever(retriever, folder, values.gallery), lambda data: retriever.embed(data)[0]
            model, explain = str(retriever.path), None
        else:
            values.require("model")
            source = model_flags.chosen_source(values, model)
            embed, explain = web.embedder_of(source), web.explainer_of(source)
            if kind == "images":
                progress = opened.enter_context(Progress())
                gallery = web.folder_gallery(
                    address,
                    source,
                    cache,
                    batch_size=values.batch_size,
                    distance=distance,
                    report=print,
                    progress=progress.images,
                )
            elif kind == "embeddings":
                gallery = web.stored_gallery(address, folder, distance)
            else:
                gallery = web.DatabaseGallery(opened.enter_context(connect(values.gallery)), folder)
        _try_out(embed, gallery)
        about = _about(model)
        shown = web.Demo(
            gallery,
            embed,
            model,
            numbers(about.get("metrics") or {}),
            _calibration(values.calibration, about, gallery),
            cache,
            explain,
        )
        token = "" if values.host in ("127.0.0.1", "localhost", "::1") else secrets.token_urlsafe(24)
        ready = functools.partial(_ready, gallery.count)
        web.serve(shown, values.host, values.port, token, ready)


def _ready(count: int, address: str) -> None:
    print(f"{count:,} images at {address} (Ctrl-C ends the demo)", flush=True)


def _kind(gallery: str) -> str:
    """Return what a gallery is: as `kind_of_gallery`, or a folder of `images`."""
    kind, version = model_flags.kind_of_gallery(gallery), served_version(Path(os.path.expanduser(gallery)))
    return "images" if kind == "retriever" and not (version and (version / RETRIEVER_CARD).is_file()) else kind


def _of_retriever(retriever: Retriever, folder: str, title: str) -> Any:
    from tfdml.demo import Gallery

    gallery = retriever.gallery()
    return Gallery(title, list(gallery.ids), gallery.embeddings, {"class": gallery.classes}, folder)


def _try_out(embed: Callable[[bytes], np.ndarray], gallery: Any) -> None:
    """Search by an image, so that the first one of the page does not wait; refuse a model of another dimension."""
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (256, 256), (127, 127, 127)).save(buffer, "JPEG")
    query = embed(buffer.getvalue())
    dimension = len(query)
    if dimension != gallery.dimension:
        raise UserError(
            f"the model gives {dimension} dimensions, the gallery has {gallery.dimension}: both must be of one model"
        )
    gallery.search(query, 12)
    try:
        gallery.picture(0, 64)
    except UserError as error:
        print(f"demo: images are not shown ({error}): name their folder by --data_dir", file=sys.stderr)


def _about(model: str) -> dict[str, Any]:
    """Return what is known of a model: its card, or the result of its run; empty where there is neither."""
    path = Path(model)
    version = served_version(path) or (path if path.is_dir() else path.parent)
    for card in (version / CARD, version / RETRIEVER_CARD, version.parent / CARD):
        if card.is_file():
            return read_json(card)
    return RunFolder(version).read_result() or {}


def _calibration(asked: str, about: dict[str, Any], gallery: Any) -> Calibration | None:
    """Return when two images are the same; None where nobody knows, or only for another distance."""
    if re.match("(far|precision)=", asked):
        target = target_of(asked, "calibration")
        column = gallery.columns.get("class") or gallery.columns.get("label")
        if column is None:
            raise UserError(f"`calibration={asked}` needs a gallery with classes")
        rows = np.random.default_rng(0).permutation(len(gallery))[:_CALIBRATED_ON]
        return calibrate(gallery.embeddings[rows], column.codes[rows], distance=gallery.distance, **target)
    if asked:
        stored = read_json(os.path.expanduser(asked))
        found = Calibration.from_dict(stored.get("calibration") or stored)
    elif about.get("calibration"):
        found = read_calibration(about["calibration"], CARD)
    else:
        return None
    if found.distance == gallery.distance:
        return found
    if asked:
        searched = f"the gallery is searched by {gallery.distance}"
        raise UserError(f"`calibration={asked}` is of the distance {found.distance}, {searched}")
    return None


_BY_MODEL = Effect(lambda given: _kind(given["gallery"]) != "retriever", "a gallery that does not embed images itself")
COMMAND = Command(
    "demo",
    demo,
    FLAGS,
    USAGE,
    effects={
        **{name: both(_BY_MODEL, effect) for name, effect in model_flags.EFFECTS.items()},
        **dict.fromkeys(("model", "truncate_dim"), _BY_MODEL),
        "batch_size": Effect(lambda given: _kind(given["gallery"]) == "images", "a folder of images as --gallery"),
        "data_dir": Effect(lambda given: _kind(given["gallery"]) != "images", "a gallery that is no folder of images"),
        "distance": Effect(
            lambda given: _kind(given["gallery"]) in ("images", "embeddings"), "images or embeddings as --gallery"
        ),
    },
    flag_of={"uri": "gallery"},
)
