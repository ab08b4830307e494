"""The flags by which commands name a model and the images that it embeds."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from tfdml.effects import Effect
from tfdml.errors import UserError

if TYPE_CHECKING:
    from tfdml.data.dataset import ImageDataset
    from tfdml.embeddings.backends import EmbeddingBackend

SOURCES = """--model is one of
  a run folder, or a .keras file
  a SavedModel, or a folder of SavedModel versions, of which the newest is taken
  a .tflite or .onnx file; how it sees images is read from its export's model_card.json, or given by --resize,
  --resize_mode
  grpc://host:port/NAME, rest://host:port/NAME or http://host:port/v1/models/NAME: TF Serving, or with /VERSION"""

flags.DEFINE_string("model", "", "What embeds: a path or an address, see above.", module_name=__name__)
flags.DEFINE_string("dataset", "", "Data set, as in bin/train; for a run folder, its own.", module_name=__name__)
flags.DEFINE_string("data_dir", "", "Where the unpacked data set lies.", module_name=__name__)
flags.DEFINE_string("dataset_options", "", "Options of the data set, as in bin/train.", module_name=__name__)
flags.DEFINE_enum(
    "bad_images",
    "error",
    ["error", "skip"],
    "What to do with images that cannot be decoded; to skip them, all are decoded first.",
    module_name=__name__,
)
flags.DEFINE_integer("batch_size", 100, "Images per batch or request.", lower_bound=1, module_name=__name__)
flags.DEFINE_integer(
    "resize", 0, "For a .tflite or .onnx file without a card: pixels to resize to.", lower_bound=0, module_name=__name__
)
flags.DEFINE_enum(
    "resize_mode",
    "",
    ["", "shorter", "squash", "pad"],
    "For a .tflite or .onnx file: as in bin/train.",
    module_name=__name__,
)
flags.DEFINE_integer(
    "image_size", 0, "For a .tflite or .onnx file: checked against its input.", lower_bound=0, module_name=__name__
)
flags.DEFINE_string("pad_color", "", "For a .tflite or .onnx file: as in bin/train.", module_name=__name__)
flags.DEFINE_float("timeout", 60.0, "Seconds that a request to an endpoint may take.", module_name=__name__)

_VIEW_FILE = Effect(
    lambda given: Path(given["model"]).suffix in (".tflite", ".onnx"),
    "a .tflite or .onnx file as --model; every other model has its view inside",
)
#: When the flags above have an effect, where `--model` embeds the images of `--dataset`.
EFFECTS = {
    **dict.fromkeys(("resize", "resize_mode", "image_size", "pad_color"), _VIEW_FILE),
    "timeout": Effect(lambda given: "://" in given["model"], "the address of an endpoint as --model"),
}


@dataclasses.dataclass(frozen=True)
class DataChoice:
    """Which data set the flags mean."""

    name: str
    directory: str
    options: str

    def load(self, split: str) -> ImageDataset:
        """One split; with `--bad_images=skip` without the images that cannot be decoded, of which each is tried."""
        from tfdml import data
        from tfdml.data.faults import check
        from tfdml.training.expressions import parse_arguments

        arguments = parse_arguments(self.options, "--dataset_options")
        dataset = data.load(self.name, self.directory or None, split, **arguments)
        policy = flags.FLAGS.bad_images
        return check(dataset, policy, "decode" if policy == "skip" else "headers")


def chosen_data(model: str) -> DataChoice:
    """The data set of the flags, or that of the run folder `model`.

    Raises:
        UserError: Neither names one, or there is no such model.
    """
    values = flags.FLAGS
    if not math.isfinite(values.timeout) or values.timeout <= 0:
        raise UserError(f"--timeout={values.timeout} must be a number of seconds above 0")
    if "://" not in model and not os.path.exists(os.path.expanduser(model or ".")):
        raise UserError(f"--model={model}: there is no such file or folder")
    if values.dataset:
        return DataChoice(values.dataset, values.data_dir, values.dataset_options)
    from tfdml.training import RunFolder

    if not (Path(model) / "flags.txt").is_file():
        raise UserError("--dataset is missing: only a run folder knows its own")
    stored = RunFolder(model).load_experiment()
    return DataChoice(
        stored.dataset, values.data_dir or stored.data_dir, values.dataset_options or stored.dataset_options
    )


def chosen_source(model: str) -> EmbeddingBackend:
    """The model of the flags, loaded or reached."""
    from tfdml.embeddings.backends import load_backend
    from tfdml.training.distributed import devices

    values = flags.FLAGS
    if Path(model).suffix == ".keras" or (Path(model) / "embedder.keras").is_file():
        # So that a pass that was stopped and continued gives the bits of an uninterrupted one.
        devices.one_operation_at_a_time()
    return load_backend(
        model,
        resize=values.resize,
        resize_mode=values.resize_mode,
        image_size=values.image_size,
        pad_color=values.pad_color,
        timeout=values.timeout,
    )
