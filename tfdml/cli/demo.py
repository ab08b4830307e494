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

--calibration is the JSON file of tfdml evaluate --task=classification --target=fpir=0.01. By default the threshold is
that of the retriever, or one of searches in the model card.

The page is at http://127.0.0.1:PORT and for this machine alone; ssh -L reaches it from another. Ctrl-C ends the demo.
"""

import dataclasses
import os
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfdml.cli.command_line import Command, Flags, ModelFlags, load_source
from tfdml.demo.gallery import check_queries, is_retriever, open_gallery
from tfdml.embeddings.model_card import card_of, served_version
from tfdml.errors import UserError
from tfdml.evaluation import Calibration
from tfdml.export.exporter import calibration_of_file
from tfdml.io.files import read_json
from tfdml.pairwise import DISTANCES
from tfdml.training.settings import choice


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoFlags(ModelFlags):
    """What is shown, and where.

    Args:
        gallery: What is searched, see above.
        data_dir: The folder of the images of a gallery of embeddings. No file of outside is opened.
        distance: What near means, of images or embeddings.
        calibration: What is near enough: a JSON file of tfdml evaluate --target=fpir=0.01.
        port: Port to listen at; 0: any that is free.
    """

    gallery: str
    data_dir: str = ""
    distance: str = choice("euclidean", choices=DISTANCES)
    calibration: str = ""
    port: int = choice(8765, check=lambda port: 0 <= port < 2**16)


def demo(values: Flags) -> None:
    """Serve the page as the flags say."""
    flags = values.settings(DemoFlags)
    try:
        from tfdml.demo import application as web
    except ModuleNotFoundError as error:
        raise UserError(f"the demo needs the package {error.name}: pip install 'tfdml[demo]'") from error
    address, folder = map(os.path.expanduser, (flags.gallery, flags.data_dir))
    # A retriever embeds images itself.
    model = os.path.expanduser(flags.model) or (address if is_retriever(address) else "")
    source = load_source(dataclasses.replace(flags, model=model))
    gallery = open_gallery(address, source, folder, flags.distance)
    if model != address:
        check_queries(gallery, source.fingerprint())
    page = web.Demo(gallery, web.embedder_of(source), model)
    page.embed_texts = source.embed_texts if source.embeds_texts else None
    # So that the first search does not wait, and a model of another dimension is refused.
    gallery.search(page.embed(tf.io.encode_jpeg(np.full((256, 256, 3), 127, np.uint8)).numpy())[None], 1)
    if flags.calibration:
        gallery.calibration = calibration_of_file(flags.calibration)
    elif gallery.calibration is None and gallery.distance == "euclidean":
        gallery.calibration = _of_card(card_of(served_version(Path(model)) or Path(model)))
    if gallery.calibration:
        gallery.calibration.for_searches(gallery.distance, len(gallery))
    web.serve(page, flags.port)


def _of_card(card: Path | None) -> Calibration | None:
    """Return the threshold of searches in a model card; None where there is none."""
    stored = read_json(card).get("calibration") if card else None
    return Calibration.from_dict(stored, str(card)) if stored and stored.get("kind") == "fpir" else None


COMMAND = Command("demo", demo, Flags(DemoFlags), __doc__, {"uri": "gallery"})
