r"""Open a web page of this machine to try a model: what it finds for an image.

  tfdml demo --model=runs/cars_jrd --gallery=photos
  tfdml demo --model=runs/cars_jrd --gallery=embeddings/cars --data_dir=/data/cars196
  tfdml demo --gallery=models/cars_retriever --data_dir=photos
  tfdml demo --model=models/cars --gallery='lancedb:///data/galleries?table=cars' \
      --data_dir=/data/cars196

--gallery is one of
  a folder of images, or of class folders, which are embedded at the start
  a folder that tfdml embed wrote, or a Parquet, .npz or .npy file
  a retriever that tfdml export --gallery wrote; it embeds images itself
  the address of a database that tfdml index wrote

--calibration is the JSON file of tfdml evaluate --task=classification --target=fpir=0.01. By
default the threshold is that of the retriever, or one of searches in the model card.

The page is at http://127.0.0.1:PORT and for this machine alone. With another --host, the address
that is printed has a random token, without which nobody is answered. Ctrl-C ends the demo.
"""

import dataclasses
import os
import secrets
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfdml.cli.command_line import Command, Flags
from tfdml.cli.model_flags import ModelFlags, kind_of_gallery, load_source
from tfdml.embeddings.model_card import card_of, served_version
from tfdml.errors import UserError
from tfdml.evaluation import Calibration
from tfdml.export.exporter import calibration_of_file
from tfdml.export.retriever import Retriever
from tfdml.flags import Effect
from tfdml.io.files import read_json
from tfdml.registry import DISTANCES
from tfdml.training.settings import choice


def _for(text: str, *kinds: str) -> Effect:
    return Effect(lambda values: kind_of_gallery(values["gallery"]) in kinds, text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoFlags(ModelFlags):
    """What is shown, and where.

    Args:
        gallery: What is searched, see above.
        data_dir: The folder of the images of a gallery of embeddings. No file of outside is opened.
        distance: What near means.
        calibration: What is near enough: a JSON file of tfdml evaluate --target=fpir=0.01.
        host: Address to listen at; 0.0.0.0: at all of this machine.
        port: Port to listen at; 0: any that is free.
    """

    gallery: str
    data_dir: str = choice(
        "",
        effect=_for("a gallery that is no folder of images", "embeddings", "database", "retriever"),
    )
    distance: str = choice(
        "euclidean",
        choices=DISTANCES,
        effect=_for("images or embeddings as --gallery", "images", "embeddings"),
    )
    calibration: str = ""
    host: str = "127.0.0.1"
    port: int = choice(8765, check=lambda port: 0 <= port < 2**16)
    model: str = choice(
        "",
        effect=_for(
            "a gallery that does not embed images itself", "images", "embeddings", "database"
        ),
    )


def demo(values: Flags) -> None:
    """Serve the page as the flags say."""
    flags = values.settings(DemoFlags)
    try:
        from tfdml import demo as web
    except ModuleNotFoundError as error:
        raise UserError(
            f"the demo needs the package {error.name}: pip install 'tfdml[demo]'"
        ) from error
    address, folder, model = map(os.path.expanduser, (flags.gallery, flags.data_dir, flags.model))
    if kind_of_gallery(address) == "retriever":
        retriever = Retriever.load(address)
        items = retriever.gallery()
        gallery = web.Gallery(address, items.ids, items.embeddings, items.classes, folder)
        page = web.Demo(
            gallery,
            lambda data: retriever.embed(data)[0],
            str(retriever.path),
            retriever.calibration,
        )
    else:
        source = load_source(flags)
        gallery = web.open_gallery(address, source, folder, flags.distance, flags.batch_size)
        page = web.Demo(gallery, web.embedder_of(source), model)
        page.embed_texts = source.embed_texts if source.embeds_texts else None
    # So that the first search does not wait, and a model of another dimension is refused.
    gallery.search(page.embed(tf.io.encode_jpeg(np.full((256, 256, 3), 127, np.uint8)).numpy()), 1)
    if flags.calibration:
        page.calibration = calibration_of_file(flags.calibration)
    elif model and gallery.distance == "euclidean":
        page.calibration = _of_card(card_of(served_version(Path(model)) or Path(model)))
    if page.calibration:
        page.calibration.for_searches(gallery.distance, len(gallery))
    token = "" if flags.host in ("127.0.0.1", "localhost", "::1") else secrets.token_urlsafe(24)
    web.serve(page, flags.host, flags.port, token)


def _of_card(card: Path | None) -> Calibration | None:
    """Return the threshold of searches in a model card; None where there is none."""
    stored = read_json(card).get("calibration") if card else None
    return (
        Calibration.from_dict(stored, str(card))
        if stored and stored.get("kind") == "fpir"
        else None
    )


COMMAND = Command("demo", demo, Flags(DemoFlags), __doc__, flag_of={"uri": "gallery"})
