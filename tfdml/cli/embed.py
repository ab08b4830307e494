r"""Write the embeddings of a data set, with the names, labels, roles and groups of its images.

  tfdml embed --model=runs/cars_jrd --out=embeddings/cars
  tfdml embed --model=models/cars --dataset=cars196 --data_dir=/data/cars196 --split=all \
      --out=embeddings/cars
  tfdml embed --model=runs/cars_jrd --truncate_dim=32 --out=embeddings/cars32
  tfdml embed --model=runs/head --features=new.parquet --out=embeddings/new
  tfdml embed --model=runs/signs --texts=queries.txt --out=embeddings/texts
  tfdml embed --model=models/cars --cluster=local --input='/data/**/*.jpg' --out=embeddings/photos

--out gets part-*.parquet, a row per image, and, last of all, manifest.json. The same command
resumes after what is written and ends with the same bytes. tfdml evaluate --model=OUT measures the
embeddings.

--input names images without a data set: files, paths or URLs with * and **, folders (the flag may
be repeated), or one list as --dataset=list reads it, of which only path is required. Bad images are
then left out, and listed in bad_images.csv. With --cluster they are embedded over many processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from tfdml.cli.command_line import Command, Flags, Progress
from tfdml.cli.model_flags import DataFlags, data_choice, load_source, trained_classes
from tfdml.errors import ERROR_TEXT, counted, user_errors
from tfdml.expressions import Arguments
from tfdml.io.files import as_named, read_bytes
from tfdml.names import TEXT, clean, lines
from tfdml.options import changed, option

if TYPE_CHECKING:
    from tfdml.embeddings.backends import EmbeddingBackend
    from tfdml.embeddings.files import PartRecord
    from tfdml.embeddings.passes import EmbeddingPass, Part

_OF_DATA = "no input"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedFlags(DataFlags):
    """What embeds which images, and where the embeddings are written."""

    title: ClassVar[str] = "What is embedded, and where the embeddings are written"

    model: str = changed(DataFlags, "model", default=dataclasses.MISSING)
    dataset: str = changed(DataFlags, "dataset", requires=_OF_DATA)
    features: str = changed(DataFlags, "features", requires=_OF_DATA)
    data_dir: str = changed(DataFlags, "data_dir", requires=_OF_DATA)
    dataset_options: Arguments = changed(DataFlags, "dataset_options", requires=_OF_DATA)
    bad_images: str = changed(DataFlags, "bad_images", requires=_OF_DATA)
    out: str = option(help="Folder to write: new, empty, or begun by the same command.")
    split: str = option(
        "test",
        words=("test", "train", "all", "query", "gallery"),
        requires=_OF_DATA,
        help="Images of unseen or training classes, or both; or one role of the test images.",
    )
    drop: str = option(
        "",
        requires="split=all and no input and no texts",
        help="A CSV file of tfdml audit, maybe edited: images whose action is drop are left out.",
    )
    input: tuple[str, ...] = option(
        (), paths=True, help="In place of a data set, which images: see above."
    )
    texts: str = option(
        "",
        requires=_OF_DATA,
        help="In place of images, a file with a text in each line, for a model of images and "
        "texts; or column, for the texts of the data set.",
    )
    cluster: str = option(
        "",
        requires="no texts",
        help="Embed over Ray: local (processes of this machine), ray://host:10001 or host:6379.",
    )
    actors: int = option(
        0,
        at_least=0,
        requires="cluster",
        help="Processes with the model; 0: one per GPU, or per 4 CPUs.",
    )
    rows_per_file: int = option(
        4096,
        at_least=1,
        help="Images of a Parquet file, rounded up to whole batches; a kill loses the files under "
        "way.",
    )


def embed(flags: EmbedFlags) -> None:
    """Embed as the flags say."""
    import tensorflow as tf

    from tfdml.cluster import bulk_embedding
    from tfdml.embeddings.files import EmbeddingFolder

    if flags.texts:
        _embed_texts(flags)
        return
    work, about = _pass_of(flags)
    if flags.cluster:
        with contextlib.suppress(RuntimeError):  # TensorFlow has looked at them already
            tf.config.set_visible_devices([], "GPU")  # they are left to the actors
    source = load_source(flags)
    folder = EmbeddingFolder(os.path.expanduser(flags.out), work.identity(source))
    about = {**_about(source), **about}
    lines: list[Progress] = []

    def progress(done: int, bad: int, total: int) -> None:
        if not lines:
            lines.append(Progress(total, done))
            if done:
                print(f"resuming after {done:,} of {total:,} images")
        lines[0].images(done, total, bad)

    def embed_parts(parts: Sequence[Part]) -> Iterable[PartRecord]:
        if flags.cluster:
            options = flags.cluster, flags.actors, flags.truncate_dim
            return bulk_embedding.embed_parts(parts, as_named(flags.model), folder, *options)
        return (part.embed(source, folder) for part in parts)

    if not work.run(folder, embed_parts, about, progress):
        print(f"{flags.out} is finished already: nothing to do")
        return
    count, bad = folder.manifest["count"], folder.manifest["bad_images"]
    rate = lines[0].rate(count + bad)
    print(
        f"{counted(count, 'embedding')} of {folder.manifest['dimension']} dimensions in "
        f"{flags.out}, {rate}"
    )
    if bad:
        print(f"{counted(bad, 'image')} could not be read: {flags.out}/bad_images.csv")


def _about(source: EmbeddingBackend) -> dict[str, Any]:
    """Return what the manifest records of a model."""
    model = {"source": source.address, "kind": source.kind, "checksum": source.checksum()}
    return {"model": {**model, "fingerprint": source.fingerprint()}, "view": source.view}


def _embed_texts(flags: EmbedFlags) -> None:
    """Embed the texts of `--texts`, each once; the class of each is the text itself."""
    import numpy as np

    from tfdml.embeddings.files import EmbeddingFolder, ImageTable
    from tfdml.evaluation.views import ViewItems

    if flags.texts == "column":
        parts = data_choice(flags).parts(flags.split)
        written = list(itertools.chain.from_iterable(ViewItems.of(part).texts for part in parts))
    else:
        with user_errors(
            (OSError, UnicodeDecodeError), f"cannot be read: {ERROR_TEXT}", texts=flags.texts
        ):
            written = lines(read_bytes(os.path.expanduser(flags.texts)).decode())
    source = f"texts={flags.texts}"
    texts = list(dict.fromkeys(clean(written, TEXT, source, lambda row: f"line {row + 1}")))
    names = tuple(" ".join(text.split()) for text in texts)  # of one line
    images = ImageTable(
        names, np.arange(len(texts)), np.full(len(texts), "test"), dict(enumerate(names))
    )
    model = load_source(flags)
    vectors = model.embed_texts(texts)
    about = _about(model)
    identity = {"model": about["model"], "texts": images.checksum()}
    folder = EmbeddingFolder(os.path.expanduser(flags.out), identity)
    with folder.opened():
        if not folder.manifest:
            folder.write_part(0, images.columns(), vectors)
            folder.finish(len(texts), {**about, "dataset": {"name": flags.texts}})
    count = counted(len(texts), "embedding")
    print(f"{count} of texts of {vectors.shape[1]} dimensions in {flags.out}")


def _pass_of(flags: EmbedFlags) -> tuple[EmbeddingPass, dict[str, Any]]:
    """Return the images that the flags mean, and what the manifest records of them."""
    import numpy as np

    from tfdml.data.dataset import ImageDataset
    from tfdml.data.images import FileImages
    from tfdml.embeddings.files import ImageTable
    from tfdml.embeddings.passes import EmbeddingPass, images_of
    from tfdml.training.run_data import leave_out_of_all

    sizes = flags.batch_size, flags.rows_per_file
    if flags.input:
        images = images_of(flags.input)
        files = FileImages(images.names)
        part = ImageDataset("input", "all", files, np.zeros(len(images), np.int64))
        about = {"dataset": {"name": ",".join(flags.input)}}
        return EmbeddingPass([part], images, *sizes, skip_bad=True), about
    selection = data_choice(flags)
    splits = selection.parts(flags.split)
    if flags.drop:
        splits = leave_out_of_all(splits, flags.drop, selection.directory)
    images = ImageTable.of(splits, os.path.expanduser(selection.directory))
    options = str(Arguments(selection.options))
    dataset = {"name": selection.name, "options": options, "split": flags.split}
    classes = images.classes
    names = set() if classes is None else set(classes[images.roles != "train"].tolist())
    trained_on = trained_classes(flags.model, selection, names)
    return EmbeddingPass(splits, images, *sizes), {"dataset": dataset, "trained_on": trained_on}


COMMAND = Command(
    "embed",
    embed,
    Flags(EmbedFlags),
    __doc__,
    flag_of={"folder": "out"},
)
