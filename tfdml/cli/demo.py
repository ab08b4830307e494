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

from __future__ import annotations

import dataclasses
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tfdml.cli.command_line import Command, Flags, check_web, load_tensorflow
from tfdml.cli.evaluation.thresholds import read_calibration
from tfdml.cli.model_flags import ModelFlags, kind_of_gallery, load_source
from tfdml.errors import counted
from tfdml.options import changed, condition, option
from tfdml.registry import DISTANCES
from tfdml.web.settings import WebSettings

if TYPE_CHECKING:
    from tfdml.evaluation import Calibration
    from tfdml.web.page import Demo


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoFlags(ModelFlags):
    """What is shown, and where."""

    title: ClassVar[str] = "What is shown, and where"

    model: str = changed(ModelFlags, "model", requires="embeds_images")
    gallery: str = option(help="What is searched, see above.")
    data_dir: str = option(
        "",
        requires="names_images",
        help="The folder of the images of a gallery of embeddings. No file of outside is opened.",
    )
    distance: str = option(
        "euclidean", words=DISTANCES, requires="is_measured", help="What near means."
    )
    calibration: str = option(
        "", help="What is near enough: a JSON file of tfdml evaluate --target=fpir=0.01."
    )
    port: int = option(
        8765, at_least=0, at_most=65535, help="Port to listen at; 0: any that is free."
    )

    @condition("a gallery that does not embed images itself")
    def embeds_images(self) -> bool:
        """Whether images are embedded by --model."""
        return kind_of_gallery(self.gallery) != "retriever"

    @condition("a gallery that is no folder of images")
    def names_images(self) -> bool:
        """Whether the gallery names its images."""
        return kind_of_gallery(self.gallery) != "images"

    @condition("images or embeddings as --gallery")
    def is_measured(self) -> bool:
        """Whether the distance is chosen here."""
        return kind_of_gallery(self.gallery) in ("images", "embeddings")


def demo(flags: DemoFlags, settings: WebSettings) -> None:
    """Serve the page as the flags say."""
    check_web()
    from tfdml.web import server

    is_local = settings.host in ("127.0.0.1", "localhost", "::1")
    token = "" if is_local else secrets.token_urlsafe(24)
    with server.listen(settings.host, flags.port) as opened:
        print(f"loading {flags.model or flags.gallery}", flush=True)
        load_tensorflow()
        from tfdml.web.application import application
        from tfdml.web.lanes import Lanes
        from tfdml.web.page import page_routes

        shown = _loaded(flags)
        lanes = Lanes(settings)
        app = application(page_routes(shown, lanes), token)
        host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
        address = server.address_of(opened, host) + (f"/?token={token}" if token else "/")
        count = counted(len(shown.gallery), "image")
        server.serve(app, opened, f"{count} at {address} (Ctrl-C ends the demo)", lanes)


def _loaded(flags: DemoFlags) -> Demo:
    """Return the model and the gallery that the flags name."""
    import numpy as np
    import tensorflow as tf

    from tfdml.retrieval import open_gallery
    from tfdml.web.page import Demo, embedder_of
    from tfdml.web.pictures import pictures_of, pictures_of_gallery

    address = os.path.expanduser(flags.gallery)
    folder = os.path.expanduser(flags.data_dir)
    model = os.path.expanduser(flags.model)
    if kind_of_gallery(address) == "retriever":
        retriever: Any = open_gallery(address)
        pictures = pictures_of_gallery(retriever, folder, retriever.about.model)
        page = Demo(pictures, lambda data: retriever.embed(data)[0], str(retriever.path))
        page.calibration = retriever.calibration
        fingerprint = pictures.model
    else:
        source = load_source(flags)
        pictures = pictures_of(address, source, folder, flags.distance, flags.batch_size)
        page = Demo(pictures, embedder_of(source), model)
        page.embed_texts = source.embed_texts if source.embeds_texts else None
        fingerprint = source.fingerprint()
    # So that the first search does not wait, and a model of another dimension is refused.
    gray = np.full((256, 256, 3), 127, np.uint8)
    pictures.search(page.embed(tf.io.encode_jpeg(gray).numpy()), 1)
    if flags.calibration:
        page.calibration = read_calibration(flags.calibration)
    elif model and pictures.distance == "euclidean":
        page.calibration = _of_card(Path(model))
    if page.calibration:
        page.calibration.for_searches(pictures.distance, len(pictures))
        page.calibration.check_models(fingerprint, pictures.model)
    return page


def _of_card(model: Path) -> Calibration | None:
    """Return the threshold of searches that the card of a model has for its vectors; None where
    there is none."""
    from tfdml.embeddings.model_card import card_of, entry_of, served_version
    from tfdml.evaluation.calibration import stored_calibration

    model = served_version(model) or model
    card = card_of(model)
    calibration = stored_calibration(entry_of(card, model), card) if card else None
    if calibration is None or calibration.kind != "fpir":
        return None
    return calibration


COMMAND = Command(
    "demo",
    demo,
    Flags(DemoFlags, WebSettings),
    __doc__,
    flag_of={"uri": "gallery"},
    needs_tensorflow=False,
)
